//! Blocks from a device's memory into another process's device memory, on one host. The peer's pool is opened here, and a write is a
//! copy between devices, without host memory. Each end's device makes its digests.
//!
//! The pool's handle comes in a frame, and the file descriptor it speaks of beside that frame, over the unix socket. So the two processes
//! may be in different pods, as long as both reach the socket. A pool that has no descriptor is opened by CUDA's legacy handle, which needs
//! more of them ([`OpenedBy::Legacy`]).
//!
//! A copy waits for the computation that stores its blocks, by the mark that its write was queued with. The Write frame that names the
//! blocks is sent once the copy has been applied. The peer cannot cut a copy off. So the session needs the unix socket, by which the
//! peer learns that this process has ended (I3).

use std::os::fd::BorrowedFd;
use std::time::Duration;

use baton_handoff::{Frame, TransferError, TransportKind};
use baton_types::{Epoch, PoolGeometry, WorkerId};

use crate::device::{DEVICE_JOBS, DeviceMemory, JobDone, Moving, OpenedBy, PoolHandle, while_doing};
use crate::in_order::InOrder;
use crate::links::Links;
use crate::load::Load;
use crate::transport::{Progress, Transport};

/// Copies from one device pool into another.
pub(crate) struct CudaIpc {
    peer: WorkerId,
    /// Bytes of the peer's pool.
    bytes: usize,
    copies: InOrder,
    digests: Vec<(u32, u64)>,
}

impl CudaIpc {
    /// Opens the pool of `peer`, whose shape is `geometry`, by the `handle` it has sent. Cancelled copies may take `grace` to finish.
    /// Returns by what it was opened, too.
    pub(crate) fn open(
        peer: WorkerId,
        local: &dyn DeviceMemory,
        handle: PoolHandle,
        geometry: &PoolGeometry,
        grace: Duration,
    ) -> Result<(CudaIpc, OpenedBy), TransferError> {
        let bytes = geometry.bytes();
        let mut queue = local.queue().map_err(while_doing("open a queue"))?;
        let by = queue.open(handle, bytes).map_err(|e| TransferError::PeerLost { peer, cause: e.0 })?;
        Ok((CudaIpc { peer, bytes, copies: InOrder::new(queue, grace), digests: Vec::new() }, by))
    }
}

impl Transport for CudaIpc {
    fn kind(&self) -> TransportKind {
        TransportKind::CudaIpc
    }

    fn depth(&self) -> usize {
        DEVICE_JOBS
    }

    fn submit(&mut self, load: Load, _: &mut Links) -> Result<(), TransferError> {
        let (batch, mut runs) = (load.batch, Vec::new());
        for run in batch.runs() {
            if run.target.checked_add(run.len).is_none_or(|end| end > self.bytes) {
                let problem = format!("{} bytes at {} lie outside its own pool", run.len, run.target);
                return Err(TransferError::Protocol { peer: self.peer, field: "blocks", problem });
            }
            runs.push(Moving { source: run.source, target: run.target, lane: run.lane });
        }
        let len = batch.len;
        self.copies.begin(batch, |queue, batch| queue.copy(batch.after, &runs, len))
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        let Some((batch, done)) = self.copies.next()? else { return Ok(Progress::Blocked) };
        if let (JobDone::Digests(digests), true) = (done, batch.digest) {
            self.digests = batch.runs().map(|run| run.index).zip(digests).collect();
        }
        links.own.push(&Frame::Write(batch.head(0)));
        Ok(Progress::Flushed)
    }

    fn digests(&self) -> bool {
        true
    }

    fn take_digests(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.digests)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.copies.fd()
    }

    fn cancel(&mut self, epoch: Epoch, _: &mut Links) -> Result<(), TransferError> {
        self.copies.cancel(epoch)
    }
}
