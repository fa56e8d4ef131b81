//! Loads a model by the settings, ready to run over a pool that transfers can reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_engine::{EngineConfig, ModelRunner};
use baton_grammar::Grammars;
use baton_kernels::Backend;
use baton_kernels::cuda::ExchangingDevice;
use baton_model::ModelError;
use baton_model::parallel::TensorParallel;
use baton_model_files::{Model, fetch};
use baton_runtime::FetchConfig;
use baton_transfer::Pool;
use baton_types::PoolGeometry;

use crate::achieved::{Costs, measure_ceilings};
use crate::backend::{Chosen, choose};
use crate::budget::GpuMemory;
use crate::error::{WorkerError, check};
use crate::pack::find_pack_tokens;
use crate::packed::with_packed_weights;
use crate::plan::{Place, Plan, layout, plan};
use crate::settings::check_on_cpu;
use crate::{PackTokens, WorkerConfig, ranks};

/// Finds and opens the model. Fetches it first if it is a name or a hub id that is not in the cache yet.
pub fn open_model(config: &WorkerConfig) -> Result<Model, WorkerError> {
    let FetchConfig { model_cache, hub_endpoint, hub_token_file, model_peers } = config.fetch.clone();
    let source =
        fetch::Source::new(model_cache, hub_endpoint, hub_token_file.as_deref())?.with_peers(model_peers.as_deref())?;
    Ok(fetch::find(&source, &config.model, &Logged::default())?.open()?)
}

/// Logs the progress of a fetch, one line per tenth. A worker has no terminal.
#[derive(Default)]
struct Logged(AtomicU64);

impl fetch::Progress for Logged {
    fn update(&self, what: &str, done: u64, total: Option<u64>) {
        let tenths = total.filter(|&t| t > 0).map_or(0, |t| done * 10 / t);
        if self.0.swap(tenths, Ordering::Relaxed) != tenths {
            tracing::info!(what, percent = tenths * 10, "fetching");
        }
    }

    fn finish(&self, what: &str) {
        tracing::info!(what, "fetched");
    }
}

/// What a worker keeps of a loaded model, on any backend.
pub struct Ready {
    pub(crate) runner: Box<dyn ModelRunner>,
    /// Name of the backend, for logs.
    pub(crate) backend: String,
    pub(crate) vocab: u32,
    pub(crate) grammars: Arc<Grammars>,
    pub(crate) geometry: PoolGeometry,
    pub(crate) pool: Pool,
    pub(crate) engine: EngineConfig,
    pub(crate) name: String,
    /// What its steps cost.
    pub(crate) costs: Costs,
    /// Ids of its GPUs.
    pub(crate) gpus: Vec<[u8; 16]>,
}

/// Finds the backend and the model, and loads the model onto the backend. Blocks for seconds.
pub(crate) fn load(config: &WorkerConfig) -> Result<Ready, WorkerError> {
    let chosen = choose(config)?;
    let model = open_model(config)?;
    let pool = PoolGeometry::uniform(layout(config, &model)?, 1);
    match chosen.for_pool(config.backend, &pool)? {
        Chosen::Cpu => load_on_cpu(config, &model),
        Chosen::Gpus(devices) => load_on_devices(config, &model, &devices),
    }
}

/// Loads an open model onto the CPU. Blocks for seconds.
fn load_on_cpu(config: &WorkerConfig, model: &Model) -> Result<Ready, WorkerError> {
    check_on_cpu(config)?;
    ranks::check_heads(config, model)?;
    let Plan { geometry, limits, engine } = plan(config, model, Place::Host)?;
    let (backends, pool) = ranks::on_cpu(config, &geometry)?;
    let backends = with_packed_weights(config, model, backends)?;
    let runner = TensorParallel::on_cpu(model, &geometry.layout, limits, backends)?;
    measure_ceilings(config)?;
    ready(config, model, runner, (geometry, pool), engine)
}

/// Loads an open model and its pool onto devices, one per rank. Blocks for seconds.
///
/// # Errors
/// When a setting does not fit the model, when the number of devices is not the number of ranks, or when the ranks cannot exchange.
pub fn load_on_devices<D: ExchangingDevice>(
    config: &WorkerConfig,
    model: &Model,
    devices: &[Arc<D>],
) -> Result<Ready, WorkerError> {
    check(devices.len() == config.kv.tp as usize, "tp", config.kv.tp, format!("{}, a rank a device", devices.len()))?;
    ranks::check_heads(config, model)?;
    let memory = GpuMemory::of(devices).map_err(ModelError::from)?;
    let Plan { geometry, limits, engine } = plan(config, model, Place::Gpu(memory))?;
    // Before anything is loaded, so that a missing connection is reported at once.
    let exchange = (devices.len() > 1).then(|| D::connect(devices)).transpose().map_err(WorkerError::Backend)?;
    let (mut backends, pool) = ranks::on_devices(config, &geometry, devices)?;
    let runner = match exchange {
        Some(exchange) => TensorParallel::on_devices(model, &geometry.layout, limits, backends, exchange)?,
        None => TensorParallel::alone(model, &geometry.layout, limits, backends.swap_remove(0))?,
    };
    let gpus = devices.iter().filter_map(|device| device.properties().id).collect();
    Ok(Ready { gpus, ..ready(config, model, runner, (geometry, pool), engine)? })
}

/// Measures `pack_tokens` if the settings ask for it, and completes the loaded model.
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
    let token = geometry.layout.block_bytes_all_groups() / u64::from(geometry.layout.block_size);
    let costs = Costs::of(model, config, token, matches!(pool, Pool::Device(_)));
    Ok(Ready {
        runner: Box::new(runner),
        backend,
        vocab,
        grammars,
        geometry,
        pool,
        engine,
        name,
        costs,
        gpus: Vec::new(),
    })
}
