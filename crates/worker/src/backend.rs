//! Chooses what a worker computes on, by the setting `backend` and the host's GPUs.

use std::sync::Arc;

use baton_kernels::KernelError;
use baton_kernels::cuda::{self, CudaBackend, Driver};
use baton_model::ModelError;
use baton_types::PoolGeometry;

use crate::WorkerConfig;
use crate::choices::{BackendKind, GpuPoolHandles};
use crate::error::{WorkerError, check};

/// The CPU, or opened GPUs, one per rank.
pub(crate) enum Chosen<D> {
    Cpu,
    Gpus(Vec<Arc<D>>),
}

/// Opens one GPU of this host per rank if the setting asks for GPUs. Logs one line when `auto` falls back to the CPU. Runs before a model
/// is fetched, so that a missing GPU is reported at once.
pub(crate) fn choose(config: &WorkerConfig) -> Result<Chosen<Driver>, WorkerError> {
    let legacy = config.gpu_pool_handles == GpuPoolHandles::Legacy;
    decide(config, cuda::devices, |number| {
        let device = Driver::open(number)?;
        Ok(if legacy { device.with_legacy_handles() } else { device })
    })
}

fn decide<D>(
    config: &WorkerConfig,
    count: impl FnOnce() -> Result<u32, KernelError>,
    open: impl Fn(u32) -> Result<D, KernelError>,
) -> Result<Chosen<D>, WorkerError> {
    let (kind, first, ranks) = (config.backend, config.first_gpu, config.kv.tp);
    if kind == BackendKind::Cpu {
        return Ok(Chosen::Cpu);
    }
    let opened = count().map_err(WorkerError::Backend).and_then(|count| {
        check(first < count, "first_gpu", first, format!("less than {count}, the GPUs of this host"))?;
        let (left, must) = (count - first, "the GPUs of this host from first_gpu on, of which each rank takes one");
        check(ranks <= left, "tp", ranks, format!("at most {left}, {must}"))?;
        let open = |number| open(number).map(Arc::new).map_err(WorkerError::Backend);
        (first..first + ranks).map(open).collect::<Result<Vec<_>, _>>()
    });
    match opened {
        Err(error) if kind == BackendKind::Auto => {
            tracing::info!(%error, "computing on the CPU");
            Ok(Chosen::Cpu)
        }
        opened => opened.map(Chosen::Gpus),
    }
}

impl Chosen<Driver> {
    /// Checks the choice against the pool's shape, since the GPU kernels do not support every shape. `auto` falls back to the CPU.
    pub fn for_pool(self, kind: BackendKind, geometry: &PoolGeometry) -> Result<Self, WorkerError> {
        match (self, CudaBackend::<Driver>::check(geometry)) {
            (Chosen::Gpus(_), Err(error)) if kind == BackendKind::Auto => {
                tracing::info!(%error, "computing on the CPU");
                Ok(Chosen::Cpu)
            }
            (Chosen::Gpus(_), Err(error)) => Err(ModelError::from(error).into()),
            (chosen, _) => Ok(chosen),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvConfig;

    #[test]
    fn a_gpu_is_taken_where_there_is_one_and_demanded_only_by_name() {
        let none = || Err(KernelError::NoDevice("nothing here".to_owned()));
        let said = |chosen: Result<Chosen<u32>, WorkerError>| match chosen {
            Ok(Chosen::Cpu) => "cpu".to_owned(),
            Ok(Chosen::Gpus(gpus)) => format!("{gpus:?}"),
            Err(error) => error.to_string(),
        };
        let decide = |backend, first_gpu, tp, count: Result<u32, KernelError>| {
            let config = WorkerConfig {
                backend,
                first_gpu,
                kv: KvConfig { tp, ..KvConfig::default() },
                ..WorkerConfig::default()
            };
            said(decide(&config, || count, Ok))
        };
        let (auto, cuda) = (BackendKind::Auto, BackendKind::Cuda);
        assert_eq!(decide(auto, 0, 1, Ok(2)), "[0]");
        assert_eq!(decide(cuda, 0, 2, Ok(2)), "[0, 1]");
        assert_eq!(decide(cuda, 2, 2, Ok(4)), "[2, 3]");
        assert_eq!(decide(auto, 0, 1, none()), "cpu");
        assert_eq!(decide(auto, 0, 3, Ok(2)), "cpu");
        assert_eq!(decide(BackendKind::Cpu, 9, 1, none()), "cpu");
        let few = "the GPUs of this host from first_gpu on, of which each rank takes one";
        assert_eq!(decide(cuda, 0, 3, Ok(2)), format!("tp is 3; it must be at most 2, {few}"));
        assert_eq!(decide(cuda, 1, 2, Ok(2)), format!("tp is 2; it must be at most 1, {few}"));
        assert_eq!(decide(cuda, 2, 1, Ok(2)), "first_gpu is 2; it must be less than 2, the GPUs of this host");
        let refused = decide(cuda, 0, 1, none());
        assert_eq!(refused, "--backend cuda: no GPU: nothing here; --backend cpu needs none");
    }
}
