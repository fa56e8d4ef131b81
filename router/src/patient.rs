//! A client's connection that breaks when the client does not read, or does not begin, for too long (I5). Without this, such a client would
//! keep its connection, and what waits to be sent over it, for as long as it likes.
//!
//! A client counts as reading when its system has room for what waits (TCP_USER_TIMEOUT), and when this system takes more bytes for it: its
//! buffers take the next once about a third of what they hold is read.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_runtime::places::{Occupied, Seat};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// How long a connection takes in the rest of a body that nobody wants, so that its client reads the answer. The system would discard the
/// answer if it closed a connection with bytes that were not read.
const LINGER: Duration = Duration::from_secs(2);
/// Most bytes that it takes in.
const LINGER_BYTES: usize = 16 << 20;

/// A connection with a bound on how long a write waits, and on how long a beginning takes.
pub(crate) struct Patient {
    stream: TcpStream,
    patience: Duration,
    /// Runs while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
    beginning: Beginning,
    /// Breaks the connection when it must make room.
    seat: Option<Seat>,
    lingering: Option<Lingering>,
}

/// A connection that is closed on this side.
struct Lingering {
    timer: Pin<Box<Sleep>>,
    bytes: usize,
}

/// What must be complete in time.
enum Beginning {
    /// Nothing.
    None,
    /// So many first bytes.
    Bytes(usize, Pin<Box<Sleep>>),
    /// The head of each request: the first one from the start, later ones once their first byte is here.
    Heads { phase: Phase, time: Duration, head: Option<(u64, Pin<Box<Sleep>>)> },
}

/// Whether a connection waits for a request. Clones share it.
#[derive(Clone)]
pub(crate) struct Phase(Arc<PhaseState>);

struct PhaseState {
    number: AtomicU64,
    unread: AtomicBool,
    seat: Seat,
}

/// A request is being answered.
pub(crate) struct Busy(Phase, #[expect(dead_code, reason = "dropped with it")] Occupied);

impl Phase {
    /// The phase of a connection in this place.
    pub fn new(seat: Seat) -> Phase {
        Phase(Arc::new(PhaseState { number: AtomicU64::new(0), unread: AtomicBool::new(false), seat }))
    }

    /// The head of a request is complete.
    pub fn busy(&self) -> Busy {
        self.0.number.fetch_add(1, Ordering::Relaxed);
        self.0.unread.store(false, Ordering::Relaxed);
        Busy(self.clone(), self.0.seat.occupy())
    }

    /// The rest of a request's body is not wanted.
    pub fn leave_unread(&self) {
        self.0.unread.store(true, Ordering::Relaxed);
    }

    /// An even number, a new one each time, while no request is being answered.
    fn number(&self) -> u64 {
        self.0.number.load(Ordering::Relaxed)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.number.fetch_add(1, Ordering::Relaxed);
    }
}

impl Beginning {
    /// Notes bytes that were read. Fails if the beginning is late.
    fn read(&mut self, bytes: usize, cx: &mut Context<'_>) -> io::Result<()> {
        let late = match self {
            Beginning::None => false,
            Beginning::Bytes(left, timer) => {
                *left = left.saturating_sub(bytes);
                let whole = *left == 0;
                let late = !whole && timer.as_mut().poll(cx).is_ready();
                if whole {
                    *self = Beginning::None;
                }
                late
            }
            Beginning::Heads { phase, time, head } => {
                let now = phase.number();
                if head.as_ref().is_some_and(|(of, _)| *of != now) {
                    *head = None;
                }
                if bytes > 0 && now % 2 == 0 && head.is_none() {
                    *head = Some((now, Box::pin(sleep(*time))));
                }
                head.as_mut().is_some_and(|(_, timer)| timer.as_mut().poll(cx).is_ready())
            }
        };
        match late {
            true => Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not go on with what it began")),
            false => Ok(()),
        }
    }
}

impl Patient {
    /// Writes to `stream` wait for `patience` at most, and so do bytes that the system has taken and the client has no room for, or does not
    /// acknowledge. Without the latter, a slow answer would wait in the system's buffers for minutes before a write does.
    pub fn new(stream: TcpStream, patience: Duration) -> Patient {
        // The system takes whole milliseconds, 0 for none, in 31 bits.
        let bound = patience.clamp(Duration::from_millis(1), Duration::from_millis(i32::MAX as u64));
        if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(Some(bound)) {
            tracing::debug!(%error, "a client that has no room is noticed late");
        }
        Patient { stream, patience, timer: None, beginning: Beginning::None, seat: None, lingering: None }
    }

    /// The client must send its first `bytes` bytes within this time.
    pub fn begins_within(self, time: Duration, bytes: usize) -> Patient {
        Patient { beginning: Beginning::Bytes(bytes, Box::pin(sleep(time))), ..self }
    }

    /// The connection breaks when it must make room for another.
    pub fn placed(self, seat: Seat) -> Patient {
        Patient { seat: Some(seat), ..self }
    }

    /// The head of the first request must be complete within this time; that of each later one within this time from its first byte.
    pub fn heads_within(self, time: Duration, phase: Phase) -> Patient {
        let head = Some((phase.number(), Box::pin(sleep(time))));
        Patient { beginning: Beginning::Heads { phase, time, head }, ..self }
    }

    /// Whether the client may still send a body that nobody wants.
    fn has_unread(&self) -> bool {
        matches!(&self.beginning, Beginning::Heads { phase, .. } if phase.0.unread.load(Ordering::Relaxed))
    }

    /// Completes when the client has closed the connection too, or was waited for long enough.
    fn linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(Lingering { timer, bytes }) = &mut self.lingering else { return Poll::Ready(()) };
        let mut part = [0; 8 << 10];
        while *bytes < LINGER_BYTES {
            let mut part = ReadBuf::new(&mut part);
            match Pin::new(&mut self.stream).poll_read(cx, &mut part) {
                Poll::Ready(Ok(())) if !part.filled().is_empty() => *bytes += part.filled().len(),
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return timer.as_mut().poll(cx),
            }
        }
        Poll::Ready(())
    }

    /// Passes the outcome of a write on; fails when writes have waited for too long.
    fn bounded<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.timer = None;
            return outcome;
        }
        let patience = self.patience;
        ready!(self.timer.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(Err(full)) = self.seat.as_ref().map(|seat| seat.check(cx)) {
            return Poll::Ready(Err(full));
        }
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
        let bytes = buf.filled().len() - before;
        match self.beginning.read(bytes, cx) {
            Ok(()) => outcome,
            Err(late) => Poll::Ready(Err(late)),
        }
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.bounded(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.bounded(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            if !self.has_unread() {
                return Poll::Ready(Ok(()));
            }
            self.lingering = Some(Lingering { timer: Box::pin(sleep(LINGER)), bytes: 0 });
        }
        self.linger(cx).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const PATIENCE: Duration = Duration::from_millis(100);

    async fn pair() -> (Patient, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Patient::new(listener.accept().await.unwrap().0, PATIENCE), client)
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_given_up() {
        let (mut server, _client) = pair().await;
        let bytes = vec![0; 1 << 20];
        let error = loop {
            if let Err(error) = server.write_all(&bytes).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_client_must_begin_in_time_and_may_then_be_silent() {
        for (sent, begins) in [(0, false), (2, false), (3, true)] {
            let (server, mut client) = pair().await;
            let mut server = server.begins_within(PATIENCE, 3);
            client.write_all(&vec![0; sent]).await.unwrap();
            let mut all = [0; 9];
            let read = tokio::time::timeout(PATIENCE * 3, server.read_exact(&mut all)).await;
            let end = read.map(|read| read.map(drop).map_err(|error| error.kind()));
            assert_eq!(end.ok(), (!begins).then_some(Err(io::ErrorKind::TimedOut)), "{sent} bytes");
        }
    }

    #[tokio::test]
    async fn a_client_that_reads_slowly_is_waited_for() {
        let (mut server, mut client) = pair().await;
        let reading = tokio::spawn(async move {
            let (mut all, mut part) = (0, vec![0; 1 << 20]);
            while all < 32 << 20 {
                tokio::time::sleep(PATIENCE / 20).await;
                all += client.read(&mut part).await.unwrap();
            }
        });
        server.write_all(&vec![0; 32 << 20]).await.unwrap();
        reading.await.unwrap();
    }
}
