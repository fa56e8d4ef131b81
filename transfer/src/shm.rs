//! Blocks over shared memory: the peer's pool is mapped here, and a write is a memory copy. A Write frame without payload follows each
//! copy, so that the peer digests and counts the blocks while later layers are still being computed.

use std::os::fd::OwnedFd;

use baton_handoff::{BlockRun, Frame, TransferError, TransportKind};
use baton_types::{Epoch, PoolGeometry, WorkerId, digest_copy, order_copies, stream_copy};

use crate::device::Pool;
use crate::links::Links;
use crate::load::Load;
use crate::segment::Segment;
use crate::transport::{Progress, Transport};

/// Copies from one pool into another.
pub(crate) struct Shm {
    peer: WorkerId,
    local: Pool,
    remote: Segment,
    load: Option<Load>,
    digests: Vec<(u32, u64)>,
}

impl Shm {
    /// Maps the pool of `peer`, whose shape is `geometry`.
    pub(crate) fn map(peer: WorkerId, local: Pool, fd: OwnedFd, geometry: &PoolGeometry) -> Result<Shm, TransferError> {
        let remote = Segment::open_peer(fd, geometry.bytes())?;
        Ok(Shm { peer, local, remote, load: None, digests: Vec::new() })
    }

    /// Copies one run. Returns its digest if one is wanted, else 0.
    fn copy(&self, load: &Load, run: &BlockRun, next: *const u8) -> Result<u64, TransferError> {
        let (Some(from), Some(to)) = (load.source(&self.local, run), self.remote.at(run.target, run.len)) else {
            let problem = format!("{} bytes at {} lie outside its own pool", run.len, run.target);
            return Err(TransferError::Protocol { peer: self.peer, field: "blocks", problem });
        };
        // SAFETY: checked above. The local block stays unchanged until the handoff's end is reported.
        let bytes = unsafe { std::slice::from_raw_parts(from, run.len) };
        // SAFETY: both ranges were checked and lie in different mappings. The remote block is lent to this handoff until
        // this session says it stopped (I3).
        unsafe {
            if load.batch.digest {
                return Ok(digest_copy(bytes, to, run.lane, next));
            }
            stream_copy(bytes, to, next);
        }
        Ok(0)
    }
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn submit(&mut self, load: Load, _: &mut Links) -> Result<(), TransferError> {
        self.load = Some(load);
        Ok(())
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        let Some(load) = self.load.take() else { return Ok(Progress::Flushed) };
        self.digests.clear();
        for (run, next) in load.runs_and_next(&self.local) {
            let digest = self.copy(&load, &run, next)?;
            if load.batch.digest {
                self.digests.push((run.index, digest));
            }
        }
        order_copies();
        links.own.push(&Frame::Write(load.batch.head(0)));
        Ok(Progress::Flushed)
    }

    fn digests(&self) -> bool {
        true
    }

    fn take_digests(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.digests)
    }

    fn cancel(&mut self, _: Epoch, _: &mut Links) -> Result<(), TransferError> {
        self.load = None;
        Ok(())
    }
}
