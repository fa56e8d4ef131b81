//! [`GpuRanks`]: ranks on a GPU each, which exchange by NCCL.
//!
//! Every exchange begins with a meeting of the ranks' threads, so that none puts work into its stream that waits for a rank which has
//! failed (I5). Parts are shared whole and each rank adds them up itself, in the order of ranks: NCCL's own sums have an order that depends
//! on how much is summed (I1). Never run on GPUs so far.

use std::sync::Arc;

use baton_engine::RunError;
use baton_kernels::cuda::{CudaBackend, Driver, Gpus, Memory};
use baton_kernels::{Backend, KernelError};

use super::Collective;
use super::meeting::Meeting;

/// One rank's side of the exchange between GPUs.
pub struct GpuRanks {
    gpus: Arc<Gpus>,
    meeting: Arc<Meeting>,
    rank: usize,
    /// Every rank's part of a sum.
    parts: Vec<Memory<Driver>>,
}

fn failed(error: KernelError) -> RunError {
    RunError(error.to_string())
}

impl GpuRanks {
    /// Connects the GPUs of `backends`, whose numbers are `ordinals`, for sums of up to `elements` elements. Blocks for seconds.
    ///
    /// # Errors
    /// Without NCCL on this host; when it cannot connect them, or one has no room.
    pub fn connect(
        ordinals: &[u32],
        backends: &[CudaBackend<Driver>],
        elements: usize,
    ) -> Result<Vec<GpuRanks>, KernelError> {
        let gpus = Gpus::connect(ordinals)?;
        let meeting = Arc::new(Meeting::new(backends.len()));
        let one = |(rank, backend): (usize, &CudaBackend<Driver>)| {
            let parts = backends.iter().map(|_| backend.buffer(elements)).collect::<Result<_, _>>()?;
            Ok(GpuRanks { gpus: Arc::clone(&gpus), meeting: Arc::clone(&meeting), rank, parts })
        };
        backends.iter().enumerate().map(one).collect()
    }
}

impl Collective<CudaBackend<Driver>> for GpuRanks {
    fn all_reduce(
        &mut self,
        backend: &mut CudaBackend<Driver>,
        x: &mut Memory<Driver>,
        elements: usize,
    ) -> Result<(), RunError> {
        self.meeting.meet()?;
        backend.share(&self.gpus, self.rank, x, elements, &self.parts).map_err(failed)?;
        backend.sum_of(x, &self.parts, elements).map_err(failed)
    }

    fn gather(
        &mut self,
        backend: &mut CudaBackend<Driver>,
        part: &Memory<Driver>,
        rows: usize,
        splits: &[usize],
        whole: &mut Memory<Driver>,
    ) -> Result<(), RunError> {
        self.meeting.meet()?;
        backend.collect(&self.gpus, self.rank, part, rows, splits, whole).map_err(failed)
    }

    /// Also ends what waits on the devices.
    fn abort(&self, why: &RunError) {
        self.meeting.abort(why);
        self.gpus.abort();
    }

    fn reset(&mut self) -> Result<(), RunError> {
        if self.gpus.aborted() {
            return Err(RunError("a GPU's rank has failed before; start the worker again".to_owned()));
        }
        self.meeting.reset();
        Ok(())
    }
}
