//! From settings to a model ready to run over a pool that transfers can reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_engine::{CacheConfig, EngineConfig, ModelRunner, SwapConfig, SwapRates};
use baton_grammar::Grammars;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device, ExchangingDevice, SharingDevice};
use baton_kernels::{Backend, CpuBackend, CpuOptions, Isa};
use baton_model::{Decoder, Footprint, Limits, ModelError, kv_layout};
use baton_model_files::{Model, fetch};
use baton_runtime::config::format_duration;
use baton_runtime::{Bytes, FetchConfig};
use baton_transfer::{MAX_TCP_CONNECTIONS, Pool};
use baton_types::{BlockId, KvLayout, PoolGeometry};

use crate::backend::{BackendKind, Chosen, Quantization, choose};
use crate::budget::{Budget, GpuMemory, block_bytes, most_blocks};
use crate::pack::find_pack_tokens;
use crate::pool::{on_device, on_host};
use crate::{EvictionKind, PackTokens, WorkerConfig, WorkerError, ranks};

/// Sequences whose logits are computed together.
const SAMPLES: usize = 16;

/// The same on a GPU, at most: it chooses all tokens of a step together.
const GPU_SAMPLES: usize = 256;
/// Blocks copied to see how fast copies are: more than caches hold, few enough not to be noticed.
const MEASURED_BLOCKS: u32 = 64;
/// Memory of a pool on the host, unless it is set.
const KV_MEMORY: Bytes = Bytes::mib(512);
/// Most tokens of a stream past the model's context: rotations are tabulated, `head_dim` · 4 bytes a position.
const MAX_STREAM: u32 = 1 << 22;
/// What every registry can keep.
const MIN_TTL: Duration = Duration::from_secs(1);
/// Shortest time by which transfers are bounded; less than this a busy machine takes to wake a thread.
const LEAST_HEARTBEAT: Duration = Duration::from_millis(10);

/// A GPU may take as long for a large step.
const LEAST_GPU_TIMEOUT: Duration = Duration::from_secs(1);

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

pub(crate) fn check(
    ok: bool,
    field: &'static str,
    value: impl ToString,
    must: impl Into<String>,
) -> Result<(), WorkerError> {
    if ok { Ok(()) } else { Err(WorkerError::Config { field, value: value.to_string(), must: must.into() }) }
}

/// I5: a bound of no time fails every handoff, and one missed heartbeat is no sign of anything.
fn check_limits(config: &WorkerConfig) -> Result<(), WorkerError> {
    let bounds = [
        ("transfer_heartbeat", config.transfer_heartbeat, LEAST_HEARTBEAT),
        ("transfer_silence", config.transfer_silence, config.transfer_heartbeat.saturating_mul(3)),
        ("transfer_room", config.transfer_room, LEAST_HEARTBEAT),
        ("transfer_handshake", config.transfer_handshake, LEAST_HEARTBEAT),
    ];
    for (field, value, least) in bounds {
        let must = match field {
            "transfer_silence" => format!("at least {}, three times transfer_heartbeat", format_duration(least)),
            _ => format!("at least {}", format_duration(least)),
        };
        check(value >= least, field, format_duration(value), must)?;
    }
    Ok(())
}

/// What can be checked before the model is there: so that a wrong setting is told at once.
pub fn check_settings(config: &WorkerConfig) -> Result<(), WorkerError> {
    let positive = |field, value: u32| check(value >= 1, field, value, "at least 1");
    check(
        config.block_size >= 16 && config.block_size.is_multiple_of(16),
        "block_size",
        config.block_size,
        "a multiple of 16",
    )?;
    positive("chunk", config.chunk)?;
    positive("max_running", config.max_running)?;
    let fraction = config.gpu_memory_fraction;
    check(fraction > 0.0 && fraction <= 1.0, "gpu_memory_fraction", fraction, "above 0 and at most 1")?;
    let must = format!("at least max_running, which is {}", config.max_running);
    check(config.token_budget >= config.max_running, "token_budget", config.token_budget, must)?;
    let percent = config.max_kept_percent;
    check(percent <= 100, "max_kept_percent", percent, "at most 100")?;
    check(config.threads != Some(0), "threads", 0, "at least 1")?;
    ranks::check_settings(config)?;
    if config.backend == BackendKind::Cpu {
        check_on_cpu(config)?;
    }
    let timeout = config.gpu_timeout;
    check(timeout >= LEAST_GPU_TIMEOUT, "gpu_timeout", format_duration(timeout), "at least 1s")?;
    let ttl = config.registry_ttl;
    check(ttl >= MIN_TTL, "registry_ttl", format_duration(ttl), "at least 1s")?;
    check_limits(config)?;
    let (connections, must) = (config.tcp_connections, format!("1 to {MAX_TCP_CONNECTIONS}"));
    check((1..=MAX_TCP_CONNECTIONS).contains(&connections), "tcp_connections", connections, must)?;
    config.transfer_tls()?;
    for (field, address) in [("grpc", config.grpc), ("transfer", config.transfer), ("admin", config.process.admin)] {
        let reachable = !address.ip().is_unspecified() || config.advertise.is_some();
        let must = "an address others can connect to; or say with --advertise by which one they reach this worker";
        check(reachable, field, address, must)?;
    }
    Ok(())
}

/// How a pool of so many blocks keeps prefixes.
fn cache(config: &WorkerConfig, blocks: u32) -> CacheConfig {
    let max_blocks = config.prefix_cache_blocks.unwrap_or(u32::MAX);
    let share = |of: u32| (u64::from(of) * u64::from(config.max_kept_percent) / 100) as u32;
    let max_kept = match config.eviction {
        EvictionKind::Priority => share(max_blocks.min(blocks)),
        EvictionKind::Lru | EvictionKind::Lfu => 0,
    };
    CacheConfig { max_blocks, max_kept, eviction: config.eviction.policy() }
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

/// What the CPU does not do.
fn check_on_cpu(config: &WorkerConfig) -> Result<(), WorkerError> {
    let must = "none where the CPU computes, which takes a model's weights as they are; fp8 needs a GPU (backend cuda)";
    check(config.quantization == Quantization::None, "quantization", config.quantization, must)
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

/// The layout of the pool.
fn layout(config: &WorkerConfig, model: &Model) -> Result<KvLayout, WorkerError> {
    let fingerprint = config.quantization.of_model(model.fingerprint());
    let layout = kv_layout(model.config(), fingerprint, config.kv_type.dtype(), config.block_size);
    windowed(config, layout, model.config().context_length)
}

/// What follows from settings, model and memory before anything is allocated.
pub(crate) struct Plan {
    pub geometry: PoolGeometry,
    pub limits: Limits,
    pub engine: EngineConfig,
}

/// Where the pool is to lie, and with which memory the model computes.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// All on the host.
    Host,
    /// Both on a GPU, or on one a rank.
    Gpu(GpuMemory),
}

/// Sequences whose logits are computed together, there.
fn samples(config: &WorkerConfig, place: Place) -> usize {
    match place {
        Place::Host => SAMPLES,
        Place::Gpu(_) => (config.max_running as usize).clamp(SAMPLES, GPU_SAMPLES),
    }
}

/// Blocks of the pool.
fn pool_blocks(config: &WorkerConfig, model: &Model, layout: &KvLayout, place: Place) -> Result<u32, WorkerError> {
    let budget = |gpu| -> Result<Budget, WorkerError> {
        let context = config.context.unwrap_or(model.config().context_length) as usize;
        let limits =
            Limits { tokens: config.token_budget as usize, samples: samples(config, place), context, table_entries: 0 };
        let fp8 = config.quantization == Quantization::Fp8;
        let footprint = Footprint::of_rank(model, config.tp, layout, limits, fp8)?;
        Ok(Budget { gpu, fraction: config.gpu_memory_fraction, footprint })
    };
    // Of what is asked for each rank's GPU has its heads.
    let of_rank = |bytes: Bytes| Bytes(bytes.0 / u64::from(config.tp));
    let (per_block, kv_memory) = (block_bytes(layout), config.kv_memory.unwrap_or(KV_MEMORY));
    let blocks = match place {
        Place::Host => most_blocks(kv_memory.0, per_block),
        Place::Gpu(gpu) => budget(gpu)?.blocks(&layout.clone().of_ranks(config.tp), config.kv_memory.map(of_rank))?,
    };
    let least = format!("at least {per_block} bytes, one block of this model");
    check(blocks >= 1, "kv_memory", kv_memory, least)?;
    Ok(blocks)
}

pub(crate) fn plan(config: &WorkerConfig, model: &Model, place: Place) -> Result<Plan, WorkerError> {
    let most = model.config().context_length;
    let layout = layout(config, model)?;
    let blocks = pool_blocks(config, model, &layout, place)?;
    let chunk = config.chunk.min(config.token_budget);
    let bounded = layout.most_tokens(chunk).is_some_and(|most| most.div_ceil(config.block_size) <= blocks);
    let held = if bounded { u32::MAX } else { blocks.saturating_mul(config.block_size) };
    let wanted = stream(config, most, held)?;
    if let Place::Gpu(_) = place {
        let must = format!(
            "at most {held} tokens, which the KV pool holds; raise gpu_memory_fraction or kv_memory, or take a smaller kv_type"
        );
        check(wanted <= held, "context", wanted, must)?;
    }
    let limits = Limits {
        tokens: config.token_budget as usize,
        samples: samples(config, place),
        context: wanted as usize,
        // Sequences may share all their blocks.
        table_entries: config.max_running as usize * wanted.div_ceil(config.block_size).min(blocks) as usize,
    };
    let engine = EngineConfig {
        token_budget: config.token_budget,
        chunk,
        pack_tokens: match config.pack_tokens {
            PackTokens::Tokens(tokens) => tokens,
            PackTokens::Auto => config.token_budget,
        },
        max_running: config.max_running,
        max_waiting: config.max_waiting,
        context_tokens: wanted,
        local_tokens: config.local_prefill,
        order: config.order.order(config.overtakes),
        cache: cache(config, blocks),
        swap: SwapConfig::default(),
    };
    Ok(Plan { geometry: PoolGeometry::uniform(layout, blocks), limits, engine })
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

/// The layout with the attention sinks and the window that are set, of a model with a context of `most` tokens: no query may
/// stand farther from a key than the model was made for.
fn windowed(config: &WorkerConfig, layout: KvLayout, most: u32) -> Result<KvLayout, WorkerError> {
    let Some(window) = config.attention_window else { return Ok(layout) };
    let sinks = config.attention_sinks.checked_next_multiple_of(config.block_size).filter(|sinks| *sinks < most);
    let must = format!("fewer than the model's {most} tokens, in whole blocks of {}", config.block_size);
    check(sinks.is_some(), "attention_sinks", config.attention_sinks, must)?;
    let sinks = sinks.unwrap_or(0);
    let room = most - sinks;
    let must = format!("between 1 and {room}, so that with {sinks} sinks it is within the model's {most} tokens");
    check((1..=room).contains(&window), "attention_window", window, must)?;
    Ok(layout.with_sinks(sinks, window))
}

/// The longest sequence, where the model's context is `most` tokens and the pool can hold `held` of one sequence.
fn stream(config: &WorkerConfig, most: u32, held: u32) -> Result<u32, WorkerError> {
    let wanted = config.context.unwrap_or(most.min(held));
    let (longest, must) = match config.attention_window {
        Some(_) => (MAX_STREAM, format!("between 2 and {MAX_STREAM} tokens")),
        None => (most, format!("between 2 and the model's {most} tokens; streams run past them with attention_window")),
    };
    check((2..=longest).contains(&wanted), "context", wanted, must)?;
    Ok(wanted)
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

#[cfg(test)]
mod tests {
    use baton_model_files::RandomModel;
    use baton_types::{KvDtype, KvGroup, PROTOCOL_VERSION};

    use super::*;

    #[test]
    fn a_share_of_the_cache_can_be_kept_where_eviction_knows_of_it() {
        let config = |eviction, prefix_cache_blocks, max_kept_percent| {
            let config = WorkerConfig { eviction, prefix_cache_blocks, max_kept_percent, ..WorkerConfig::default() };
            check_settings(&config).map(|()| cache(&config, 1000).max_kept)
        };
        let priority = EvictionKind::Priority;
        assert_eq!(config(EvictionKind::Lru, None, 50).unwrap(), 0);
        assert_eq!(config(priority, None, 50).unwrap(), 500);
        assert_eq!(config(priority, Some(10), 25).unwrap(), 2);
        assert_eq!(config(priority, Some(2000), 100).unwrap(), 1000);
        let error = config(priority, None, 101).unwrap_err();
        assert!(error.to_string().starts_with("max_kept_percent is 101"), "{error}");
    }

    #[test]
    fn a_pool_on_a_gpu_takes_what_the_model_leaves_and_must_hold_the_context() {
        let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
        let place = Place::Gpu(GpuMemory { total: 1 << 30, free: 1 << 30 });
        // 2 layers, 2 heads of 16, K and V, f16.
        let block = 16 * 2 * 2 * 16 * 2 * 2;
        let plan = |kv_memory, context, place| {
            let config = WorkerConfig { kv_memory, context, ..WorkerConfig::default() };
            plan(&config, &model, place).map(|plan| (plan.geometry.blocks[0], plan.limits.context, plan.limits.samples))
        };
        let (blocks, context, samples) = plan(None, None, place).unwrap();
        let kv = u64::from(blocks) * block;
        assert!(kv > 300 << 20 && kv < 410 << 20, "0.9 of 1 GiB but for the model and half a GiB: {kv}");
        assert_eq!((context, samples), (2048, 64), "all sequences' logits together");
        assert_eq!(plan(Some(Bytes(100 * block)), None, place).unwrap().0, 100);
        let ranks = |tp, kv| {
            let config = WorkerConfig { tp, kv_memory: Some(Bytes(kv)), ..WorkerConfig::default() };
            super::plan(&config, &model, place).map(|plan| plan.geometry)
        };
        let two = ranks(2, 100 * block).unwrap();
        assert_eq!((two.blocks[0], two.bytes() as u64), (100, 100 * block), "half of each block on each GPU");
        let error = ranks(2, 2 << 30).unwrap_err().to_string();
        assert!(error.contains("KV 1.00 GiB (kv_memory)"), "what each GPU would hold: {error}");
        assert!(ranks(2, 1 << 29).unwrap().bytes() > 500 << 20, "more than one of them has room for");
        assert_eq!(plan(None, None, Place::Host).unwrap(), ((512 << 20) / block as u32, 2048, SAMPLES));
        let error = |kv, context| plan(Some(Bytes(kv)), context, place).unwrap_err().to_string();
        let said = error(100 * block, Some(1601));
        assert!(said.starts_with("context is 1601; it must be at most 1600 tokens"), "{said}");
        assert!(error(block - 1, None).starts_with("kv_memory is "));
        assert!(error(1 << 30, None).contains("lower kv_memory"));
    }

    #[test]
    fn there_are_no_more_connections_than_a_session_takes() {
        let refused = |tcp_connections| {
            let config = WorkerConfig { tcp_connections, ..WorkerConfig::default() };
            check_settings(&config).map_err(|error| error.to_string())
        };
        assert_eq!([1, 16].map(refused), [Ok(()), Ok(())]);
        for count in [0, 17] {
            assert_eq!(refused(count), Err(format!("tcp_connections is {count}; it must be 1 to 16")));
        }
    }

    #[test]
    fn weights_of_8_bits_are_for_gpus_and_leave_more_memory_for_kv() {
        let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
        let config = |backend, quantization| WorkerConfig { backend, quantization, ..WorkerConfig::default() };
        let error = check_settings(&config(BackendKind::Cpu, Quantization::Fp8)).unwrap_err().to_string();
        assert!(error.starts_with("quantization is fp8; it must be none where the CPU computes"), "{error}");
        assert!(check_settings(&config(BackendKind::Auto, Quantization::Fp8)).is_ok(), "there may be a GPU");
        let place = Place::Gpu(GpuMemory { total: 1 << 30, free: 1 << 30 });
        let [none, fp8] = [Quantization::None, Quantization::Fp8]
            .map(|quantization| plan(&config(BackendKind::Cuda, quantization), &model, place).unwrap().geometry);
        assert!(fp8.blocks[0] > none.blocks[0]);
        assert_ne!(fp8.layout.fingerprint(), none.layout.fingerprint(), "no KV of the one for the other");
    }

    #[test]
    fn bounds_of_transfers_are_long_enough_to_mean_something() {
        let ms = Duration::from_millis;
        let refused = |heartbeat, silence, room, handshake| {
            let config = WorkerConfig {
                transfer_heartbeat: ms(heartbeat),
                transfer_silence: ms(silence),
                transfer_room: ms(room),
                transfer_handshake: ms(handshake),
                ..WorkerConfig::default()
            };
            check_settings(&config).map(|()| config.transfer_limits().silence).map_err(|error| error.to_string())
        };
        assert_eq!(refused(100, 300, 10, 10), Ok(ms(300)));
        for (asked, want) in [
            (
                (100, 299, 10, 10),
                "transfer_silence is 299ms; it must be at least 300ms, three times transfer_heartbeat",
            ),
            ((0, 299, 10, 10), "transfer_heartbeat is 0s"),
            ((100, 300, 9, 10), "transfer_room is 9ms"),
            ((100, 300, 10, 0), "transfer_handshake is 0s"),
        ] {
            let (heartbeat, silence, room, handshake) = asked;
            let error = refused(heartbeat, silence, room, handshake).unwrap_err();
            assert!(error.starts_with(want), "{error}");
        }
    }

    #[test]
    fn a_window_lies_within_the_models_context_and_a_stream_beyond_it() {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout =
            KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let set = |attention_sinks, attention_window, context| {
            let config = WorkerConfig { attention_sinks, attention_window, context, ..WorkerConfig::default() };
            let set = windowed(&config, layout.clone(), 128).and_then(|layout| {
                let [group] = &layout.groups[..] else { panic!("one group") };
                Ok((group.sinks, group.window, stream(&config, 128, u32::MAX)?))
            });
            set.map_err(|error| error.to_string())
        };
        assert_eq!(set(4, None, None), Ok((0, None, 128)));
        assert_eq!(set(4, Some(112), Some(100_000)), Ok((16, Some(112), 100_000)));
        assert_eq!(set(0, Some(128), None), Ok((0, Some(128), 128)));
        assert_eq!(set(17, Some(1), Some(MAX_STREAM)), Ok((32, Some(1), MAX_STREAM)));
        for (sinks, window, context, wrong) in [
            (4, Some(0), None, "attention_window is 0; it must be between 1 and 112"),
            (4, Some(113), None, "attention_window is 113; it must be between 1 and 112, so that with 16 sinks"),
            (113, Some(1), None, "attention_sinks is 113; it must be fewer than the model's 128 tokens"),
            (u32::MAX, Some(1), None, "attention_sinks is 4294967295"),
            (4, Some(100), Some(MAX_STREAM + 1), "context is 4194305; it must be between 2 and 4194304 tokens"),
            (4, Some(100), Some(1), "context is 1;"),
            (4, None, Some(129), "streams run past them with attention_window"),
        ] {
            let error = set(sinks, window, context).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
