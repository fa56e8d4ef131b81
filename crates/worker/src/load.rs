//! From settings to a model ready to run over a pool that transfers can reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use baton_engine::{EngineConfig, ModelRunner, SwapConfig, SwapRates};
use baton_grammar::Grammars;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device, ExchangingDevice, SharingDevice};
use baton_kernels::{Backend, CpuBackend, CpuOptions, Isa};
use baton_model::{Decoder, ModelError};
use baton_model_files::{Model, fetch};
use baton_runtime::FetchConfig;
use baton_transfer::Pool;
use baton_types::{BlockId, KvLayout, PoolGeometry};

use crate::backend::{Chosen, Quantization, choose};
use crate::budget::GpuMemory;
use crate::pack::find_pack_tokens;
use crate::plan::{Place, Plan, layout, plan};
use crate::pool::{on_device, on_host};
use crate::settings::{check, check_on_cpu};
use crate::{PackTokens, WorkerConfig, WorkerError, ranks};

/// Blocks copied to see how fast copies are: more than caches hold, few enough not to be noticed.
const MEASURED_BLOCKS: u32 = 64;

/// A model on a backend over a shareable pool.
pub struct Loaded<B: Backend = CpuBackend> {
    /// Runs steps.
    pub decoder: Decoder<B>,
    /// The pool's shape.
    pub geometry: PoolGeometry,
    /// The pool's memory.
    pub pool: Pool,
    /// Limits for the engine.
    pub engine: EngineConfig,
    /// The file's own name, by which a router knows workers of its model.
    pub name: String,
}

/// Finds the model, fetching it when it is a name or a hub id that is not in the cache yet, and opens it.
pub fn open_model(config: &WorkerConfig) -> Result<Model, WorkerError> {
    let FetchConfig { model_cache, hub_endpoint, hub_token_file } = config.fetch.clone();
    let source = fetch::Source::new(model_cache, hub_endpoint, hub_token_file.as_deref())?;
    Ok(source.find(&config.model, &Logged::default())?.open()?)
}

/// Progress of a fetch as log lines, one per tenth; a worker has no terminal.
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

/// What a worker keeps of a loaded model, whatever computes.
pub struct Ready {
    pub(crate) runner: Box<dyn ModelRunner>,
    /// What it runs on, for logs.
    pub(crate) backend: String,
    pub(crate) vocab: u32,
    pub(crate) grammars: Arc<Grammars>,
    pub(crate) geometry: PoolGeometry,
    pub(crate) pool: Pool,
    pub(crate) engine: EngineConfig,
    pub(crate) name: String,
}

impl<B: Backend + 'static> Loaded<B> {
    /// Finds by measuring what the settings leave open, and is ready for a worker.
    pub fn ready(mut self, config: &WorkerConfig) -> Result<Ready, WorkerError> {
        if config.pack_tokens == PackTokens::Auto {
            let vocab = self.decoder.config().vocab_size;
            self.engine.pack_tokens = find_pack_tokens(&mut self.decoder, vocab, &self.engine, &self.geometry)?;
        }
        let Loaded { decoder, geometry, pool, engine, name } = self;
        let (backend, vocab, grammars) = (decoder.backend_name(), decoder.config().vocab_size, decoder.grammars());
        Ok(Ready { runner: Box::new(decoder), backend, vocab, grammars, geometry, pool, engine, name })
    }
}

/// Finds what to compute on and the model, and loads it. Blocks for seconds.
pub(crate) fn load(config: &WorkerConfig) -> Result<Ready, WorkerError> {
    let chosen = choose(config)?;
    let model = open_model(config)?;
    let pool = PoolGeometry::uniform(layout(config, &model)?, 1);
    let chosen = chosen.for_pool(config.backend, &pool)?;
    if matches!(chosen, Chosen::Cpu) {
        check_on_cpu(config)?;
    }
    match chosen {
        Chosen::Cpu if config.tp > 1 => ranks::load(config, &model),
        Chosen::Cpu => load_on(config, &model, Isa::detect(), |backend, _| backend)?.ready(config),
        Chosen::Gpus(devices) => load_on_devices(config, &model, &devices),
    }
}

/// Loads an open model onto what `wrap` makes of the CPU backend, with that instruction set, and its pool's layout. Blocks for
/// seconds.
pub fn load_on<B: Backend>(
    config: &WorkerConfig,
    model: &Model,
    isa: Isa,
    wrap: impl FnOnce(CpuBackend, &KvLayout) -> B,
) -> Result<Loaded<B>, WorkerError> {
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let options = CpuOptions { threads, isa, pinned: config.pin_threads };
    load_with(config, model, Place::Host, |geometry| {
        let (pool, memory) = on_host(geometry)?;
        Ok((wrap(CpuBackend::new(options, memory).map_err(ModelError::from)?, &geometry.layout), pool))
    })
}

/// Loads an open model onto devices, one a rank, with its pool there. Blocks for seconds.
///
/// # Errors
/// As of settings, when their number is not that of ranks, and when the ranks cannot exchange.
pub fn load_on_devices<D: ExchangingDevice>(
    config: &WorkerConfig,
    model: &Model,
    devices: &[Arc<D>],
) -> Result<Ready, WorkerError> {
    match devices {
        [device] => load_on_device(config, model, device),
        devices => ranks::load_on_devices(config, model, devices),
    }
}

/// Loads an open model onto a device, with its pool there. Blocks for seconds.
///
/// # Errors
/// As of settings.
pub fn load_on_device<D: SharingDevice>(
    config: &WorkerConfig,
    model: &Model,
    device: &Arc<D>,
) -> Result<Ready, WorkerError> {
    let memory = GpuMemory::of(std::slice::from_ref(device)).map_err(ModelError::from)?;
    let loaded = load_with(config, model, Place::Gpu(memory), |geometry| {
        let (backend, memory) = on_device(device, geometry, cuda_options(config)).map_err(ModelError::from)?;
        Ok((backend, Pool::Device(memory)))
    });
    loaded?.ready(config)
}

/// How to run on a GPU.
pub(crate) fn cuda_options(config: &WorkerConfig) -> CudaOptions {
    let WorkerConfig { invariant, cuda_graphs: graphs, hopper_attention: hopper, .. } = *config;
    CudaOptions { invariant, graphs, hopper, fp8: config.quantization == Quantization::Fp8 }
}

/// Loads an open model onto what `make` makes for a pool of that shape, and its memory.
fn load_with<B: Backend>(
    config: &WorkerConfig,
    model: &Model,
    place: Place,
    make: impl FnOnce(&PoolGeometry) -> Result<(B, Pool), WorkerError>,
) -> Result<Loaded<B>, WorkerError> {
    let Plan { geometry, limits, engine } = plan(config, model, place)?;
    let (mut backend, pool) = make(&geometry)?;
    let swap = prepare_swap(config, std::slice::from_mut(&mut backend), &geometry)?;
    let decoder = Decoder::load(model, &geometry.layout, backend, limits)?;
    let engine = EngineConfig { swap, ..engine };
    Ok(Loaded { decoder, geometry, pool, engine, name: model.name().to_owned() })
}

/// Loads an open model with its pool onto a GPU, for measuring: transfers cannot reach it. The model's decoder, its pool's shape and
/// the engine's limits.
pub fn load_on_gpu<D: Device>(
    config: &WorkerConfig,
    model: &Model,
    device: Arc<D>,
    options: CudaOptions,
) -> Result<(Decoder<CudaBackend<D>>, PoolGeometry, EngineConfig), WorkerError> {
    let memory = GpuMemory::of(std::slice::from_ref(&device)).map_err(ModelError::from)?;
    let Plan { geometry, limits, engine } = plan(config, model, Place::Gpu(memory))?;
    let backend = CudaBackend::new(device, geometry.clone(), options).map_err(ModelError::from)?;
    Ok((Decoder::load(model, &geometry.layout, backend, limits)?, geometry, engine))
}

/// Host memory for what is swapped out, and how fast it is copied: by one of the ranks' backends, which is the least that all give.
pub(crate) fn prepare_swap<B: Backend>(
    config: &WorkerConfig,
    backends: &mut [B],
    geometry: &PoolGeometry,
) -> Result<SwapConfig, WorkerError> {
    let mut swap = SwapConfig { bytes: config.swap_bytes.0, rates: SwapRates::default() };
    let blocks = swap.blocks(&geometry.layout);
    if blocks == 0 {
        let one = SwapConfig::block_bytes(&geometry.layout);
        let must = format!("0, or at least {one} bytes, one block of this model");
        check(config.swap_bytes.0 == 0, "swap_bytes", config.swap_bytes, must)?;
        return Ok(swap);
    }
    let part = geometry.of_ranks(backends.len() as u32);
    for backend in &mut *backends {
        backend.reserve_swap(blocks).map_err(ModelError::from)?;
    }
    swap.rates.copy_bytes_per_second = backends.first_mut().map_or(0, |backend| copy_rate(backend, &part, blocks));
    Ok(swap)
}

/// Bytes a second out of the pool and in again, both still unused.
fn copy_rate<B: Backend>(backend: &mut B, geometry: &PoolGeometry, host_blocks: u32) -> u64 {
    let blocks = geometry.blocks.iter().copied().min().unwrap_or(0).min(host_blocks).min(MEASURED_BLOCKS);
    let mut copied = || {
        let started = Instant::now();
        for block in (0..blocks).map(BlockId) {
            for group in 0..geometry.layout.groups.len() {
                backend.swap_out(group, block, block);
                backend.swap_in(group, block, block);
            }
        }
        started.elapsed()
    };
    // The first time, the system has yet to find the memory.
    copied();
    let seconds = copied().as_secs_f64().max(1e-9);
    let bytes = 2 * u64::from(blocks) * SwapConfig::block_bytes(&geometry.layout);
    (bytes as f64 / seconds) as u64
}
