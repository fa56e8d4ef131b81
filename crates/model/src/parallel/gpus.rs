//! [`GpuRanks`]: ranks with one GPU each. They exchange by what their devices provide; for GPUs that is NCCL.
//!
//! Every exchange begins with a meeting of the ranks' threads, so that no rank queues work into its stream that waits for a failed rank
//! (I5). Ranks send each other whole parts, and each rank sums them itself in the order of ranks, because the order of NCCL's own sums
//! depends on the number of elements (I1).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_engine::RunError;
use baton_kernels::cuda::{Columns, CudaBackend, Device, Exchange, Memory};
use baton_kernels::{Backend, KernelError, Meeting};

use super::Collective;
use crate::error::step_failed;

/// One rank's side of the exchange between devices.
pub struct GpuRanks<D: Device> {
    shared: Arc<Shared<D>>,
    rank: usize,
    /// Every rank's part of a sum.
    parts: Vec<Memory<D>>,
}

struct Shared<D: Device> {
    exchange: Arc<dyn Exchange<D>>,
    meeting: Meeting<RunError>,
    /// Whether this step has begun an exchange, so that devices may be waiting for each other.
    under_way: AtomicBool,
}

impl<D: Device> GpuRanks<D> {
    /// Ranks on these backends, for sums of up to `elements` elements. `exchange` connects their devices in the same order.
    ///
    /// # Errors
    /// When a device has no memory left.
    pub fn new(
        exchange: Arc<dyn Exchange<D>>,
        backends: &[CudaBackend<D>],
        elements: usize,
    ) -> Result<Vec<GpuRanks<D>>, KernelError> {
        let meeting = Meeting::new(backends.len());
        let shared = Arc::new(Shared { exchange, meeting, under_way: AtomicBool::new(false) });
        let one = |(rank, backend): (usize, &CudaBackend<D>)| {
            let parts = backends.iter().map(|_| backend.buffer(elements)).collect::<Result<_, _>>()?;
            Ok(GpuRanks { shared: Arc::clone(&shared), rank, parts })
        };
        backends.iter().enumerate().map(one).collect()
    }

    /// Waits until all ranks are about to exchange.
    fn meet(&self) -> Result<(), RunError> {
        self.shared.meeting.meet()?;
        self.shared.under_way.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl<D: Device> Collective<CudaBackend<D>> for GpuRanks<D> {
    fn all_reduce(&mut self, backend: &mut CudaBackend<D>, x: &mut Memory<D>, elements: usize) -> Result<(), RunError> {
        self.meet()?;
        self.shared.exchange.share(self.rank, backend, x, elements, &self.parts).map_err(step_failed)?;
        backend.sum_of(x, &self.parts, elements).map_err(step_failed)
    }

    fn gather(
        &mut self,
        backend: &mut CudaBackend<D>,
        part: &Memory<D>,
        rows: usize,
        splits: &[usize],
        whole: &mut Memory<D>,
    ) -> Result<(), RunError> {
        self.meet()?;
        self.shared.exchange.collect(self.rank, backend, part, &Columns { rows, splits }, whole).map_err(step_failed)
    }

    /// If the step has begun an exchange, this also ends the devices' waits, and no further step is possible. Otherwise the next step can
    /// go on.
    fn abort(&self, why: &RunError) {
        self.shared.meeting.abort(why);
        if self.shared.under_way.load(Ordering::Relaxed) {
            self.shared.exchange.abort();
        }
    }

    fn reset(&mut self) -> Result<(), RunError> {
        if self.shared.exchange.aborted() {
            return Err(RunError("a GPU's rank has failed before; start the worker again".to_owned()));
        }
        self.shared.meeting.reset();
        self.shared.under_way.store(false, Ordering::Relaxed);
        Ok(())
    }
}
