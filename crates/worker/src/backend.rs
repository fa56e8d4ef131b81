//! What a worker computes on: the setting `backend`, and what the host has.

use std::sync::Arc;

use baton_kernels::KernelError;
use baton_kernels::cuda::{CudaBackend, Driver};
use baton_model::ModelError;
use baton_types::PoolGeometry;

use crate::WorkerError;

baton_runtime::config_enum! {
    /// What computes.
    pub enum BackendKind {
        /// A GPU where there is one that can, else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// A GPU, or the worker does not start.
        Cuda = "cuda",
    }
}

baton_runtime::config_enum! {
    /// As what the weights of layers are kept.
    pub enum Quantization {
        /// What the backend has for their type.
        None = "none",
        /// On a GPU 8-bit floats (E4M3) with a scale for each output, and so the rows that they are multiplied with.
        Fp8 = "fp8",
    }
}

impl Quantization {
    /// The fingerprint of a model with such weights: their KV is not that of others.
    pub(crate) fn of_model(self, fingerprint: u64) -> u64 {
        match self {
            Quantization::None => fingerprint,
            // Any number that is not 0.
            Quantization::Fp8 => fingerprint ^ 0x6670_385f_6534_6d33,
        }
    }
}

/// The CPU, or a GPU that was opened.
pub(crate) enum Chosen<D> {
    Cpu,
    Gpu(Arc<D>),
}

/// The host's first GPU, if the setting wants one, and one line in the log of what was found. Before anything is fetched, so that
/// what is missing is told at once.
pub(crate) fn choose(kind: BackendKind) -> Result<Chosen<Driver>, WorkerError> {
    decide(kind, || Driver::open(0))
}

fn decide<D>(kind: BackendKind, open: impl FnOnce() -> Result<D, KernelError>) -> Result<Chosen<D>, WorkerError> {
    if kind == BackendKind::Cpu {
        return Ok(Chosen::Cpu);
    }
    match open() {
        Ok(device) => Ok(Chosen::Gpu(Arc::new(device))),
        Err(error) if kind == BackendKind::Auto => {
            tracing::info!(%error, "computing on the CPU");
            Ok(Chosen::Cpu)
        }
        Err(error) => Err(WorkerError::Backend(error)),
    }
}

impl Chosen<Driver> {
    /// The same for a pool of this shape: a GPU's kernels do not serve all of them.
    pub fn for_pool(self, kind: BackendKind, geometry: &PoolGeometry) -> Result<Self, WorkerError> {
        match (self, CudaBackend::<Driver>::check(geometry)) {
            (Chosen::Gpu(_), Err(error)) if kind == BackendKind::Auto => {
                tracing::info!(%error, "computing on the CPU");
                Ok(Chosen::Cpu)
            }
            (Chosen::Gpu(_), Err(error)) => Err(ModelError::from(error).into()),
            (chosen, _) => Ok(chosen),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_taken_where_there_is_one_and_demanded_only_by_name() {
        let none = || Err(KernelError::NoDevice("nothing here".to_owned()));
        let said = |chosen: Result<Chosen<u8>, WorkerError>| match chosen {
            Ok(Chosen::Cpu) => "cpu".to_owned(),
            Ok(Chosen::Gpu(_)) => "gpu".to_owned(),
            Err(error) => error.to_string(),
        };
        assert_eq!(said(decide(BackendKind::Auto, || Ok(0))), "gpu");
        assert_eq!(said(decide(BackendKind::Cuda, || Ok(0))), "gpu");
        assert_eq!(said(decide(BackendKind::Auto, none)), "cpu");
        assert_eq!(said(decide(BackendKind::Cpu, || panic!("not asked for"))), "cpu");
        let refused = said(decide(BackendKind::Cuda, none));
        assert_eq!(refused, "--backend cuda: no GPU: nothing here; --backend cpu needs none");
    }
}
