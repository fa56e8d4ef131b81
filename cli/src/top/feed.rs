//! The feed of a router's live page: server-sent events by HTTP/1.0. When it breaks off it is opened again, after growing waits.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::snapshot::{Snapshot, Text};
use crate::status::send_get;

/// The feed's path, beside the page.
const PATH: &str = "/page/events";
/// Longest wait for a connection with the beginning of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest silence. Routers send twice a second; a worker that does not answer holds an event up for seconds.
const SILENCE: Duration = Duration::from_secs(15);
/// Most bytes of the head of an answer, and of what an answer says that is no feed (I5).
const HEAD: usize = 16 << 10;
/// Most bytes of an event: 16,384 workers, the most that a registry holds, need 16 MB (I5).
const EVENT: usize = 64 << 20;
/// The first wait before the feed is opened again, and the longest.
const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(10);

/// Where the feed is.
#[derive(Clone, Debug)]
pub struct Source {
    /// HOST:PORT of the router's admin endpoint.
    pub admin: String,
    /// The file with the token, if the endpoint needs one.
    pub token: Option<PathBuf>,
}

/// What is new.
#[derive(Debug)]
pub enum News {
    Snapshot(Box<Snapshot>),
    /// The feed broke off, or could not be opened again. It is tried after this time.
    Lost {
        why: String,
        again: Duration,
    },
}

/// An open feed.
#[derive(Debug)]
pub struct Feed {
    stream: TcpStream,
    events: Events,
    buffer: Vec<u8>,
}

impl Source {
    /// Opens the feed.
    ///
    /// # Errors
    /// In words for the user: nobody is there, it is no router, or it wants a token.
    pub async fn open(&self) -> anyhow::Result<Feed> {
        let opened = timeout(PATIENCE, self.ask()).await;
        opened.unwrap_or_else(|_| bail!("no answer at {} within {} s", self.admin, PATIENCE.as_secs()))
    }

    async fn ask(&self) -> anyhow::Result<Feed> {
        let admin = &self.admin;
        let token = match &self.token {
            Some(path) => Some(
                tokio::fs::read_to_string(path)
                    .await
                    .with_context(|| format!("reading {}, the file of --admin-token-file", path.display()))?,
            ),
            None => None,
        };
        let found = tokio::net::lookup_host(admin).await.with_context(|| format!("looking up {admin} (--admin)"))?;
        let asked = ask_any(found, token.as_deref().map(str::trim)).await;
        let mut stream = asked.with_context(|| format!("no router answers at {admin} (--admin)"))?;
        let mut read = Vec::new();
        let begin = loop {
            ensure!(read.len() < HEAD, "what answers at {admin} is no router");
            if stream.read_buf(&mut read).await? == 0 {
                bail!("what answers at {admin} is no router");
            }
            if let Some(at) = read.windows(4).position(|end| end == b"\r\n\r\n") {
                break at + 4;
            }
        };
        let rest = read.split_off(begin);
        let head = String::from_utf8_lossy(&read);
        let status = head.strip_prefix("HTTP/1.").and_then(|head| head.split_whitespace().nth(1)).unwrap_or_default();
        if status != "200" {
            let mut said = rest;
            // What was read until then is enough.
            let _ = stream.take(HEAD as u64).read_to_end(&mut said).await;
            bail!("{}", self.refusal(status, &Text::from(String::from_utf8_lossy(&said).trim().to_owned())));
        }
        ensure!(head.to_ascii_lowercase().contains("text/event-stream"), "what answers at {admin} is no router");
        Ok(Feed { stream, events: Events::default(), buffer: rest })
    }

    /// Why the feed cannot be had, and what helps.
    fn refusal(&self, status: &str, said: &Text) -> String {
        let Source { admin, token } = self;
        match (status, token) {
            ("401", None) => format!("the router at {admin} wants a token; name its file by --admin-token-file"),
            ("401", Some(path)) => format!("the router at {admin} does not take the token in {}", path.display()),
            ("404", _) => format!("{admin} has no live page; is it the admin address of a router? A worker's has none"),
            _ => format!("the router at {admin} answers {status}: {said}"),
        }
    }
}

/// Asks the first of these addresses at which somebody listens: a name may have several, as `localhost` has.
async fn ask_any(addresses: impl Iterator<Item = SocketAddr>, token: Option<&str>) -> io::Result<TcpStream> {
    let mut asked = Err(io::Error::other("the name has no address"));
    for address in addresses {
        asked = send_get(address, PATH, token).await;
        if asked.is_ok() {
            break;
        }
    }
    asked
}

impl Feed {
    /// The next snapshot. Those that a newer one has overtaken are left out.
    pub async fn next(&mut self) -> anyhow::Result<Snapshot> {
        loop {
            let event = self.events.take(&std::mem::take(&mut self.buffer))?;
            if let Some(event) = event {
                return serde_json::from_str(&event).context("what the router says is not understood");
            }
            let read = timeout(SILENCE, self.stream.read_buf(&mut self.buffer)).await;
            let read = read.with_context(|| format!("the router has said nothing for {} s", SILENCE.as_secs()))?;
            ensure!(read.context("the connection broke")? > 0, "the router has ended the feed");
        }
    }
}

/// Tells all that is new, until nobody wants to know it. `first`: the feed, which is open already.
pub async fn follow(source: Source, first: Feed, news: mpsc::Sender<News>) {
    let (mut feed, mut wait) = (Ok(first), SHORTEST);
    loop {
        let why = match feed {
            Ok(feed) => pass_on(feed, &news, &mut wait).await,
            Err(why) => why,
        };
        let why = Text::from(format!("{why:#}")).to_string();
        if news.send(News::Lost { why, again: wait }).await.is_err() {
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST);
        feed = source.open().await;
    }
}

/// Passes snapshots on; returns why there are no more. The first one ends the growth of the waits.
async fn pass_on(mut feed: Feed, news: &mpsc::Sender<News>, wait: &mut Duration) -> anyhow::Error {
    loop {
        match feed.next().await {
            Ok(snapshot) => {
                *wait = if news.send(News::Snapshot(Box::new(snapshot))).await.is_ok() { SHORTEST } else { *wait }
            }
            Err(why) => return why,
        }
        if news.is_closed() {
            return anyhow::anyhow!("nobody looks");
        }
    }
}

/// Server-sent events from bytes (HTML Living Standard, section 9.2), as far as a feed of unnamed events needs them. Pure.
#[derive(Debug, Default)]
struct Events {
    /// The line that is not complete yet, and the data of the event that is not.
    line: Vec<u8>,
    data: String,
}

impl Events {
    /// Takes more bytes; gives the newest event that is complete now.
    fn take(&mut self, bytes: &[u8]) -> anyhow::Result<Option<String>> {
        let mut newest = None;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            ensure!(self.line.len() + self.data.len() <= EVENT, "an event of the feed has more than {EVENT} bytes");
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                let line = std::str::from_utf8(&line).context("the feed is not UTF-8")?.trim_end_matches(['\r', '\n']);
                newest = self.complete(line).or(newest);
            }
        }
        Ok(newest)
    }

    /// Takes a line; an empty one completes an event.
    fn complete(&mut self, line: &str) -> Option<String> {
        if line.is_empty() {
            return Some(std::mem::take(&mut self.data)).filter(|data| !data.is_empty());
        }
        if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data += data.strip_prefix(' ').unwrap_or(data);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn events_are_put_together_and_the_newest_counts() {
        let mut events = Events::default();
        let whole = ": a comment\r\nid: 7\r\ndata: {\"a\":\r\ndata: \"ä\"}\r\n\r\ndata:two\n\n";
        let all: Vec<Option<String>> = whole.bytes().map(|byte| events.take(&[byte]).unwrap()).collect();
        let all: Vec<String> = all.into_iter().flatten().collect();
        assert_eq!(all, ["{\"a\":\n\"ä\"}", "two"]);
        assert_eq!(events.take(whole.as_bytes()).unwrap().unwrap(), "two");
        assert_eq!(events.take(b"\n\n\n").unwrap(), None, "nothing is no event");
        assert!(events.take(b"data: \xff\n").is_err());
    }

    /// I5.
    #[test]
    fn an_event_without_end_is_given_up() {
        let mut events = Events::default();
        let piece = vec![b'x'; 1 << 20];
        let pieces = (0..EVENT / piece.len()).take_while(|_| events.take(&piece).is_ok()).count();
        assert_eq!(pieces, EVENT / piece.len());
        assert!(events.take(b"x").is_err());
    }

    /// Answers one connection after the other with these; the port of it.
    async fn answers(all: Vec<String>) -> (Source, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            let mut asked = Vec::new();
            for answer in all {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let read = stream.read(&mut request).await.unwrap();
                asked.push(String::from_utf8_lossy(&request[..read]).into_owned());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            asked
        });
        (Source { admin, token: None }, server)
    }

    const HEADERS: &str = "HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";

    fn feed(running: &[u64]) -> String {
        let events: String = running.iter().map(|running| format!("data: {{\"running\":{running}}}\n\n")).collect();
        format!("{HEADERS}{events}")
    }

    #[tokio::test]
    async fn a_feed_that_breaks_off_is_opened_again() {
        let (source, server) =
            answers(vec![feed(&[1]), "HTTP/1.0 503 no\r\n\r\nstarting\n".to_owned(), feed(&[2])]).await;
        let (sender, mut news) = mpsc::channel(1);
        let first = source.open().await.unwrap();
        let follow = tokio::spawn(follow(source, first, sender));
        let mut told = Vec::new();
        while told.len() < 5 {
            told.push(match news.recv().await.unwrap() {
                News::Snapshot(snapshot) => format!("{}", snapshot.running),
                News::Lost { why, again } => format!("{why}; {} ms", again.as_millis()),
            });
        }
        let starting = &told[2];
        assert!(starting.ends_with("answers 503: starting; 1000 ms"), "{told:?}");
        assert_eq!(told[0], "1");
        assert_eq!(told[1], "the router has ended the feed; 500 ms");
        assert_eq!(told[3..], ["2", "the router has ended the feed; 500 ms"], "waits begin anew");
        drop(news);
        follow.await.unwrap();
        assert!(server.await.unwrap()[2].starts_with("GET /page/events HTTP/1.0\r\n"));
    }

    #[tokio::test]
    async fn what_is_wrong_is_said_with_what_helps() {
        let said = |source: Source| async move { format!("{:#}", source.open().await.unwrap_err()) };
        for (answer, wanted) in [
            ("HTTP/1.0 401 Unauthorized\r\n\r\n", "wants a token; name its file by --admin-token-file"),
            ("HTTP/1.0 404 Not Found\r\n\r\n", "has no live page; is it the admin address of a router?"),
            ("HTTP/1.0 503 no\r\n\r\ntoo many\x1b[2J\n", "answers 503: too many?[2J"),
            ("HTTP/1.0 200 OK\r\ncontent-type: text/html\r\n\r\n", "is no router"),
            ("SSH-2.0-OpenSSH_9.2\r\n", "is no router"),
        ] {
            let (source, _server) = answers(vec![answer.to_owned()]).await;
            let said = said(source).await;
            assert!(said.contains(wanted), "{said}, not {wanted}");
        }
        let nobody = Source { admin: "127.0.0.1:1".to_owned(), token: None };
        assert!(said(nobody).await.starts_with("no router answers at 127.0.0.1:1 (--admin): "));
        let file = Source { admin: "127.0.0.1:1".to_owned(), token: Some("/nonexistent".into()) };
        assert!(said(file).await.contains("reading /nonexistent, the file of --admin-token-file"));
    }

    #[tokio::test]
    async fn the_token_is_sent() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "secret\n").unwrap();
        let (source, server) = answers(vec![feed(&[4, 5])]).await;
        let source = Source { token: Some(file.path().to_owned()), ..source };
        assert_eq!(source.open().await.unwrap().next().await.unwrap().running, 5);
        assert!(server.await.unwrap()[0].contains("\r\nAuthorization: Bearer secret\r\n"));
    }

    #[tokio::test]
    async fn of_several_addresses_one_that_listens_is_enough() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (nobody, there) = ("127.0.0.1:1".parse().unwrap(), listener.local_addr().unwrap());
        for addresses in [[nobody, there], [there, nobody]] {
            let asked = ask_any(addresses.into_iter(), None).await.unwrap();
            assert_eq!(asked.peer_addr().unwrap(), there);
        }
        assert!(ask_any(std::iter::empty(), None).await.is_err());
    }
}
