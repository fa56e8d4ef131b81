//! The backends of a worker's tensor-parallel ranks, one each, over a pool that looks like one to everything else. Without tensor
//! parallelism there is one rank.
//!
//! On the CPU, each rank uses its heads of one shared pool. On GPUs, each rank has its heads in its own GPU's memory. Transfers, digests
//! and the prefix cache do not see ranks, so workers of different degrees can hand over to each other.

use std::sync::Arc;

use baton_kernels::cuda::{CudaBackend, CudaOptions, SharingDevice};
use baton_kernels::{CpuBackend, CpuOptions};
use baton_model::ModelError;
use baton_model_files::Model;
use baton_transfer::{Pool, SpreadMemory};
use baton_types::PoolGeometry;

use crate::WorkerConfig;
use crate::choices::Quantization;
use crate::error::{WorkerError, check};
use crate::pool::{on_device, on_host};

/// Checks that every rank gets whole KV heads of its own.
pub(crate) fn check_heads(config: &WorkerConfig, model: &Model) -> Result<(), WorkerError> {
    let kv_heads = model.config().kv_heads;
    let must = format!("a divisor of the model's {kv_heads} KV heads");
    check(kv_heads.is_multiple_of(config.kv.tp), "tp", config.kv.tp, must)
}

/// Backends for ranks that share the CPU's threads, and their pool.
pub(crate) fn on_cpu(config: &WorkerConfig, geometry: &PoolGeometry) -> Result<(Vec<CpuBackend>, Pool), WorkerError> {
    let (pool, memory) = on_host(geometry)?;
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let threads = (threads / config.kv.tp as usize).max(1);
    let options = CpuOptions { threads, pinned: config.pin_threads, ..CpuOptions::default() };
    let backend = |rank| CpuBackend::new(options, Arc::new(memory.of_rank(config.kv.tp, rank)?));
    let backends = (0..config.kv.tp).map(backend).collect::<Result<_, _>>().map_err(ModelError::from)?;
    Ok((backends, pool))
}

/// Backends for ranks with one device each, and their pools combined into one.
pub(crate) fn on_devices<D: SharingDevice>(
    config: &WorkerConfig,
    geometry: &PoolGeometry,
    devices: &[Arc<D>],
) -> Result<(Vec<CudaBackend<D>>, Pool), WorkerError> {
    let own = geometry.of_ranks(config.kv.tp);
    let ranks = devices.iter().map(|device| on_device(device, &own, cuda_options(config)));
    let ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(ModelError::from)?;
    let (backends, memories): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    // A pool on a single device stays as it is, so that other processes can open it.
    let memory = match &memories[..] {
        [memory] => Arc::clone(memory),
        _ => Arc::new(SpreadMemory::new(geometry, memories)?),
    };
    Ok((backends, Pool::Device(memory)))
}

/// The options of the CUDA backend.
fn cuda_options(config: &WorkerConfig) -> CudaOptions {
    let WorkerConfig { invariant, cuda_graphs: graphs, hopper_attention: hopper, .. } = *config;
    CudaOptions { invariant, graphs, hopper, fp8: config.kv.quantization == Quantization::Fp8 }
}
