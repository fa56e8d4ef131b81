//! A model over several tensor-parallel ranks of this process: the setting `tp`.
//!
//! Each rank has its heads of the one pool, which all others see as that of a worker without ranks: transfers, digests and the prefix cache
//! know nothing of them, and workers of different degrees hand over to each other.

use std::sync::Arc;

use baton_kernels::{CpuBackend, CpuOptions};
use baton_model::ModelError;
use baton_model::parallel::TensorParallel;
use baton_model_files::Model;

use crate::load::{Place, Plan, Ready, check, plan, prepare_swap};
use crate::pack::find_pack_tokens;
use crate::pool::on_host;
use crate::{BackendKind, PackTokens, WorkerConfig, WorkerError};

/// What can be checked before the model is there.
pub(crate) fn check_settings(config: &WorkerConfig) -> Result<(), WorkerError> {
    check(config.tp >= 1, "tp", config.tp, "at least 1")?;
    let alone = config.tp == 1;
    check(alone || config.backend == BackendKind::Cpu, "tp", config.tp, "1, unless backend is cpu")?;
    check(alone || !config.pin_threads, "pin_threads", true, "false with tp above 1: ranks would share pinned CPUs")
}

/// Loads an open model onto as many ranks as are set, which share the threads. Blocks for seconds.
pub(crate) fn load(config: &WorkerConfig, model: &Model) -> Result<Ready, WorkerError> {
    let (kv_heads, vocab) = (model.config().kv_heads, model.config().vocab_size);
    let must = format!("a divisor of the model's {kv_heads} KV heads");
    check(kv_heads.is_multiple_of(config.tp), "tp", config.tp, must)?;
    let Plan { geometry, limits, mut engine } = plan(config, model, Place::Host)?;
    let (pool, memory) = on_host(&geometry)?;
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let options = CpuOptions { threads: (threads / config.tp as usize).max(1), ..CpuOptions::default() };
    let backend = |rank| CpuBackend::new(options, Arc::new(memory.of_rank(config.tp, rank)?));
    let mut backends = (0..config.tp).map(backend).collect::<Result<Vec<_>, _>>().map_err(ModelError::from)?;
    engine.swap = prepare_swap(config, &mut backends, &geometry)?;
    let mut runner = TensorParallel::on_cpu(model, &geometry.layout, limits, backends)?;
    if config.pack_tokens == PackTokens::Auto {
        engine.pack_tokens = find_pack_tokens(&mut runner, vocab, &engine, &geometry)?;
    }
    let (backend, grammars, name) = (runner.backend_name(), runner.grammars(), model.name().to_owned());
    Ok(Ready { runner: Box::new(runner), backend, vocab, grammars, geometry, pool, engine, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_for_the_cpu_and_share_its_cpus() {
        let config = |tp, backend, pin_threads| {
            let config = WorkerConfig { tp, backend, pin_threads, ..WorkerConfig::default() };
            check_settings(&config).map_err(|error| error.to_string())
        };
        assert_eq!(config(4, BackendKind::Cpu, false), Ok(()));
        assert_eq!(config(1, BackendKind::Auto, true), Ok(()));
        for (tp, backend, pinned, wrong) in [
            (0, BackendKind::Cpu, false, "tp is 0; it must be at least 1"),
            (2, BackendKind::Cuda, false, "tp is 2; it must be 1, unless backend is cpu"),
            (2, BackendKind::Cpu, true, "pin_threads is true; it must be false with tp above 1"),
        ] {
            let error = config(tp, backend, pinned).unwrap_err();
            assert!(error.starts_with(wrong), "{error}");
        }
    }
}
