//! A model over several tensor-parallel ranks of this process: the setting `tp`.
//!
//! On the CPU each rank has its heads of the one pool, on GPUs each has them in its own GPU's memory. All others see it as the pool of a
//! worker without ranks either way: transfers, digests and the prefix cache know nothing of them, and workers of different degrees hand over
//! to each other.

use std::sync::Arc;

use baton_engine::EngineConfig;
use baton_kernels::cuda::ExchangingDevice;
use baton_kernels::{Backend, CpuBackend, CpuOptions};
use baton_model::ModelError;
use baton_model::parallel::TensorParallel;
use baton_model_files::Model;
use baton_transfer::{Pool, SpreadMemory};
use baton_types::PoolGeometry;

use crate::budget::GpuMemory;
use crate::load::{Ready, cuda_options, prepare_swap};
use crate::pack::find_pack_tokens;
use crate::plan::{Place, Plan, plan};
use crate::pool::{on_device, on_host};
use crate::settings::check;
use crate::{PackTokens, WorkerConfig, WorkerError};

/// What can be checked before the model is there.
pub(crate) fn check_settings(config: &WorkerConfig) -> Result<(), WorkerError> {
    check(config.tp >= 1, "tp", config.tp, "at least 1")?;
    let alone = config.tp == 1;
    check(alone || !config.pin_threads, "pin_threads", true, "false with tp above 1: ranks would share pinned CPUs")
}

/// Each rank has whole KV heads, and nobody else the same.
fn check_heads(config: &WorkerConfig, model: &Model) -> Result<(), WorkerError> {
    let kv_heads = model.config().kv_heads;
    let must = format!("a divisor of the model's {kv_heads} KV heads");
    check(kv_heads.is_multiple_of(config.tp), "tp", config.tp, must)
}

/// Loads an open model onto as many ranks as are set, which share the threads. Blocks for seconds.
pub(crate) fn load(config: &WorkerConfig, model: &Model) -> Result<Ready, WorkerError> {
    check_heads(config, model)?;
    let Plan { geometry, limits, mut engine } = plan(config, model, Place::Host)?;
    let (pool, memory) = on_host(&geometry)?;
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let options = CpuOptions { threads: (threads / config.tp as usize).max(1), ..CpuOptions::default() };
    let backend = |rank| CpuBackend::new(options, Arc::new(memory.of_rank(config.tp, rank)?));
    let mut backends = (0..config.tp).map(backend).collect::<Result<Vec<_>, _>>().map_err(ModelError::from)?;
    engine.swap = prepare_swap(config, &mut backends, &geometry)?;
    let runner = TensorParallel::on_cpu(model, &geometry.layout, limits, backends)?;
    ready(config, model, runner, (geometry, pool), engine)
}

/// Loads an open model onto a device a rank, whose pools are one to transfers. Blocks for seconds.
pub(crate) fn load_on_devices<D: ExchangingDevice>(
    config: &WorkerConfig,
    model: &Model,
    devices: &[Arc<D>],
) -> Result<Ready, WorkerError> {
    check(devices.len() == config.tp as usize, "tp", config.tp, format!("{}, a rank a device", devices.len()))?;
    check_heads(config, model)?;
    let memory = GpuMemory::of(devices).map_err(ModelError::from)?;
    let Plan { geometry, limits, mut engine } = plan(config, model, Place::Gpu(memory))?;
    let exchange = D::connect(devices).map_err(WorkerError::Backend)?;
    let own = geometry.of_ranks(config.tp);
    let ranks = devices.iter().map(|device| on_device(device, &own, cuda_options(config)));
    let ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(ModelError::from)?;
    let (mut backends, memories): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    let pool = SpreadMemory::new(&geometry, memories)?;
    engine.swap = prepare_swap(config, &mut backends, &geometry)?;
    let runner = TensorParallel::on_devices(model, &geometry.layout, limits, backends, exchange)?;
    ready(config, model, runner, (geometry, Pool::Device(Arc::new(pool))), engine)
}

/// Finds by measuring what the settings leave open, and is ready for a worker.
fn ready<B: Backend + 'static>(
    config: &WorkerConfig,
    model: &Model,
    mut runner: TensorParallel<B>,
    (geometry, pool): (PoolGeometry, Pool),
    mut engine: EngineConfig,
) -> Result<Ready, WorkerError> {
    let (vocab, name) = (model.config().vocab_size, model.name().to_owned());
    if config.pack_tokens == PackTokens::Auto {
        engine.pack_tokens = find_pack_tokens(&mut runner, vocab, &engine, &geometry)?;
    }
    let (backend, grammars) = (runner.backend_name(), runner.grammars());
    Ok(Ready { runner: Box::new(runner), backend, vocab, grammars, geometry, pool, engine, name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackendKind;

    #[test]
    fn ranks_share_the_cpus_or_have_a_gpu_each() {
        let config = |tp, backend, pin_threads| {
            let config = WorkerConfig { tp, backend, pin_threads, ..WorkerConfig::default() };
            check_settings(&config).map_err(|error| error.to_string())
        };
        assert_eq!(config(4, BackendKind::Cpu, false), Ok(()));
        assert_eq!(config(1, BackendKind::Auto, true), Ok(()));
        assert_eq!(config(2, BackendKind::Cuda, false), Ok(()));
        for (tp, backend, pinned, wrong) in [
            (0, BackendKind::Cpu, false, "tp is 0; it must be at least 1"),
            (2, BackendKind::Cpu, true, "pin_threads is true; it must be false with tp above 1"),
        ] {
            let error = config(tp, backend, pinned).unwrap_err();
            assert!(error.starts_with(wrong), "{error}");
        }
    }
}
