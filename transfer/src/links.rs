//! The connections of one session at the prefill end. The session's own connection can carry every frame. Over TCP there may be further
//! connections, which carry Write frames with their payload and nothing else.
//!
//! Each connection keeps its order; between connections there is none. So a completion says how many writes on the others it comes
//! after. [`crate::tcp`] decides which batch goes over which connection.

use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd};

use baton_handoff::{Frame, WriteHead, Written};
use baton_types::Epoch;

use crate::link::{Got, Link};
use crate::wake::Interest;

/// A further connection, which carries blocks only.
struct More {
    /// Its number in the session, as the peer knows it.
    number: usize,
    link: Link,
}

/// All connections of one session.
pub(crate) struct Links {
    /// The session's own connection.
    pub own: Link,
    more: Vec<More>,
    written: Written,
}

impl Links {
    /// From the session's own connection and those that joined it, each with its number.
    pub(crate) fn new(own: Link, joined: Vec<(u8, Link)>) -> Links {
        let more = joined.into_iter().map(|(number, link)| More { number: number.into(), link });
        Links { own, more: more.collect(), written: Written::default() }
    }

    /// Number of connections.
    pub(crate) fn count(&self) -> usize {
        1 + self.more.len()
    }

    /// The connection at position `at`; position 0 is the session's own.
    pub(crate) fn stream(&self, at: usize) -> &Link {
        at.checked_sub(1).and_then(|at| self.more.get(at)).map_or(&self.own, |more| &more.link)
    }

    /// Position of the connection with the fewest bytes left to send.
    pub(crate) fn lightest(&self) -> usize {
        (0..self.count()).min_by_key(|at| self.stream(*at).end() - self.stream(*at).left()).unwrap_or(0)
    }

    /// Queues a Write frame on the connection at position `at`. The caller queues its payload next.
    pub(crate) fn write(&mut self, at: usize, head: WriteHead) -> &mut Link {
        let link = match at.checked_sub(1).and_then(|at| self.more.get_mut(at)) {
            Some(more) => {
                self.written.count(more.number);
                &mut more.link
            }
            None => &mut self.own,
        };
        link.push(&Frame::Write(head));
        link
    }

    /// Queues a frame on the session's own connection. A completion waits at the peer for every write queued before it.
    pub(crate) fn send(&mut self, mut frame: Frame) {
        self.written.stamp(&mut frame);
        self.own.push(&frame);
    }

    /// As [`Link::forget_pool`], on every connection.
    pub(crate) fn forget_pool(&mut self, epoch: Epoch) {
        self.own.forget_pool(epoch);
        self.more.iter_mut().for_each(|more| more.link.forget_pool(epoch));
    }

    /// Whether any connection has bytes to send.
    pub(crate) fn has_output(&self) -> bool {
        self.own.has_output() || self.more.iter().any(|more| more.link.has_output())
    }

    /// Sends as much as the sockets take.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.own.flush()?;
        self.more.iter_mut().filter(|more| more.link.has_output()).try_for_each(|more| more.link.flush())
    }

    /// What to wait for on each connection, the session's own first. `reads`: whether the session's own is to be read.
    pub(crate) fn interests(&self, reads: bool) -> Vec<(BorrowedFd<'_>, Interest)> {
        let own = match (reads, self.own.has_output()) {
            (false, _) => Interest::Write,
            (true, true) => Interest::ReadWrite,
            (true, false) => Interest::Read,
        };
        let of = |more: &More| if more.link.has_output() { Interest::ReadWrite } else { Interest::Read };
        let more = self.more.iter().map(|more| (more.link.as_fd(), of(more)));
        std::iter::once((self.own.as_fd(), own)).chain(more).collect()
    }

    /// Reads further connections that are `ready` (bit i: further connection i, from 0). The peer sends no frames on them. But it may
    /// close them, and TLS may have records of its own to read.
    pub(crate) fn listen(&mut self, ready: u32) -> Result<(), String> {
        for (at, more) in self.more.iter_mut().enumerate().filter(|(at, _)| ready & 1 << at != 0) {
            match more.link.fill() {
                Ok(Got::Blocked) => {}
                Ok(Got::Ended) => return Err("it closed one of the connections for blocks".into()),
                Ok(Got::Bytes(_)) => return Err(format!("it says something on connection {}, for blocks", at + 1)),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use baton_handoff::{FrameLimits, TransferLimits};

    use super::*;
    use crate::link::Socket;
    use crate::segment::Segment;

    fn link() -> (Link, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let pool = Arc::new(Segment::create("test", 4096).unwrap());
        // SAFETY: nobody else knows the pool yet.
        unsafe { pool.write(0, &[7; 4096]) };
        (Link::new(Socket::Unix(ours), pool.into(), FrameLimits::new(&TransferLimits::default(), 1)), theirs)
    }

    fn write(links: &mut Links, epoch: u64) -> usize {
        let (at, epoch) = (links.lightest(), Epoch(epoch));
        let head = WriteHead { epoch, group: 0, layer: 0, payload: 512, indexes: vec![0] };
        links.write(at, head).push_pool((512 * at, 512), epoch);
        at
    }

    #[test]
    fn writes_go_where_the_least_waits_and_a_completion_counts_them() {
        let ((own, theirs), (second, _b), (fourth, _d)) = (link(), link(), link());
        let mut links = Links::new(own, vec![(1, second), (3, fourth)]);
        assert_eq!([1, 2, 1, 2].map(|epoch| write(&mut links, epoch)), [0, 1, 2, 0]);
        links.flush().unwrap();
        assert!(!links.has_output() && links.stream(0).left() == links.stream(0).end());
        let epoch = Epoch(1);
        links.send(Frame::Complete { epoch, after: vec![], writes: 4, digests: vec![], tail: vec![] });
        links.flush().unwrap();
        let pool = Arc::new(Segment::create("test", 4096).unwrap());
        theirs.set_nonblocking(true).unwrap();
        let mut theirs = Link::new(Socket::Unix(theirs), pool.into(), FrameLimits::new(&TransferLimits::default(), 1));
        theirs.fill().unwrap();
        for _ in 0..2 {
            assert!(matches!(theirs.next_frame(), Ok(Some(Frame::Write(_)))));
            theirs.discard_payload(512).unwrap();
        }
        // Connection 2 does not exist.
        let Ok(Some(Frame::Complete { after, .. })) = theirs.next_frame() else { panic!("a completion") };
        assert_eq!(after, [1, 0, 1]);
    }

    #[test]
    fn what_is_given_up_is_zeros_on_every_connection_and_only_that() {
        use std::io::Read as _;
        let ((own, mut a), (second, mut b)) = (link(), link());
        let mut links = Links::new(own, vec![(1, second)]);
        assert_eq!([1, 1, 2, 2].map(|epoch| write(&mut links, epoch)), [0, 1, 0, 1]);
        links.forget_pool(Epoch(1));
        links.flush().unwrap();
        drop(links);
        for socket in [&mut a, &mut b] {
            let mut bytes = Vec::new();
            socket.read_to_end(&mut bytes).unwrap();
            let (first, second) = bytes.split_at(bytes.len() / 2);
            assert!(first.ends_with(&[0; 512]) && second.ends_with(&[7; 512]));
        }
    }
}
