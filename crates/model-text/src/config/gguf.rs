//! [`ModelConfig`] from the metadata of a GGUF file.

use crate::gguf::{Header, OUTPUT, QUERY_BIAS};
use crate::{Architecture, Family, Keys, ModelFileError};

use super::{Activation, GEMMA3_LOCAL_THETA, GEMMA3_PATTERN, ModelConfig, RopeConfig, RopeScaling};

/// What the configuration needs to know about the tensors of a GGUF file.
#[derive(Clone, Debug)]
pub struct TensorFacts {
    /// The file has an output head of its own.
    pub has_output: bool,
    /// Layer 0 has a bias on Q.
    pub has_qkv_bias: bool,
    /// The tensor of rope divisors.
    pub rope_freqs: Option<Vec<f32>>,
}

impl TensorFacts {
    /// What a header says, which does not have the divisors.
    pub fn of(header: &Header) -> TensorFacts {
        let has = |name| header.tensors.contains_key(name);
        TensorFacts { has_output: has(OUTPUT), has_qkv_bias: has(QUERY_BIAS), rope_freqs: None }
    }
}

/// The one Gemma 3 size (27B) whose attention is scaled by its width per head instead of by the head's own size.
const GEMMA3_WIDE_LAYERS: u32 = 62;

pub(super) fn read(family: &Family, facts: TensorFacts) -> Result<ModelConfig, ModelFileError> {
    let Family { architecture, ref keys, vocab_size, context_length } = *family;
    keys.must_be_off("expert_count", "a mixture of experts")?;
    let gemma = architecture == Architecture::Gemma3;
    let layers = super::layer_count(keys, "block_count", None)?;
    let hidden_size: u32 = keys.need("embedding_length")?;
    let heads: u32 = keys.need("attention.head_count")?;
    let head_dim = head_dim(keys, hidden_size, heads)?;
    let attention_dim = if gemma && layers == GEMMA3_WIDE_LAYERS { hidden_size / heads } else { head_dim };
    let (layer_windows, local_rope) =
        if gemma { gemma3_windows(keys, layers)? } else { (vec![None; layers as usize], None) };
    let config = ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size: keys.need("feed_forward_length")?,
        layers,
        heads,
        kv_heads: keys.or("attention.head_count_kv", heads)?,
        head_dim,
        context_length,
        norm_eps: keys.need("attention.layer_norm_rms_epsilon")?,
        // Converters store Gemma's norms as 1 + w already.
        norm_weight_offset: 0.0,
        qkv_bias: facts.has_qkv_bias,
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Gemma3),
        post_norms: gemma,
        activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
        embedding_scale: if gemma { (hidden_size as f32).sqrt() } else { 1.0 },
        attention_scale: 1.0 / (attention_dim as f32).sqrt(),
        rope: rope(keys, head_dim, facts.rope_freqs)?,
        local_rope,
        layer_windows,
        tied_embeddings: !facts.has_output,
        // Converters permute Q and K of these two families for interleaved rope.
        interleaved_qk: matches!(architecture, Architecture::Llama | Architecture::Mistral),
    };
    config.checked(keys.path())
}

fn head_dim(keys: &Keys, hidden_size: u32, heads: u32) -> Result<u32, ModelFileError> {
    let head_dim = match keys.opt("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            return Err(keys.error("attention.head_count", format!("{heads} does not divide the width {hidden_size}")));
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        let length = keys.or(key, head_dim)?;
        if length != head_dim {
            return Err(keys.error(key, format!("is {length}; only the key length, {head_dim}, is supported")));
        }
    }
    Ok(head_dim)
}

fn rope(keys: &Keys, head_dim: u32, factors: Option<Vec<f32>>) -> Result<RopeConfig, ModelFileError> {
    let theta = keys.or("rope.freq_base", 10_000.0)?;
    let kind: String = keys.or("rope.scaling.type", "none".to_owned())?;
    let scaling = match (kind.as_str(), keys.opt("rope.scale_linear")?) {
        ("none", None) => RopeScaling::None,
        ("none", Some(factor)) => RopeScaling::Linear { factor },
        ("linear", _) => RopeScaling::Linear { factor: keys.need("rope.scaling.factor")? },
        (other, _) => {
            return Err(keys.error("rope.scaling.type", format!("is {other:?}; supported: none, linear")));
        }
    };
    if let Some(factors) = &factors
        && factors.len() != head_dim as usize / 2
    {
        let problem = format!("has {} divisors, a head of {head_dim} needs {}", factors.len(), head_dim / 2);
        return Err(ModelFileError::tensor(keys.path(), "rope_freqs.weight", problem));
    }
    Ok(RopeConfig { theta, scaling, rope_freq_factors: factors })
}

type Windows = (Vec<Option<u32>>, Option<RopeConfig>);

fn gemma3_windows(keys: &Keys, layers: u32) -> Result<Windows, ModelFileError> {
    let window: u32 = keys.need("attention.sliding_window")?;
    let pattern: u32 = keys.or("attention.sliding_window_pattern", GEMMA3_PATTERN)?;
    let local = RopeConfig {
        theta: keys.or("rope.freq_base_swa", GEMMA3_LOCAL_THETA)?,
        scaling: RopeScaling::None,
        rope_freq_factors: None,
    };
    Ok((super::patterned_windows(layers, window, pattern), Some(local)))
}
