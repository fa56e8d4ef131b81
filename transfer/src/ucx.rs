//! Blocks over UCX: RDMA, RoCE, shared memory, CUDA IPC or TCP, whatever UCX finds between two workers.
//!
//! The session's frames travel over its own stream, as over any transport. Blocks are put one-sidedly into the peer's registered pool.
//! A batch is flushed before the Write frame that names its blocks is sent; flushed in UCX means applied at the target. Only the peer's
//! acknowledgement shows that, so the next batches leave meanwhile. Either pool may be a GPU's memory, if UCX has CUDA support.
//!
//! `engine` holds the registered pool, `worker` one thread's progress, `endpoint` a connection. Each owns one kind of C handle. Only
//! this module calls UCX.

mod endpoint;
mod engine;
mod worker;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::{Access, BlockRun, Frame, TransferError, TransportKind, WriteBatch};
use baton_types::{Epoch, PoolGeometry, WorkerId};

pub(crate) use endpoint::Endpoint;
pub(crate) use engine::UcxEngine;
pub(crate) use worker::Worker;

use crate::device::Pool;
use crate::links::Links;
use crate::load::Load;
use crate::transport::{Progress, Transport};
use endpoint::Request;

/// Batches under way at once: while one waits for the peer's acknowledgement, the others are sent.
const IN_FLIGHT: usize = 4;

/// How long cancelled batches may take to be applied before their endpoint is closed by force. Batches are small: if one takes longer,
/// the peer is stalled.
const GRACE: Duration = Duration::from_millis(250);

/// UCX transports by which a process writes to another's memory without that process or its network card taking part. The receiver
/// cannot cut them off. So it needs proof that the writer has ended (I3), which only a unix socket gives.
const DIRECT: [&str; 8] = ["sysv", "posix", "cma", "knem", "xpmem", "cuda_ipc", "rocm_ipc", "ze_ipc"];

/// Puts from one pool into another.
pub(crate) struct Ucx {
    peer: WorkerId,
    local: Pool,
    /// Address of the peer's pool, and its size in bytes.
    base: u64,
    bytes: u64,
    /// Batches under way, oldest first. Declared before `endpoint`, so that their requests are dropped first.
    in_flight: VecDeque<BatchInFlight>,
    endpoint: Endpoint,
}

/// A batch under way, with the memory it is sent from.
struct BatchInFlight {
    load: Load,
    /// Its unfinished puts, and the flush behind them.
    requests: Vec<Request>,
}

impl Ucx {
    /// Connects to the pool of `peer`, whose shape is `geometry`. `direct`: the peer can tell when this process has ended, so transports
    /// that the peer cannot cut off are allowed.
    pub(crate) fn connect(
        engine: &Arc<UcxEngine>,
        peer: WorkerId,
        geometry: &PoolGeometry,
        access: &Access,
        direct: bool,
    ) -> Result<Ucx, TransferError> {
        if access.bytes < geometry.bytes() as u64 || access.base.checked_add(access.bytes).is_none() {
            let problem = format!("{} bytes, its geometry needs {}", access.bytes, geometry.bytes());
            return Err(TransferError::Protocol { peer, field: "access", problem });
        }
        let lost = |cause: String| TransferError::PeerLost { peer, cause };
        let endpoint = Endpoint::connect(Worker::new(engine)?, &access.worker, &access.key).map_err(lost)?;
        let over = endpoint.transports().map_err(lost)?;
        // I3
        if let Some(name) = over.iter().find(|name| !direct && DIRECT.contains(&name.as_str())) {
            let cause =
                format!("UCX chose {name}, which nobody can cut off between containers; exclude it by TLS=^{name}");
            return Err(lost(cause));
        }
        tracing::info!(%peer, over = over.join(","), "UCX endpoint made");
        let (local, base, bytes) = (engine.pool().clone(), access.base, access.bytes);
        Ok(Ucx { peer, local, base, bytes, in_flight: VecDeque::new(), endpoint })
    }

    fn lost(&self, cause: String) -> TransferError {
        TransferError::PeerLost { peer: self.peer, cause }
    }

    /// Drops the requests that are done.
    fn settle(&mut self) -> Result<(), TransferError> {
        while self.endpoint.worker().progress() {}
        let mut failed = self.endpoint.failure();
        let mut is_open = |request: &Request| match request.poll() {
            Ok(done) => !done,
            Err(cause) => {
                failed.get_or_insert(cause);
                false
            }
        };
        self.in_flight.iter_mut().for_each(|sent| sent.requests.retain(&mut is_open));
        failed.map_or(Ok(()), |cause| Err(self.lost(cause)))
    }
}

impl Transport for Ucx {
    fn kind(&self) -> TransportKind {
        TransportKind::Ucx
    }

    fn depth(&self) -> usize {
        IN_FLIGHT
    }

    fn submit(&mut self, load: Load, _: &mut Links) -> Result<(), TransferError> {
        self.in_flight.push_back(BatchInFlight { load, requests: Vec::new() });
        let Some(BatchInFlight { load, requests }) = self.in_flight.back_mut() else { return Ok(()) };
        for run in joined(&load.batch) {
            let inside = run.target.checked_add(run.len).is_some_and(|end| end as u64 <= self.bytes);
            let registered = !load.is_staged();
            let from = match registered {
                true => self.endpoint.worker().engine().at(run.source, run.len),
                false => load.source(&self.local, &run),
            };
            let (Some(from), true) = (from, inside) else {
                let problem = format!("{} bytes at {} lie outside its own pool", run.len, run.target);
                return Err(TransferError::Protocol { peer: self.peer, field: "blocks", problem });
            };
            // SAFETY: a checked range, either of the pool, unchanged until the handoff's end is reported, or of the batch's own
            // memory, kept as long as the endpoint may read it. The remote range is lent to this handoff until this session
            // says that it has stopped (I3).
            let put = unsafe { self.endpoint.put(from, run.len, self.base + run.target as u64, registered) };
            let lost = |cause| TransferError::PeerLost { peer: self.peer, cause };
            requests.extend(put.map_err(lost)?);
        }
        let lost = |cause| TransferError::PeerLost { peer: self.peer, cause };
        requests.extend(self.endpoint.flush().map_err(lost)?);
        Ok(())
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        self.settle()?;
        if self.in_flight.front().is_none_or(|sent| sent.requests.is_empty()) {
            self.in_flight
                .pop_front()
                .into_iter()
                .for_each(|sent| links.own.push(&Frame::Write(sent.load.batch.head(0))));
            return Ok(Progress::Flushed);
        }
        Ok(if self.endpoint.worker().arm()? { Progress::Blocked } else { Progress::Runnable })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.endpoint.worker().fd())
    }

    fn cancel(&mut self, epoch: Epoch, _: &mut Links) -> Result<(), TransferError> {
        // After an error, too, the local pool must no longer be read: close the endpoint by force.
        self.give_up(epoch).inspect_err(|_| {
            self.endpoint.close();
        })
    }
}

impl Ucx {
    /// Waits until nothing of a handoff is under way.
    fn give_up(&mut self, epoch: Epoch) -> Result<(), TransferError> {
        let until = Instant::now() + GRACE;
        loop {
            self.settle()?;
            self.in_flight.retain(|sent| sent.load.batch.epoch != epoch || !sent.requests.is_empty());
            if self.in_flight.iter().all(|sent| sent.load.batch.epoch != epoch) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.lost(format!("what was given up was not applied within {GRACE:?}")));
            }
            self.endpoint.worker().wait(left)?;
        }
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        // Close it before its requests are dropped, so that none of them reads the local pool any more.
        if !self.endpoint.close() {
            // Better leaked than freed under a put.
            self.in_flight.drain(..).for_each(|sent| std::mem::forget(sent.load));
        }
    }
}

/// A batch's runs, with runs merged that are adjacent in both pools.
fn joined(batch: &WriteBatch) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for run in batch.runs() {
        match runs.last_mut() {
            Some(last) if last.source + last.len == run.source && last.target + last.len == run.target => {
                last.len += run.len
            }
            _ => runs.push(run),
        }
    }
    runs
}

#[cfg(test)]
mod tests;
