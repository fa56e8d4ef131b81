//! How much memory a model needs for its weights and its KV, how many sequences fit, and how long KV travels. Pure arithmetic over a
//! configuration.
//!
//! `baton model estimate` and the calculator of the router's page ask here. Tests compare the results with what workers plan and
//! allocate. This module knows nothing of files: weights are those of the configuration, in one type.

use std::path::Path;

use baton_types::{KvDtype, KvGroup};
use serde::Serialize;

use crate::{ModelConfig, ModelFileError, kv_layout};

/// Memory on a GPU for everything that does not grow with the sizes here: copies of batches, partial sums of split attention, graphs,
/// the driver's own code. More than was ever measured, and little compared with any GPU's memory.
pub const SCRATCH_BYTES: u64 = 512 << 20;
/// On a GPU: least and most sequences whose logits are computed together.
const SAMPLES: (u32, u32) = (16, 256);
/// Feed-forward widths and vocabularies are split over ranks at multiples of this.
const LANES: u32 = 8;
/// Matrices whose sizes are multiples of this can be E4M3.
const FP8_MULTIPLE: u32 = 16;
/// Largest values that make sense: more would only overflow.
const MAX_RANKS: u32 = 1 << 10;
const MAX_TOKENS: u32 = 1 << 28;
const MAX_BLOCK: u32 = 1 << 12;

baton_types::words!(WeightKind { Bf16 = "bf16", Fp8 = "fp8" });

/// Type of a model's matrices on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WeightKind {
    /// bfloat16.
    #[default]
    Bf16,
    /// The matrices of layers in 8-bit floats with one f32 scale a row; the others in bfloat16.
    Fp8,
}

/// Where the KV pool lies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Device {
    /// In memory of this many bytes that nothing else uses.
    Pool(u64),
    /// On GPUs, one for each rank: the pool takes what the model leaves.
    Gpu {
        /// Memory of each GPU, bytes.
        memory: u64,
        /// Share of it that a worker may use, above 0 and at most 1.
        fraction: f64,
    },
}

/// What an estimate depends on besides the model. The defaults are those of a worker.
#[derive(Clone, Debug)]
pub struct EstimateOptions {
    /// Element type of KV.
    pub kv_type: KvDtype,
    /// Tokens of a block.
    pub block_size: u32,
    /// Tensor-parallel ranks.
    pub ranks: u32,
    /// Type of the weights.
    pub weights: WeightKind,
    /// Where the pool lies.
    pub device: Device,
    /// Tokens of each sequence; `None`: as many as the model's context.
    pub context: Option<u32>,
    /// Tokens of the prompt whose KV travels; cut off at the context.
    pub prompt: u32,
    /// Most tokens of a step.
    pub token_budget: u32,
    /// Most tokens of a prompt in a step.
    pub chunk: u32,
    /// Most sequences in a batch.
    pub max_running: u32,
    /// A measured or assumed rate in bytes a second, beside [`LINKS`].
    pub link: Option<f64>,
}

impl Default for EstimateOptions {
    fn default() -> EstimateOptions {
        EstimateOptions {
            kv_type: KvDtype::F16,
            block_size: 16,
            ranks: 1,
            weights: WeightKind::Bf16,
            device: Device::Pool(512 << 20),
            context: None,
            prompt: 4096,
            token_budget: 512,
            chunk: 256,
            max_running: 64,
            link: None,
        }
    }
}

/// A kind of connection between workers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// What it is called.
    pub name: &'static str,
    /// Its nominal rate in one direction, bytes a second. Real transfers reach less.
    pub bytes_per_second: f64,
}

/// The usual connections, the fastest first.
pub const LINKS: [Link; 6] = [
    Link { name: "NVLink 4", bytes_per_second: 450e9 },
    Link { name: "PCIe 5 x16", bytes_per_second: 63e9 },
    Link { name: "400 Gb/s RDMA", bytes_per_second: 50e9 },
    Link { name: "100 Gb/s Ethernet", bytes_per_second: 12.5e9 },
    Link { name: "25 Gb/s Ethernet", bytes_per_second: 3.125e9 },
    Link { name: "10 Gb/s Ethernet", bytes_per_second: 1.25e9 },
];

/// How long a prompt's KV takes over a link.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Travel {
    /// Name of the link.
    pub link: String,
    /// Its rate, bytes a second.
    pub bytes_per_second: f64,
    /// Seconds for the KV of the prompt.
    pub seconds: f64,
}

/// What a model needs. Bytes, unless named otherwise.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Estimate {
    /// Layers of the model, and how many of them see only a window.
    pub layers: u32,
    /// Layers that see only a window.
    pub windowed_layers: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// The model's longest sequence, tokens.
    pub context_length: u32,
    /// Number of weights; a tied output head counts once.
    pub parameters: u64,
    /// Tensor-parallel ranks.
    pub ranks: u32,
    /// Weights of the largest rank, the rotary tables included.
    pub weight_bytes: u64,
    /// Activations of a rank for the largest step, and the scratch memory of kernels.
    pub working_bytes: u64,
    /// KV of one token in all layers and all ranks.
    pub token_bytes: u64,
    /// Tokens of a block.
    pub block_size: u32,
    /// KV of one block in all layers and all ranks.
    pub block_bytes: u64,
    /// Blocks of the pool.
    pub blocks: u64,
    /// The pool, in all ranks together.
    pub pool_bytes: u64,
    /// Tokens of each sequence.
    pub sequence_tokens: u32,
    /// The most KV that such a sequence holds at once.
    pub sequence_bytes: u64,
    /// Sequences of so many tokens that fit into the pool at once.
    pub sequences: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// KV of the prompt.
    pub prompt_bytes: u64,
    /// How long that travels.
    pub transfers: Vec<Travel>,
}

/// What a model with this configuration needs.
///
/// # Errors
/// An option does not work with this model; the error names it.
pub fn estimate(config: &ModelConfig, options: &EstimateOptions) -> Result<Estimate, ModelFileError> {
    check(config, options)?;
    let EstimateOptions { ranks, block_size, .. } = *options;
    let rank = of_rank(config, ranks);
    let whole = kv_layout(config, 0, options.kv_type, block_size);
    let own = whole.clone().of_ranks(ranks);
    let block_bytes = own.block_bytes_all_groups() * u64::from(ranks);
    let context = options.context.unwrap_or(config.context_length);
    let weight_bytes = weight_bytes(config, &rank, ranks, options.weights, context);
    let samples = options.max_running.clamp(SAMPLES.0, SAMPLES.1);
    let working_bytes = activation_bytes(&rank.config, ranks, rank.vocab, false, options.token_budget, samples)
        + operand_bytes(&rank.config, options.token_budget)
        + SCRATCH_BYTES;
    let room = match options.device {
        Device::Pool(bytes) => bytes / whole.block_bytes_all_groups(),
        Device::Gpu { memory, fraction } => {
            let room = ((memory as f64 * fraction) as u64).saturating_sub(weight_bytes + working_bytes);
            room / own.block_bytes_all_groups()
        }
    };
    // Block numbers have one bit to spare.
    let blocks = room.min(u64::from(u32::MAX / 2));
    let held = |group: &KvGroup| {
        let all = context.div_ceil(block_size);
        group.most_live(options.chunk.min(options.token_budget), block_size).map_or(all, |most| most.min(all))
    };
    let group_bytes = |group: usize| own.block_bytes_all_layers(group) as u64 * u64::from(ranks);
    let sum = |blocks: &dyn Fn(&KvGroup) -> u32| -> u64 {
        own.groups.iter().enumerate().map(|(at, group)| u64::from(blocks(group)) * group_bytes(at)).sum()
    };
    let prompt = options.prompt.min(context);
    let prompt_bytes = sum(&|group| needed(group, prompt, block_size));
    let fit = own.groups.iter().map(|group| blocks / u64::from(held(group).max(1))).min().unwrap_or(0);
    let extra = options.link.map(|rate| Link { name: "given", bytes_per_second: rate });
    Ok(Estimate {
        layers: config.layers,
        windowed_layers: config.layer_windows.iter().flatten().count() as u32,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        context_length: config.context_length,
        parameters: parameters(config),
        ranks,
        weight_bytes,
        working_bytes,
        token_bytes: block_bytes / u64::from(block_size),
        block_size,
        block_bytes,
        blocks,
        pool_bytes: blocks * block_bytes,
        sequence_tokens: context,
        sequence_bytes: sum(&held),
        sequences: fit,
        prompt_tokens: prompt,
        prompt_bytes,
        transfers: LINKS.into_iter().chain(extra).map(|link| travel(link, prompt_bytes)).collect(),
    })
}

/// Blocks of a group that a sequence of `tokens` tokens needs to go on.
fn needed(group: &KvGroup, tokens: u32, block_size: u32) -> u32 {
    let Some(last) = tokens.checked_sub(1) else { return 0 };
    let all = tokens.div_ceil(block_size);
    all - group.live(last, block_size).missing(0, all)
}

fn travel(link: Link, bytes: u64) -> Travel {
    let Link { name, bytes_per_second } = link;
    Travel { link: name.to_owned(), bytes_per_second, seconds: bytes as f64 / bytes_per_second }
}

fn check(config: &ModelConfig, options: &EstimateOptions) -> Result<(), ModelFileError> {
    let fail = |key: &str, problem: String| Err(ModelFileError::config(Path::new("estimate"), key, problem));
    let EstimateOptions { ranks, block_size, context, prompt, token_budget, chunk, max_running, link, .. } = *options;
    let (heads, kv_heads) = (config.heads, config.kv_heads);
    let sizes = [
        ("tp", ranks, MAX_RANKS),
        ("block_size", block_size, MAX_BLOCK),
        ("context", context.unwrap_or(1), MAX_TOKENS),
        ("prompt", prompt, MAX_TOKENS),
        ("token_budget", token_budget, MAX_TOKENS),
        ("chunk", chunk, MAX_TOKENS),
        ("max_running", max_running, MAX_TOKENS),
    ];
    for (key, value, most) in sizes {
        if !(1..=most).contains(&value) {
            return fail(key, format!("is {value}; it must be between 1 and {most}"));
        }
    }
    if !block_size.is_multiple_of(16) {
        return fail("block_size", format!("is {block_size}; it must be a multiple of 16"));
    }
    if !heads.is_multiple_of(ranks) || !(kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads)) {
        return fail(
            "tp",
            format!(
                "is {ranks}; it must divide the {heads} heads, and divide or be divided by the {kv_heads} KV heads"
            ),
        );
    }
    if let Device::Gpu { fraction, .. } = options.device
        && !(fraction > 0.0 && fraction <= 1.0)
    {
        return fail("gpu_memory_fraction", format!("is {fraction}; it must be above 0 and at most 1"));
    }
    match link {
        Some(rate) if !(rate.is_finite() && rate > 0.0) => {
            fail("link", format!("is {rate}; it must be above 0 bytes a second"))
        }
        _ => Ok(()),
    }
}

/// Number of weights; a tied output head counts once.
fn parameters(config: &ModelConfig) -> u64 {
    let (matrices, vectors) = layer(config);
    let of_layer = matrices.iter().map(|[rows, cols]| rows * cols).sum::<u64>() + vectors;
    let heads = if config.tied_embeddings { 1 } else { 2 };
    let (hidden, vocab) = (u64::from(config.hidden_size), u64::from(config.vocab_size));
    u64::from(config.layers) * of_layer + heads * vocab * hidden + hidden
}

/// A layer's matrices, [outputs, inputs], and the elements of its vectors.
pub(crate) fn layer(config: &ModelConfig) -> ([[u64; 2]; 7], u64) {
    let [hidden, inner, q, kv] =
        [config.hidden_size, config.intermediate_size, config.q_size(), config.kv_size()].map(u64::from);
    let bias = if config.qkv_bias { q + 2 * kv } else { 0 };
    let head_norms = if config.qk_norm { 2 * u64::from(config.head_dim) } else { 0 };
    let norms = if config.post_norms { 4 } else { 2 };
    let matrices =
        [[q, hidden], [kv, hidden], [kv, hidden], [hidden, q], [inner, hidden], [inner, hidden], [hidden, inner]];
    (matrices, norms * hidden + head_norms + bias)
}

/// What the largest of several ranks has of a model.
struct RankShape {
    /// With its heads and its feed-forward width.
    config: ModelConfig,
    /// Rows of its output head.
    vocab: u32,
}

fn of_rank(config: &ModelConfig, ranks: u32) -> RankShape {
    // The last rank has the most units. Those before may have one less.
    let last = |total: u32| {
        let units = u64::from(total.div_ceil(LANES));
        let begin = units * u64::from(ranks - 1) / u64::from(ranks) * u64::from(LANES);
        total - begin.min(total.into()) as u32
    };
    let (heads, kv_heads) = (config.heads / ranks, (config.kv_heads / ranks).max(1));
    let intermediate_size = last(config.intermediate_size);
    let rank = ModelConfig { heads, kv_heads, intermediate_size, ..config.clone() };
    RankShape { config: rank, vocab: last(config.vocab_size) }
}

/// Bytes of a rank's weights on a GPU: matrices as bf16 or E4M3, vectors as f32, and the rotary tables for `context` positions.
fn weight_bytes(config: &ModelConfig, rank: &RankShape, ranks: u32, kind: WeightKind, context: u32) -> u64 {
    let (matrices, vectors) = layer(&rank.config);
    let fits = |n: u64| n.is_multiple_of(FP8_MULTIPLE.into());
    let matrix = |[rows, cols]: &[u64; 2]| match kind {
        WeightKind::Fp8 if fits(*rows) && fits(*cols) => rows * cols + rows * 4,
        _ => rows * cols * 2,
    };
    let of_layer = matrices.iter().map(matrix).sum::<u64>() + vectors * 4;
    let [hidden, vocab, own] = [config.hidden_size, config.vocab_size, rank.vocab].map(u64::from);
    // Every rank holds the embedding whole, and its rows of the head beside it, even when both are the same matrix.
    let head = if config.tied_embeddings && ranks == 1 { 0 } else { own * hidden * 2 };
    let tables = if config.local_rope.is_some() { 2 } else { 1 };
    // One cosine and one sine, 4 bytes each, for each of `head_dim / 2` pairs.
    let rotations = tables * u64::from(context) * u64::from(config.head_dim) * 4;
    u64::from(config.layers) * of_layer + vocab * hidden * 2 + head + hidden * 4 + rotations
}

/// Bytes of a decoder's buffers, counted as f32 rows; attention's rows may be smaller in reality. `config`: the rank's. `vocab`: rows of
/// its output head. `sinks`: some layers have attention sinks. `tokens`: of the largest step. `samples`: sequences whose logits are computed
/// together.
pub fn activation_bytes(config: &ModelConfig, ranks: u32, vocab: u32, sinks: bool, tokens: u32, samples: u32) -> u64 {
    let queries = if sinks { 3 } else { 2 };
    let [hidden, inner, q, kv] =
        [config.hidden_size, config.intermediate_size, config.q_size(), config.kv_size()].map(u64::from);
    let row = 2 * hidden + queries * q + 2 * kv + 2 * inner;
    // Logits, and a copy of them from before penalties.
    let sample = hidden + 2 * u64::from(config.vocab_size);
    let (tokens, samples) = (u64::from(tokens), u64::from(samples));
    // With several ranks, each holds every rank's part of a sum, and its own part of the logits.
    let (exchanged, own) = match ranks {
        1 => (0, 0),
        ranks => (u64::from(ranks) * tokens * hidden, u64::from(vocab)),
    };
    4 * (tokens * row + samples * (sample + own) + exchanged)
}

/// Bytes of a product's input as bf16, for `tokens` rows. As E4M3 with scales it takes less.
pub fn operand_bytes(config: &ModelConfig, tokens: u32) -> u64 {
    let widest = config.hidden_size.max(config.intermediate_size).max(config.q_size());
    u64::from(tokens) * u64::from(widest) * 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomShape;

    fn of(shape: &str, options: EstimateOptions) -> Estimate {
        let shape = RandomShape::parse(&format!("random:{shape}")).unwrap().unwrap();
        estimate(&ModelConfig::of_family(shape.family()).unwrap(), &options).unwrap()
    }

    #[test]
    fn an_eight_billion_model_needs_what_it_is_known_to_need() {
        let options = EstimateOptions {
            device: Device::Pool(80 << 30),
            context: Some(8192),
            prompt: 8192,
            link: Some(1e9),
            ..EstimateOptions::default()
        };
        let told = of("llama-3.1-8b", options.clone());
        // 2 · 32 layers · 8 KV heads · 128 elements · 2 bytes.
        assert_eq!((told.token_bytes, told.block_bytes), (131_072, 16 * 131_072));
        assert_eq!((told.sequence_bytes, told.sequences, told.prompt_bytes), (1 << 30, 80, 1 << 30));
        let last = told.transfers.last().unwrap();
        assert!((last.seconds - 1.073_741_824).abs() < 1e-9 && told.transfers.len() == LINKS.len() + 1, "{last:?}");
        let halves = of("llama-3.1-8b", EstimateOptions { kv_type: KvDtype::Q8, ranks: 2, ..options });
        assert_eq!(halves.token_bytes, 131_072 / 2 + 2 * 32 * 8 * 2, "a scale for each row");
    }

    #[test]
    fn layers_with_a_window_hold_and_send_no_more_than_it() {
        let options = EstimateOptions { context: Some(8192), prompt: 8192, ..EstimateOptions::default() };
        let told = of("gemma-3-270m", options);
        // 3 global layers hold all 512 blocks, 15 others a window of 512 tokens, a chunk of 256, and what is begun.
        let layer = 2 * 256 * 2 * 16;
        assert_eq!(told.sequence_bytes, layer * (3 * 512 + 15 * (48 + 2)));
        assert_eq!(told.prompt_bytes, layer * (3 * 512 + 15 * 32));
        assert_eq!(told.sequences, told.blocks / 512, "each group has as many blocks");
    }

    #[test]
    fn more_ranks_than_kv_heads_hold_the_same_head_several_times() {
        let one = of("gemma-3-270m", EstimateOptions::default());
        let two = of("gemma-3-270m", EstimateOptions { ranks: 2, ..EstimateOptions::default() });
        assert_eq!(two.token_bytes, 2 * one.token_bytes);
    }

    #[test]
    fn what_does_not_work_is_named() {
        let shape = RandomShape::parse("random:tiny").unwrap().unwrap();
        let config = ModelConfig::of_family(shape.family()).unwrap();
        let usual = EstimateOptions::default;
        for (options, wrong) in [
            (EstimateOptions { ranks: 3, ..usual() }, "tp: is 3; it must divide the 4 heads"),
            (EstimateOptions { ranks: 0, ..usual() }, "tp: is 0"),
            (EstimateOptions { block_size: 24, ..usual() }, "block_size: is 24"),
            (EstimateOptions { context: Some(0), ..usual() }, "context: is 0"),
            (EstimateOptions { link: Some(f64::NAN), ..usual() }, "link: is NaN"),
            (
                EstimateOptions { device: Device::Gpu { memory: 1, fraction: 1.5 }, ..usual() },
                "gpu_memory_fraction: is 1.5",
            ),
        ] {
            let error = estimate(&config, &options).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        let none = EstimateOptions { device: Device::Gpu { memory: 1 << 20, fraction: 0.9 }, ..usual() };
        assert_eq!(estimate(&config, &none).unwrap().sequences, 0, "the model alone is larger");
    }
}
