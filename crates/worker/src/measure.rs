//! Loads a model for measurements: on one backend, without a worker around it.

use std::sync::Arc;

use baton_engine::EngineConfig;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device};
use baton_kernels::{Backend, CpuBackend, CpuOptions, Isa};
use baton_model::{Decoder, ModelError};
use baton_model_files::Model;
use baton_types::{KvLayout, PoolGeometry};

use crate::budget::GpuMemory;
use crate::plan::{Place, Plan, plan};
use crate::pool::on_host;
use crate::{WorkerConfig, WorkerError};

/// A model on a backend.
pub struct Loaded<B: Backend> {
    /// Runs steps.
    pub decoder: Decoder<B>,
    /// The pool's shape.
    pub geometry: PoolGeometry,
    /// Limits for the engine.
    pub engine: EngineConfig,
}

/// Loads an open model onto the CPU backend with the instruction set `isa`. `wrap` may wrap the backend; it also gets the pool's layout.
/// Blocks for seconds.
pub fn load_on<B: Backend>(
    config: &WorkerConfig,
    model: &Model,
    isa: Isa,
    wrap: impl FnOnce(CpuBackend, &KvLayout) -> B,
) -> Result<Loaded<B>, WorkerError> {
    let Plan { geometry, limits, engine } = plan(config, model, Place::Host)?;
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let options = CpuOptions { threads, isa, pinned: config.pin_threads };
    let (_, memory) = on_host(&geometry)?;
    let backend = wrap(CpuBackend::new(options, memory).map_err(ModelError::from)?, &geometry.layout);
    let decoder = Decoder::load(model, &geometry.layout, backend, limits)?;
    Ok(Loaded { decoder, geometry, engine })
}

/// Loads an open model and its pool onto a GPU. Transfers cannot reach this pool. Blocks for seconds.
pub fn load_on_gpu<D: Device>(
    config: &WorkerConfig,
    model: &Model,
    device: Arc<D>,
    options: CudaOptions,
) -> Result<Loaded<CudaBackend<D>>, WorkerError> {
    let memory = GpuMemory::of(std::slice::from_ref(&device)).map_err(ModelError::from)?;
    let Plan { geometry, limits, engine } = plan(config, model, Place::Gpu(memory))?;
    let backend = CudaBackend::new(device, geometry.clone(), options).map_err(ModelError::from)?;
    let decoder = Decoder::load(model, &geometry.layout, backend, limits)?;
    Ok(Loaded { decoder, geometry, engine })
}
