//! A hub on loopback, with repository information, redirects of large files, byte ranges, and the faults of real networks.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::json;

/// What the hub does wrong with the content of one file, from the first request on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Closes the connection after this many bytes.
    CutAfter(usize),
    /// Ignores the range and sends the file from its start.
    IgnoreRange,
    /// Flips a bit.
    Damage,
    /// Sends half and then nothing, without closing.
    Hang,
    /// Answers with this status.
    Status(u16),
}

#[derive(Clone)]
struct Blob {
    bytes: Vec<u8>,
    etag: String,
    /// Large files are redirected to another path, and named by their SHA-256.
    large: bool,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Blob>,
    extra_names: Vec<String>,
    faults: BTreeMap<String, Vec<Fault>>,
    token: Option<String>,
    /// `file start` of each content request.
    log: Vec<String>,
    /// Connections that hang, kept open.
    hanging: Vec<TcpStream>,
}

#[derive(Clone)]
pub struct Hub {
    state: Arc<Mutex<State>>,
    address: String,
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Another name of the commit.
pub const TAG: &str = "v1.2";
pub const REPOSITORY: &str = "org/name";

impl Hub {
    pub fn start() -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = Hub { state: Arc::default(), address: listener.local_addr().unwrap().to_string() };
        let server = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
        hub
    }

    /// As a worker that shares its files.
    pub fn peer(&self) -> String {
        self.address.clone()
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn add(&self, name: &str, bytes: &[u8], sha256: Option<&str>) {
        let etag = sha256.map_or_else(|| format!("{:040x}", name.len() * 7919 + bytes.len()), str::to_owned);
        let blob = Blob { bytes: bytes.to_vec(), etag, large: sha256.is_some() };
        self.state.lock().unwrap().files.insert(name.to_owned(), blob);
    }

    /// Adds a name to the listing for which there is no file.
    pub fn add_name(&self, name: &str) {
        self.state.lock().unwrap().extra_names.push(name.to_owned());
    }

    /// The next requests for the content of `name` meet these faults, one each.
    pub fn faults(&self, name: &str, faults: &[Fault]) {
        self.state.lock().unwrap().faults.insert(name.to_owned(), faults.to_vec());
    }

    pub fn require_token(&self, token: &str) {
        self.state.lock().unwrap().token = Some(token.to_owned());
    }

    /// Takes the content requests so far, as `file start` or `file start-end`. Requests of only the first byte (for the size) are not included.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header).unwrap_or(0) <= 2 {
                break;
            }
            if let Some((name, value)) = header.split_once(':') {
                headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
            }
        }
        // A client that has gone away is not this hub's concern.
        let _ = self.answer(stream, &path, &headers);
    }

    fn answer(&self, mut out: TcpStream, path: &str, headers: &BTreeMap<String, String>) -> std::io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let allowed = state.token.as_ref().is_none_or(|t| headers.get("authorization") == Some(&format!("Bearer {t}")));
        if !allowed {
            return plain(&mut out, 401, "");
        }
        let revision = path.strip_prefix(&format!("/api/models/{REPOSITORY}/revision/"));
        if revision.is_some_and(|revision| ["main", TAG].contains(&revision)) {
            let names = state.files.keys().chain(&state.extra_names);
            let siblings: Vec<_> = names.map(|name| json!({"rfilename": name})).collect();
            return plain(&mut out, 200, &json!({"sha": COMMIT, "siblings": siblings}).to_string());
        }
        let resolve = format!("/{REPOSITORY}/resolve/{COMMIT}/");
        // As a worker gives it to others.
        let digest = path.strip_prefix("/blobs/");
        let blob = digest.and_then(|digest| state.files.iter().find(|(_, blob)| blob.large && blob.etag == digest));
        let blob = blob.map(|(name, _)| name.clone());
        let (name, direct) = match (path.strip_prefix(&resolve), path.strip_prefix("/cdn/").or(blob.as_deref())) {
            (Some(name), _) => (name, true),
            (None, Some(name)) => (name, false),
            (None, None) => return plain(&mut out, 404, "no such repository"),
        };
        let Some(blob) = state.files.get(name).cloned() else { return plain(&mut out, 404, "no such file") };
        let names = format!("X-Repo-Commit: {COMMIT}\r\nETag: \"{0}\"\r\nX-Linked-Etag: \"{0}\"\r\n", blob.etag);
        if direct && blob.large {
            let location = format!("http://{}/cdn/{name}", self.address);
            return write!(
                out,
                "HTTP/1.1 302 Found\r\n{names}Location: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
        }
        let range = headers.get("range").and_then(|r| r.strip_prefix("bytes=")).and_then(|r| r.split_once('-'));
        let start: usize = range.and_then(|(start, _)| start.parse().ok()).unwrap_or(0);
        let end = range.and_then(|(_, end)| end.parse::<usize>().ok());
        if end == Some(0) {
            return content(&mut out, &names, &blob.bytes, 0, &blob.bytes[..1], 206);
        }
        state.log.push(match end {
            Some(end) => format!("{name} {start}-{end}"),
            None => format!("{name} {start}"),
        });
        let fault = state.faults.get_mut(name).filter(|faults| !faults.is_empty()).map(|faults| faults.remove(0));
        if start >= blob.bytes.len() {
            return plain(&mut out, 416, "");
        }
        let end = end.map_or(blob.bytes.len(), |end| blob.bytes.len().min(end + 1));
        let rest = &blob.bytes[start..end];
        match fault {
            None => content(&mut out, &names, &blob.bytes, start, rest, 206),
            Some(Fault::Status(status)) => plain(&mut out, status, ""),
            Some(Fault::IgnoreRange) => content(&mut out, &names, &blob.bytes, 0, &blob.bytes, 200),
            Some(Fault::Damage) => {
                let mut damaged = blob.bytes.clone();
                damaged[start] ^= 1;
                content(&mut out, &names, &damaged, start, &damaged[start..end], 206)
            }
            Some(Fault::CutAfter(bytes)) => {
                head(&mut out, &names, blob.bytes.len(), start, rest.len(), 206)?;
                out.write_all(&rest[..bytes.min(rest.len())])
            }
            Some(Fault::Hang) => {
                head(&mut out, &names, blob.bytes.len(), start, rest.len(), 206)?;
                out.write_all(&rest[..rest.len() / 2])?;
                state.hanging.push(out);
                Ok(())
            }
        }
    }
}

fn plain(out: &mut TcpStream, status: u16, body: &str) -> std::io::Result<()> {
    write!(out, "HTTP/1.1 {status} S\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

fn head(
    out: &mut TcpStream,
    names: &str,
    total: usize,
    start: usize,
    length: usize,
    status: u16,
) -> std::io::Result<()> {
    let end = start + length - 1;
    write!(
        out,
        "HTTP/1.1 {status} S\r\n{names}Content-Length: {length}\r\nContent-Range: bytes {start}-{end}/{total}\r\nConnection: close\r\n\r\n"
    )
}

fn content(
    out: &mut TcpStream,
    names: &str,
    whole: &[u8],
    start: usize,
    part: &[u8],
    status: u16,
) -> std::io::Result<()> {
    head(out, names, whole.len(), start, part.len(), status)?;
    out.write_all(part)
}
