//! Blocks over shared memory: the peer's pool is mapped here, and a write is a memory copy. A Write frame without payload
//! follows it, so that the peer digests and counts it while later layers are still being computed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use baton_types::{PoolGeometry, WorkerId};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::TransferError;
use crate::link::Link;
use crate::options::TransportKind;
use crate::segment::Segment;
use crate::transport::{BATCH_BYTES, Batch, Progress, Transport};
use crate::wire::Frame;

struct Copy {
    from: usize,
    to: usize,
    len: usize,
}

/// Copies from one pool into another.
pub(crate) struct Shm {
    peer: WorkerId,
    local: Arc<Segment>,
    remote: Segment,
    geometry: PoolGeometry,
    queue: VecDeque<Copy>,
    /// Says that the queue's copies were made.
    notice: Option<Frame>,
}

impl Shm {
    /// Maps the pool of `peer`, whose shape is `geometry`.
    pub(crate) fn map(
        peer: WorkerId,
        local: Arc<Segment>,
        fd: OwnedFd,
        geometry: PoolGeometry,
    ) -> Result<Shm, TransferError> {
        let remote = Segment::open_peer(fd, geometry.bytes())?;
        Ok(Shm { peer, local, remote, geometry, queue: VecDeque::new(), notice: None })
    }
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn submit(&mut self, batch: Batch, _: &mut Link) -> Result<(), TransferError> {
        for write in &batch.writes {
            if self.geometry.blocks.get(batch.group).is_none_or(|blocks| write.target.0 >= *blocks) {
                let problem = format!("{} lies outside its own pool", write.target);
                return Err(TransferError::Protocol { peer: self.peer, field: "blocks", problem });
            }
            let to = self.geometry.block_range(batch.group, batch.layer, write.target).start;
            let (from, len) = write.source;
            self.queue.push_back(Copy { from, to, len });
        }
        self.notice = Some(Frame::Write(batch.head(0)));
        Ok(())
    }

    fn poll(&mut self, link: &mut Link) -> Result<Progress, TransferError> {
        let mut copied = 0;
        while let Some(copy) = self.queue.pop_front() {
            let ends = (self.local.at(copy.from, copy.len), self.remote.at(copy.to, copy.len));
            let (Some(from), Some(to)) = ends else {
                return Err(TransferError::os("copy a block", "it lies outside the pools"));
            };
            // SAFETY: both ranges were checked and lie in different mappings. The local block stays unchanged until the
            // handoff's end is reported; the remote one is lent to this handoff until this session says it stopped (I3).
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len) };
            copied += copy.len;
            if copied >= BATCH_BYTES {
                break;
            }
        }
        if !self.queue.is_empty() {
            return Ok(Progress::Runnable);
        }
        // The system calls that carry it order the copies before it.
        self.notice.take().into_iter().for_each(|notice| link.push(&notice));
        Ok(Progress::Flushed)
    }

    fn cancel(&mut self, _: &mut Link) {
        self.queue.clear();
        self.notice = None;
    }
}

/// Connects to an abstract unix socket without ever blocking: a full backlog is an error like any other.
pub(crate) fn connect(name: &[u8]) -> Result<UnixStream, rustix::io::Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(socket.as_fd(), &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(UnixStream::from(socket))
}
