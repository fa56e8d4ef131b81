//! One stream of a session (unix, TCP, or TLS over TCP): receives frames, sends frames and pool memory, and never blocks.
//!
//! Payload goes straight between socket and pool; only a few bytes around frame borders are buffered. Knows frames, but not what they
//! mean.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use baton_handoff::{Frame, FrameLimits, Malformed, PREFIX, Range, parse_body, parse_prefix};
use baton_types::Epoch;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown,
};

use crate::device::{Pool, Staged};
use crate::tls::TlsStream;

/// Bytes read beyond what is needed now, so that the next frame's head comes with the same read.
const LOOKAHEAD: usize = 2048;
/// Most frames queued for a peer that does not read them. Beyond that nothing more is read from the peer (I5).
pub(crate) const MAX_QUEUED: usize = 256;
/// Most pieces in one system call.
const VECTOR: usize = 64;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A connected, non-blocking stream.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Tls(Box<TlsStream>),
    Unix(UnixStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Tls(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Result of a non-blocking read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Got {
    /// This many bytes were read.
    Bytes(usize),
    /// There is nothing to read now.
    Blocked,
    /// The stream has ended.
    Ended,
}

enum Piece {
    Owned {
        bytes: Vec<u8>,
        sent: usize,
    },
    /// Staged bytes that stand for pool memory of the handoff `of`.
    Staged {
        bytes: Staged,
        sent: usize,
        of: Epoch,
    },
    Pool(Range, Epoch),
    Zeros(usize),
}

/// The stream with its buffers.
pub(crate) struct Link {
    socket: Socket,
    pool: Pool,
    limits: FrameLimits,
    inbox: Vec<u8>,
    /// Bytes of `inbox` already consumed.
    consumed: usize,
    outbox: VecDeque<Piece>,
    /// Frames, or parts of them, in `outbox`.
    frames: usize,
    /// Total bytes ever queued; `left` counts those that were sent.
    bytes_queued: u64,
    left: u64,
    fd_to_send: Option<OwnedFd>,
    fd_received: Option<OwnedFd>,
}

impl Link {
    pub(crate) fn new(socket: Socket, pool: Pool, limits: FrameLimits) -> Link {
        Link {
            socket,
            pool,
            limits,
            inbox: Vec::new(),
            consumed: 0,
            outbox: VecDeque::new(),
            frames: 0,
            bytes_queued: 0,
            left: 0,
            fd_to_send: None,
            fd_received: None,
        }
    }

    /// Whether it is a unix socket: the peer runs on this host, and descriptors can be handed over.
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self.socket, Socket::Unix(_))
    }

    /// Where the peer is, over TCP.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        match &self.socket {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Tls(stream) => stream.peer_address(),
            Socket::Unix(_) => None,
        }
    }

    /// Whether it has TLS.
    pub(crate) fn has_tls(&self) -> bool {
        matches!(self.socket, Socket::Tls(_))
    }

    /// Whether the TLS handshake is still going on. Frames wait for its end.
    pub(crate) fn is_opening(&self) -> bool {
        matches!(&self.socket, Socket::Tls(socket) if socket.is_opening())
    }

    /// The last descriptor received, if not yet taken.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fd_received.take()
    }

    /// Bytes that were read and not yet consumed.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.inbox[self.consumed..]
    }

    fn consume(&mut self, bytes: usize) {
        self.consumed += bytes;
        if self.consumed == self.inbox.len() {
            self.inbox.clear();
            self.consumed = 0;
        }
    }

    /// Reads from the socket into the inbox. Asks for at least what the next frame lacks.
    pub(crate) fn fill(&mut self) -> Result<Got, Error> {
        let lacks = self.lacks();
        self.read_into(&[], lacks.max(LOOKAHEAD))
    }

    /// Bytes still missing from the first frame, as far as known.
    fn lacks(&self) -> usize {
        let Some(prefix) = self.buffered().first_chunk::<PREFIX>() else { return PREFIX - self.buffered().len() };
        let body = parse_prefix(*prefix, &self.limits).map_or(0, |head| head.len);
        (PREFIX + body).saturating_sub(self.buffered().len())
    }

    /// The next `N` bytes, once they are here.
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.buffered().first_chunk::<N>()?;
        self.consume(N);
        Some(bytes)
    }

    /// The next frame, once it is here.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some(prefix) = self.buffered().first_chunk::<PREFIX>() else { return Ok(None) };
        let head = parse_prefix(*prefix, &self.limits)?;
        let Some(body) = self.buffered().get(PREFIX..PREFIX + head.len) else { return Ok(None) };
        let frame = parse_body(&head, body)?;
        self.consume(PREFIX + head.len);
        Ok(Some(frame))
    }

    /// Reads payload into the pool, in the order of `ranges`.
    ///
    /// # Safety
    /// The ranges belong to a reservation this session alone may write to (I3).
    pub(crate) unsafe fn read_payload(&mut self, ranges: &[Range]) -> Result<Got, Error> {
        let Some(&(offset, len)) = ranges.first() else { return Ok(Got::Bytes(0)) };
        if self.buffered().is_empty() {
            return self.read_into(ranges, LOOKAHEAD);
        }
        let count = len.min(self.buffered().len());
        let Some(start) = self.pool.at(offset, count) else { return Err(Errno::FAULT.into()) };
        // SAFETY: inside the mapping; the caller vouches for the range.
        let target = unsafe { std::slice::from_raw_parts_mut(start, count) };
        Ok(Got::Bytes(self.take_into(target)))
    }

    /// Reads payload into memory that stands for pool memory.
    pub(crate) fn read_staged(&mut self, target: &mut [u8]) -> Result<Got, Error> {
        match self.buffered().is_empty() {
            true => self.read_slices(vec![IoSliceMut::new(target)], LOOKAHEAD),
            false => Ok(Got::Bytes(self.take_into(target))),
        }
    }

    /// Copies buffered bytes into `target`, as many as there is room for. Returns how many.
    fn take_into(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.buffered().len());
        target[..count].copy_from_slice(&self.buffered()[..count]);
        self.consume(count);
        count
    }

    /// Reads and drops at most `count` bytes of payload.
    pub(crate) fn discard_payload(&mut self, count: usize) -> Result<Got, Error> {
        if self.buffered().is_empty() {
            match self.read_into(&[], count.clamp(1, 64 << 10))? {
                Got::Bytes(_) => {}
                other => return Ok(other),
            }
        }
        let count = count.min(self.buffered().len());
        self.consume(count);
        Ok(Got::Bytes(count))
    }

    /// One read: into `ranges`, then up to `extra` further bytes into the inbox. Returns the bytes read into the ranges; without ranges,
    /// those read into the inbox.
    fn read_into(&mut self, ranges: &[Range], extra: usize) -> Result<Got, Error> {
        let ranges = &ranges[..ranges.len().min(VECTOR)];
        let mut slices: Vec<IoSliceMut> = Vec::with_capacity(ranges.len() + 1);
        for &(offset, len) in ranges {
            let Some(start) = self.pool.at(offset, len) else { return Err(Errno::FAULT.into()) };
            // SAFETY: inside the mapping, and exclusively this session's: `read_payload`'s caller vouched for it.
            slices.push(IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, len) }));
        }
        self.read_slices(slices, extra)
    }

    /// As `read_into`, but into `slices`.
    fn read_slices(&mut self, slices: Vec<IoSliceMut<'_>>, extra: usize) -> Result<Got, Error> {
        let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
        // I5: consumed bytes are dropped even when the last read ended inside a frame.
        self.inbox.drain(..std::mem::take(&mut self.consumed));
        let before = self.inbox.len();
        self.inbox.resize(before + extra, 0);
        let result = self.receive(slices, before);
        let read = *result.as_ref().unwrap_or(&0);
        self.inbox.truncate(before + read.saturating_sub(wanted));
        match result {
            Ok(0) => Ok(Got::Ended),
            Ok(read) if wanted == 0 => Ok(Got::Bytes(read)),
            Ok(read) => Ok(Got::Bytes(read.min(wanted))),
            Err(error) if is_passing(&error) => Ok(Got::Blocked),
            Err(error) => Err(error),
        }
    }

    fn receive<'a>(&'a mut self, mut iov: Vec<IoSliceMut<'a>>, inbox_from: usize) -> Result<usize, Error> {
        iov.push(IoSliceMut::new(&mut self.inbox[inbox_from..]));
        let socket = match &mut self.socket {
            Socket::Unix(socket) => socket,
            Socket::Tcp(socket) => return Ok(rustix::io::readv(socket, &mut iov)?),
            Socket::Tls(socket) => return socket.read(&mut iov),
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = rustix::net::recvmsg(socket, &mut iov, &mut control, flags)?;
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                self.fd_received = fds.last().or(self.fd_received.take());
            }
        }
        Ok(message.bytes)
    }

    /// Queues a frame.
    pub(crate) fn push(&mut self, frame: &Frame) {
        self.push_bytes(frame.encode());
    }

    /// Queues bytes.
    pub(crate) fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.bytes_queued += bytes.len() as u64;
        self.outbox.push_back(Piece::Owned { bytes, sent: 0 });
        self.frames += 1;
    }

    /// Sends a descriptor to the peer with the next bytes that leave.
    pub(crate) fn push_fd(&mut self, fd: OwnedFd) {
        self.fd_to_send = Some(fd);
    }

    /// Queues pool memory of the handoff `of`. It is read when it is sent.
    pub(crate) fn push_pool(&mut self, (offset, len): Range, of: Epoch) {
        self.bytes_queued += len as u64;
        if let Some(Piece::Pool((start, so_far), before)) = self.outbox.back_mut()
            && *start + *so_far == offset
            && *before == of
        {
            *so_far += len;
            return;
        }
        self.outbox.push_back(Piece::Pool((offset, len), of));
    }

    /// Queues bytes that stand for pool memory of the handoff `of`.
    pub(crate) fn push_staged(&mut self, bytes: Staged, of: Epoch) {
        self.bytes_queued += bytes.bytes().len() as u64;
        self.outbox.push_back(Piece::Staged { bytes, sent: 0, of });
    }

    /// Total bytes ever queued. Everything queued by now has been sent once [`Link::left`] reaches this number.
    pub(crate) fn end(&self) -> u64 {
        self.bytes_queued
    }

    /// Total bytes ever sent.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Replaces a handoff's queued pool memory, and bytes that stand for it, by zeros. The framing stays intact, the pool is no longer
    /// read for the handoff, and its staged bytes are freed (I5).
    pub(crate) fn forget_pool(&mut self, epoch: Epoch) {
        for piece in &mut self.outbox {
            match piece {
                Piece::Pool((_, len), of) if *of == epoch => *piece = Piece::Zeros(*len),
                Piece::Staged { bytes, sent, of } if *of == epoch => {
                    *piece = Piece::Zeros(bytes.bytes().len() - *sent);
                }
                _ => {}
            }
        }
    }

    /// Whether bytes wait to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.is_empty() || matches!(&self.socket, Socket::Tls(socket) if socket.has_output())
    }

    /// Frames that wait to be sent, not counting payload.
    pub(crate) fn frames_queued(&self) -> usize {
        self.frames
    }

    /// Tells the peer that nothing more will be sent.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        if let Socket::Tls(socket) = &mut self.socket {
            socket.finish()?;
        }
        Ok(rustix::net::shutdown(&self.socket, Shutdown::Write)?)
    }

    /// Sends as much as the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        while !self.outbox.is_empty() {
            match self.send() {
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_passing(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if let Socket::Tls(socket) = &mut self.socket { socket.flush() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<usize, Error> {
        let mut iov: Vec<IoSlice> = Vec::with_capacity(self.outbox.len().min(VECTOR));
        for piece in self.outbox.iter().take(VECTOR) {
            iov.push(IoSlice::new(match piece {
                Piece::Owned { bytes, sent } => &bytes[*sent..],
                Piece::Staged { bytes, sent, .. } => &bytes.bytes()[*sent..],
                Piece::Zeros(len) => &ZEROS[..(*len).min(ZEROS.len())],
                Piece::Pool((offset, len), _) => {
                    let Some(start) = self.pool.at(*offset, *len) else { return Err(Errno::FAULT.into()) };
                    // SAFETY: inside the mapping; a handoff's local blocks stay unchanged until its end is reported,
                    // and `forget_pool` comes before that report.
                    unsafe { std::slice::from_raw_parts(start, *len) }
                }
            }));
            // The rest of this piece must leave before the next one.
            if matches!(piece, Piece::Zeros(len) if *len > ZEROS.len()) {
                break;
            }
        }
        if let Socket::Tls(socket) = &mut self.socket {
            return socket.write(&iov);
        }
        let fds: Vec<BorrowedFd> = self.fd_to_send.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(&self.socket, &iov, &mut control, flags)?;
        self.fd_to_send = None;
        Ok(sent)
    }

    fn sent(&mut self, mut count: usize) {
        self.left += count as u64;
        while let Some(piece) = self.outbox.front_mut() {
            let left = match piece {
                Piece::Owned { bytes, sent } => bytes.len() - *sent,
                Piece::Staged { bytes, sent, .. } => bytes.bytes().len() - *sent,
                Piece::Pool((_, len), _) | Piece::Zeros(len) => *len,
            };
            if count >= left {
                count -= left;
                self.frames -= usize::from(matches!(piece, Piece::Owned { .. }));
                self.outbox.pop_front();
                continue;
            }
            match piece {
                Piece::Owned { sent, .. } | Piece::Staged { sent, .. } => *sent += count,
                Piece::Pool((offset, len), _) => (*offset, *len) = (*offset + count, *len - count),
                Piece::Zeros(len) => *len -= count,
            }
            return;
        }
    }
}

/// Whether a system call that failed with this error may be retried.
fn is_passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests;
