//! Computes sizes from settings and a model: the pool's shape, the engine's limits and the decoder's. Allocates nothing.

use baton_engine::{CacheConfig, EngineConfig, Eviction};
use baton_model::{DecoderLimits, Footprint, kv_layout};
use baton_model_files::Model;
use baton_runtime::Bytes;
use baton_types::{KvLayout, PoolGeometry};

use crate::budget::{Budget, GpuMemory, most_blocks};
use crate::choices::Quantization;
use crate::error::check;
use crate::{PackTokens, WorkerConfig, WorkerError};

/// Fewest sequences whose logits are computed together.
const SAMPLES: usize = 16;
/// On the CPU: most of them. The head's weights are read once for all, and a vocabulary of 262,144 has 1 MiB of logits for each.
const HOST_SAMPLES: usize = 32;
/// On a GPU: most sequences whose logits are computed together. A GPU chooses all tokens of a step together.
const GPU_SAMPLES: usize = 256;
/// Default memory of a pool on the host.
const KV_MEMORY: Bytes = Bytes::mib(512);
/// Most tokens of a stream past the model's context. The rotary tables take `head_dim` · 4 bytes per position.
const MAX_STREAM: u32 = 1 << 22;

/// The layout of the pool.
pub(crate) fn layout(config: &WorkerConfig, model: &Model) -> Result<KvLayout, WorkerError> {
    let fingerprint = config.kv.quantization.of_model(model.fingerprint());
    let layout = kv_layout(model.config(), fingerprint, config.kv.kv_type.0, config.kv.block_size);
    windowed(config, layout, model.config().context_length)
}

/// All sizes that follow from settings, model and memory. Computed before anything is allocated.
pub(crate) struct Plan {
    pub geometry: PoolGeometry,
    pub limits: DecoderLimits,
    pub engine: EngineConfig,
}

/// Where the pool lies and the model computes.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// On the host.
    Host,
    /// On a GPU, or on one GPU per rank.
    Gpu(GpuMemory),
}

/// Sequences whose logits are computed together at `place`.
fn samples(config: &WorkerConfig, place: Place) -> usize {
    match place {
        Place::Host => (config.max_running as usize).clamp(SAMPLES, HOST_SAMPLES),
        Place::Gpu(_) => (config.max_running as usize).clamp(SAMPLES, GPU_SAMPLES),
    }
}

/// Number of blocks of the pool.
fn pool_blocks(config: &WorkerConfig, model: &Model, layout: &KvLayout, place: Place) -> Result<u32, WorkerError> {
    let budget = |gpu| -> Result<Budget, WorkerError> {
        let context = config.context.unwrap_or(model.config().context_length) as usize;
        let limits = DecoderLimits {
            tokens: config.token_budget as usize,
            samples: samples(config, place),
            context,
            table_entries: 0,
        };
        let fp8 = config.kv.quantization == Quantization::Fp8;
        let footprint = Footprint::of_rank(model, config.kv.tp, layout, limits, fp8)?;
        Ok(Budget { gpu, fraction: config.gpu_memory_fraction, footprint })
    };
    // Each rank's GPU holds only its heads, so only its share of these bytes.
    let of_rank = |bytes: Bytes| Bytes(bytes.0 / u64::from(config.kv.tp));
    let (per_block, kv_memory) = (layout.block_bytes_all_groups(), config.kv_memory.unwrap_or(KV_MEMORY));
    let blocks = match place {
        Place::Host => most_blocks(kv_memory.0, per_block),
        Place::Gpu(gpu) => {
            budget(gpu)?.blocks(&layout.clone().of_ranks(config.kv.tp), config.kv_memory.map(of_rank))?
        }
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
    let bounded = layout.most_tokens(chunk).is_some_and(|most| most.div_ceil(config.kv.block_size) <= blocks);
    let held = if bounded { u32::MAX } else { blocks.saturating_mul(config.kv.block_size) };
    let wanted = stream(config, most, held)?;
    if let Place::Gpu(_) = place {
        let must = format!(
            "at most {held} tokens, which the KV pool holds; raise gpu_memory_fraction or kv_memory, or take a smaller kv_type"
        );
        check(wanted <= held, "context", wanted, must)?;
    }
    let limits = DecoderLimits {
        tokens: config.token_budget as usize,
        samples: samples(config, place),
        context: wanted as usize,
        // Sequences can share all their blocks, so one block can be in many tables.
        table_entries: config.max_running as usize * wanted.div_ceil(config.kv.block_size).min(blocks) as usize,
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
        local_prefill_tokens: config.local_prefill,
        reserve_ahead: config.reserve_ahead,
        order: config.order.0,
        overtakes: config.overtakes,
        cache: cache(config, blocks),
    };
    Ok(Plan { geometry: PoolGeometry::uniform(layout, blocks), limits, engine })
}

/// The layout with the configured attention sinks and window, for a model with a context of `most` tokens. Sinks and window together
/// are at most `most` tokens, so that no query is farther from a key than the model was made for.
fn windowed(config: &WorkerConfig, layout: KvLayout, most: u32) -> Result<KvLayout, WorkerError> {
    let Some(window) = config.kv.attention_window else { return Ok(layout) };
    let sinks = config.kv.attention_sinks.checked_next_multiple_of(config.kv.block_size).filter(|sinks| *sinks < most);
    let must = format!("fewer than the model's {most} tokens, in whole blocks of {}", config.kv.block_size);
    check(sinks.is_some(), "attention_sinks", config.kv.attention_sinks, must)?;
    let sinks = sinks.unwrap_or(0);
    let room = most - sinks;
    let must = format!("between 1 and {room}, so that with {sinks} sinks it is within the model's {most} tokens");
    check((1..=room).contains(&window), "attention_window", window, must)?;
    Ok(layout.with_sinks(sinks, window))
}

/// The longest sequence in tokens. `most` is the model's context; `held` is how many tokens of one sequence the pool can hold.
fn stream(config: &WorkerConfig, most: u32, held: u32) -> Result<u32, WorkerError> {
    let wanted = config.context.unwrap_or(most.min(held));
    let (longest, must) = match config.kv.attention_window {
        Some(_) => (MAX_STREAM, format!("between 2 and {MAX_STREAM} tokens")),
        None => (most, format!("between 2 and the model's {most} tokens; streams run past them with attention_window")),
    };
    check((2..=longest).contains(&wanted), "context", wanted, must)?;
    Ok(wanted)
}

/// The prefix cache's limits for a pool of `blocks` blocks.
fn cache(config: &WorkerConfig, blocks: u32) -> CacheConfig {
    let max_blocks = config.prefix_cache_blocks.unwrap_or(u32::MAX);
    let share = |of: u32| (u64::from(of) * u64::from(config.max_kept_percent) / 100) as u32;
    let max_kept = match config.eviction.0 {
        Eviction::Priority => share(max_blocks.min(blocks)),
        Eviction::Lru | Eviction::Lfu => 0,
    };
    CacheConfig { max_blocks, max_kept, eviction: config.eviction.0 }
}

#[cfg(test)]
mod tests {
    use baton_model_files::RandomModel;
    use baton_runtime::Parsed;
    use baton_types::{KvDtype, KvGroup, PROTOCOL_VERSION};

    use super::*;
    use crate::settings::check_settings;
    use crate::{BackendKind, KvConfig};

    #[test]
    fn a_share_of_the_cache_can_be_kept_where_eviction_knows_of_it() {
        let config = |eviction, prefix_cache_blocks, max_kept_percent| {
            let config = WorkerConfig {
                eviction: Parsed(eviction),
                prefix_cache_blocks,
                max_kept_percent,
                ..WorkerConfig::default()
            };
            check_settings(&config).map(|()| cache(&config, 1000).max_kept)
        };
        let priority = Eviction::Priority;
        assert_eq!(config(Eviction::Lru, None, 50).unwrap(), 0);
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
            let config = WorkerConfig {
                kv: KvConfig { tp, ..KvConfig::default() },
                kv_memory: Some(Bytes(kv)),
                ..WorkerConfig::default()
            };
            super::plan(&config, &model, place).map(|plan| plan.geometry)
        };
        let two = ranks(2, 100 * block).unwrap();
        assert_eq!((two.blocks[0], two.bytes() as u64), (100, 100 * block), "half of each block on each GPU");
        let error = ranks(2, 2 << 30).unwrap_err().to_string();
        assert!(error.contains("KV 1.00 GiB (kv_memory)"), "what each GPU would hold: {error}");
        assert!(ranks(2, 1 << 29).unwrap().bytes() > 500 << 20, "more than one of them has room for");
        assert_eq!(plan(None, None, Place::Host).unwrap(), ((512 << 20) / block as u32, 2048, HOST_SAMPLES));
        let error = |kv, context| plan(Some(Bytes(kv)), context, place).unwrap_err().to_string();
        let said = error(100 * block, Some(1601));
        assert!(said.starts_with("context is 1601; it must be at most 1600 tokens"), "{said}");
        assert!(error(block - 1, None).starts_with("kv_memory is "));
        assert!(error(1 << 30, None).contains("lower kv_memory"));
    }

    /// `baton model estimate` and the router's page say what a worker allocates.
    #[test]
    fn estimates_are_what_is_planned() {
        use baton_model_files::{Device, EstimateOptions, WeightKind, estimate};
        let gpu = GpuMemory { total: 400 << 30, free: 400 << 30 };
        let names =
            ["tiny", "smollm2-135m", "gemma-3-270m", "llama-3.2-1b", "qwen2.5-1.5b", "qwen3-8b", "llama-3.1-70b"];
        for name in names {
            let model = RandomModel::parse(&format!("random:{name}")).unwrap().unwrap().open().unwrap();
            let ranks = if model.config().heads.is_multiple_of(2) { 2 } else { 3 };
            for (kv_type, tp) in KvDtype::ALL.into_iter().flat_map(|kv_type| [(kv_type, 1), (kv_type, ranks)]) {
                let config = WorkerConfig {
                    kv: KvConfig { kv_type: Parsed(kv_type), tp, ..KvConfig::default() },
                    context: Some(1024),
                    ..WorkerConfig::default()
                };
                let options = EstimateOptions { kv_type, ranks: tp, context: Some(1024), ..EstimateOptions::default() };
                let said = estimate(model.config(), &options).unwrap();
                let planned = plan(&config, &model, Place::Host).unwrap().geometry;
                let all_ranks = planned.of_ranks(tp).bytes() as u64 * u64::from(tp);
                assert_eq!(
                    (said.blocks, said.pool_bytes),
                    (planned.blocks[0].into(), all_ranks),
                    "{name} {kv_type} {tp}"
                );
                assert_eq!(said.pool_bytes, said.blocks * 16 * said.token_bytes);
                for (quantization, weights) in
                    [(Quantization::None, WeightKind::Bf16), (Quantization::Fp8, WeightKind::Fp8)]
                {
                    let config = WorkerConfig {
                        kv: KvConfig { quantization, ..config.kv.clone() },
                        backend: BackendKind::Cuda,
                        ..config.clone()
                    };
                    let device = Device::Gpu { memory: gpu.total, fraction: 0.9 };
                    let options = EstimateOptions { device, weights, ..options.clone() };
                    let planned = plan(&config, &model, Place::Gpu(gpu)).unwrap().geometry;
                    let said = estimate(model.config(), &options).unwrap();
                    let limits = DecoderLimits { tokens: 512, samples: 64, context: 1024, table_entries: 0 };
                    let fp8 = weights == WeightKind::Fp8;
                    let footprint = Footprint::of_rank(&model, tp, &planned.layout, limits, fp8).unwrap();
                    let rest = footprint.activations + footprint.workspace;
                    assert_eq!(
                        (said.weight_bytes, said.working_bytes),
                        (footprint.weights, rest),
                        "{name} {weights} {tp}"
                    );
                    assert_eq!(said.blocks, u64::from(planned.blocks[0]), "{name} {kv_type} {weights} {tp}");
                }
            }
            let parameters = baton_model_files::inspect(&model).parameters;
            assert_eq!(estimate(model.config(), &EstimateOptions::default()).unwrap().parameters, parameters, "{name}");
        }
    }

    #[test]
    fn weights_of_8_bits_are_for_gpus_and_leave_more_memory_for_kv() {
        let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
        let config = |backend, quantization| WorkerConfig {
            backend,
            kv: KvConfig { quantization, ..KvConfig::default() },
            ..WorkerConfig::default()
        };
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
    fn a_window_lies_within_the_models_context_and_a_stream_beyond_it() {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout =
            KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let set = |attention_sinks, attention_window, context| {
            let config = WorkerConfig {
                kv: KvConfig { attention_sinks, attention_window, ..KvConfig::default() },
                context,
                ..WorkerConfig::default()
            };
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
