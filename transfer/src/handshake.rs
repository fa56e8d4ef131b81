//! How a session starts: each end sends a [`Hello`], which is compared before anything else is read. Then each says who it is.
//!
//! Over a unix socket the caller also sends a descriptor of its own process. By that the decode side can tell when nobody is left to
//! write into its pool (I3). The pool itself is handed out later, to a caller that shows a reservation's key.
//!
//! A further TCP connection of a session starts in the same way, but shows the session's ticket instead of saying who calls.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use baton_handoff::{Frame, Hello, JoinTicket, Malformed, Over, TransferError, fingerprint_mismatch, visitor};
use baton_types::WorkerId;
use rustix::process::PidfdFlags;

use crate::link::{Got, Link};
use crate::tls::wants_tls;
use crate::wake::{Interest, Wake, wait};

/// How long a handshake may take, and what ends it early.
pub(crate) struct HandshakeEnd<'a> {
    pub wake: &'a Wake,
    pub until: Instant,
    pub stopped: &'a dyn Fn() -> bool,
}

/// The decode side's answer to a caller that opens a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The peer pool's blocks per group.
    pub blocks: Vec<u32>,
    /// Lets further connections join the session.
    pub ticket: Option<JoinTicket>,
}

/// What the prefill side knows of itself and of the worker it calls.
pub(crate) struct Caller<'a> {
    pub me: WorkerId,
    pub you: WorkerId,
    pub fingerprint: u64,
    /// What blocks travel over.
    pub over: Over,
    /// Address of `you`, for error messages.
    pub address: &'a str,
}

impl Caller<'_> {
    /// Shakes hands on a session's own connection, at the prefill side.
    pub(crate) fn greet(&self, link: &mut Link, end: &HandshakeEnd) -> Result<Welcome, TransferError> {
        link.push_bytes(Hello { fingerprint: self.fingerprint }.encode());
        compare(self.until(link, end, take_hello)?, self.fingerprint)?;
        if link.is_unix() {
            link.push_fd(own_process()?);
        }
        link.push(&Frame::Identify { me: self.me, you: self.you, over: self.over });
        match self.until(link, end, Link::next_frame)? {
            Frame::Welcome { blocks, ticket } => Ok(Welcome { blocks, ticket }),
            Frame::Reject { reason } => Err(self.cannot(reason)),
            other => Err(self.cannot(format!("it answered {other:?} to a handshake"))),
        }
    }

    /// Asks for a further connection to join a session, at the prefill side. Everything is queued at once, since the session's own
    /// connection has shown that the layouts agree.
    pub(crate) fn ask_to_join(&self, link: &mut Link, ticket: JoinTicket, stream: u8) {
        link.push_bytes(Hello { fingerprint: self.fingerprint }.encode());
        link.push(&Frame::Join { ticket, stream });
    }

    /// Waits for the answer to [`Caller::ask_to_join`].
    pub(crate) fn joined(&self, link: &mut Link, end: &HandshakeEnd) -> Result<(), TransferError> {
        compare(self.until(link, end, take_hello)?, self.fingerprint)?;
        match self.until(link, end, Link::next_frame)? {
            Frame::Joined => Ok(()),
            Frame::Reject { reason } => Err(self.cannot(reason)),
            other => Err(self.cannot(format!("it answered {other:?} to another connection"))),
        }
    }

    fn until<T>(&self, link: &mut Link, end: &HandshakeEnd, next: Next<T>) -> Result<T, TransferError> {
        until(link, end, next).map_err(|error| match error {
            Ends::Closed => TransferError::Closed,
            Ends::Cause(cause) => self.cannot(cause),
        })
    }

    pub(crate) fn cannot(&self, cause: impl ToString) -> TransferError {
        TransferError::Connect { peer: self.you, address: self.address.to_owned(), cause: cause.to_string() }
    }
}

/// What a new connection is for.
pub(crate) enum Arrival {
    /// A peer opens a session.
    Guest(Guest),
    /// A further connection asks to join the session that issued the ticket.
    Stream { ticket: JoinTicket, stream: u8 },
}

/// A peer that opens a session.
pub(crate) struct Guest {
    pub worker: WorkerId,
    /// What its blocks travel over.
    pub over: Over,
    /// Descriptor of its process, over a unix socket.
    pub process: Option<OwnedFd>,
}

/// Shakes hands at the decode side, up to but without Welcome or Joined. A refused peer is told why.
pub(crate) fn receive(
    link: &mut Link,
    me: WorkerId,
    fingerprint: u64,
    end: &HandshakeEnd,
) -> Result<Arrival, TransferError> {
    let ended = |error| match error {
        Ends::Closed => TransferError::Closed,
        Ends::Cause(cause) => TransferError::os("shake hands with a prefill worker", cause),
    };
    link.push_bytes(Hello { fingerprint }.encode());
    compare(until(link, end, take_hello).map_err(ended)?, fingerprint)?;
    let first = until(link, end, Link::next_frame).map_err(ended)?;
    if let Frame::Join { ticket, stream } = first {
        return Ok(Arrival::Stream { ticket, stream });
    }
    let (worker, over) = visitor(&first, me).map_err(|reason| turn_away(link, &reason))?;
    let process = link.take_fd();
    if link.is_unix() && !process.as_ref().is_some_and(is_process) {
        return Err(turn_away(link, "a unix socket needs the caller's process descriptor"));
    }
    Ok(Arrival::Guest(Guest { worker, over, process }))
}

/// Tells the peer why it is refused. Sends only what the socket takes at once, since nobody waits for it.
pub(crate) fn turn_away(link: &mut Link, reason: &str) -> TransferError {
    link.push(&Frame::Reject { reason: reason.to_owned() });
    let _ = link.flush();
    TransferError::os("shake hands with a prefill worker", reason)
}

fn compare(theirs: Hello, ours: u64) -> Result<(), TransferError> {
    if theirs.fingerprint == ours { Ok(()) } else { Err(fingerprint_mismatch(ours, theirs.fingerprint).into()) }
}

fn take_hello(link: &mut Link) -> Result<Option<Hello>, Malformed> {
    if let Some(problem) = wants_tls(link.buffered()) {
        return Err(Malformed::new("session", problem));
    }
    link.take::<{ Hello::LEN }>().map(|bytes| Hello::parse(&bytes)).transpose()
}

fn own_process() -> Result<OwnedFd, TransferError> {
    rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|e| TransferError::os("open a descriptor of this process", e))
}

/// Whether `fd` is a process descriptor: only then does readiness mean that the process has died.
fn is_process(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    info.is_ok_and(|text| text.lines().any(|line| line.starts_with("Pid:")))
}

enum Ends {
    Closed,
    Cause(String),
}

type Next<T> = fn(&mut Link) -> Result<Option<T>, Malformed>;

/// Sends what is queued and reads until `next` returns a value.
fn until<T>(link: &mut Link, end: &HandshakeEnd, next: Next<T>) -> Result<T, Ends> {
    let cause = |e: &dyn ToString| Ends::Cause(e.to_string());
    loop {
        link.flush().map_err(|e| cause(&e))?;
        if let Some(value) = next(link).map_err(|m| Ends::Cause(format!("{}: {}", m.field, m.problem)))? {
            return Ok(value);
        }
        if (end.stopped)() {
            return Err(Ends::Closed);
        }
        // Bytes that are here count even after the deadline: other connections may have been waited for first.
        match link.fill().map_err(|e| cause(&e))? {
            Got::Bytes(_) => continue,
            Got::Ended => return Err(cause(&"it closed the connection during the handshake")),
            Got::Blocked => {}
        }
        let left = end.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(cause(&"no answer to the handshake in time"));
        }
        let interest = if link.has_output() { Interest::ReadWrite } else { Interest::Read };
        wait(end.wake, &[(link.as_fd(), interest)], Some(left)).map_err(|e| cause(&e))?;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use baton_handoff::{FrameLimits, TransferLimits};

    use super::*;
    use crate::link::Socket;
    use crate::segment::Segment;

    fn link(stream: UnixStream) -> Link {
        stream.set_nonblocking(true).unwrap();
        let pool = Arc::new(Segment::create("test", 1).unwrap());
        Link::new(Socket::Unix(stream), pool.into(), FrameLimits::new(&TransferLimits::default(), 1))
    }

    fn guest(arrival: Arrival) -> Guest {
        match arrival {
            Arrival::Guest(guest) => guest,
            Arrival::Stream { .. } => panic!("a guest"),
        }
    }

    /// Runs both sides; the decode side is worker 2 with fingerprint 5.
    fn shake(me: u64, you: u64, fingerprint: u64) -> (Result<Vec<u32>, TransferError>, Result<Guest, TransferError>) {
        let (a, b) = UnixStream::pair().unwrap();
        let decode = std::thread::spawn(move || {
            let mut link = link(b);
            let wake = Wake::new().unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let guest = receive(&mut link, WorkerId(2), 5, &HandshakeEnd { wake: &wake, until, stopped: &|| false });
            if guest.is_ok() {
                link.push(&Frame::Welcome { blocks: vec![7], ticket: None });
                link.flush().unwrap();
            }
            guest.map(self::guest)
        });
        let wake = Wake::new().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let caller = Caller { me: WorkerId(me), you: WorkerId(you), fingerprint, over: Over::Stream, address: "here" };
        let welcome = caller.greet(&mut link(a), &HandshakeEnd { wake: &wake, until, stopped: &|| false });
        (welcome.map(|welcome| welcome.blocks), decode.join().unwrap())
    }

    #[test]
    fn workers_that_agree_learn_of_each_other() {
        let (blocks, guest) = shake(1, 2, 5);
        assert_eq!(blocks, Ok(vec![7]));
        let guest = guest.unwrap();
        assert_eq!(guest.worker, WorkerId(1));
        assert!(guest.process.is_some());
    }

    #[test]
    fn other_layouts_and_other_workers_are_told_apart() {
        let (blocks, guest) = shake(1, 2, 6);
        let blocks = blocks.unwrap_err().to_string();
        assert!(blocks.contains("6 here") && blocks.contains("5 at the peer"), "{blocks}");
        let guest = guest.map(|g| g.worker).unwrap_err().to_string();
        assert!(guest.contains("5 here") && guest.contains("6 at the peer"), "{guest}");
        // The worker restarted: someone else answers at its address.
        let (blocks, guest) = shake(1, 3, 5);
        assert!(guest.is_err());
        assert!(blocks.unwrap_err().to_string().contains("w3 is not here any more, this is w2"));
    }

    #[test]
    fn a_silent_peer_and_a_stranger_end_the_handshake() {
        let (a, b) = UnixStream::pair().unwrap();
        let wake = Wake::new().unwrap();
        let now = HandshakeEnd { wake: &wake, until: Instant::now(), stopped: &|| false };
        assert!(receive(&mut link(a), WorkerId(2), 5, &now).is_err());
        drop(b);
        let (a, b) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut (&b), b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let end = HandshakeEnd { until: Instant::now() + Duration::from_secs(60), ..now };
        let error = receive(&mut link(a), WorkerId(2), 5, &end).map(|a| guest(a).worker).unwrap_err().to_string();
        assert!(error.contains("not a transfer session"), "{error}");
    }
}
