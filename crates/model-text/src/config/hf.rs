//! [`ModelConfig`] from a Hugging Face `config.json`, in the older and the current spelling of rope and layer types.

use crate::{Architecture, Family, Keys, ModelFileError};

use super::{Activation, GEMMA3_LOCAL_THETA, GEMMA3_PATTERN, ModelConfig, RopeConfig, RopeScaling};

/// Values that a family's `config.json` may leave out.
struct Defaults {
    head_dim: Option<u32>,
    theta: f32,
    tied: bool,
}

pub(super) fn read(family: &Family) -> Result<ModelConfig, ModelFileError> {
    let Family { architecture, ref keys, vocab_size, context_length } = *family;
    let gemma = architecture == Architecture::Gemma3;
    let defaults = match architecture {
        Architecture::Gemma3 => Defaults { head_dim: Some(256), theta: 1_000_000.0, tied: true },
        Architecture::Qwen3 => Defaults { head_dim: Some(128), theta: 10_000.0, tied: false },
        _ => Defaults { head_dim: None, theta: 10_000.0, tied: false },
    };
    reject_what_is_not_implemented(keys, architecture)?;
    // The 4B and larger Gemma 3 files leave out values that equal the family's defaults.
    let size = |key: &str, gemma_default: u32| if gemma { keys.or(key, gemma_default) } else { keys.need(key) };
    let layers = super::layer_count(keys, "num_hidden_layers", gemma.then_some(26))?;
    let (hidden_size, heads) = (size("hidden_size", 2304)?, size("num_attention_heads", 8)?);
    let head_dim = head_dim(keys, &defaults, hidden_size, heads)?;
    let attention_dim = if gemma { keys.or("query_pre_attn_scalar", 256.0)? } else { head_dim as f32 };
    let (rope, local_rope) = ropes(keys, gemma, defaults.theta)?;
    let config = ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size: size("intermediate_size", 9216)?,
        layers,
        heads,
        kv_heads: keys.or("num_key_value_heads", if gemma { 4 } else { heads })?,
        head_dim,
        context_length,
        norm_eps: keys.or("rms_norm_eps", 1e-6)?,
        norm_weight_offset: if gemma { 1.0 } else { 0.0 },
        qkv_bias: architecture == Architecture::Qwen2,
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Gemma3),
        post_norms: gemma,
        activation: activation(keys, gemma)?,
        embedding_scale: if gemma { (hidden_size as f32).sqrt() } else { 1.0 },
        attention_scale: 1.0 / attention_dim.sqrt(),
        rope,
        local_rope,
        layer_windows: layer_windows(keys, architecture, layers)?,
        tied_embeddings: keys.or("tie_word_embeddings", defaults.tied)?,
        interleaved_qk: false,
    };
    config.checked(keys.path())
}

fn reject_what_is_not_implemented(keys: &Keys, architecture: Architecture) -> Result<(), ModelFileError> {
    // For Qwen2 the key does not exist: its Q, K and V always have biases, its output projection never.
    if architecture != Architecture::Qwen2 {
        keys.must_be_off("attention_bias", "a bias on the attention's output projection")?;
    }
    keys.must_be_off("mlp_bias", "a bias in the feed-forward block")?;
    keys.must_be_off("attn_logit_softcapping", "a cap on attention logits")?;
    keys.must_be_off("final_logit_softcapping", "a cap on logits")?;
    keys.must_be_off("use_bidirectional_attention", "attention that is not causal")?;
    keys.must_be_off("num_local_experts", "a mixture of experts")?;
    keys.must_be_off("quantization_config", "a quantised safetensors model")?;
    match keys.opt::<f32>("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(part) => Err(keys.error("partial_rotary_factor", format!("is {part}; only 1 is supported"))),
    }
}

fn head_dim(keys: &Keys, defaults: &Defaults, hidden_size: u32, heads: u32) -> Result<u32, ModelFileError> {
    match keys.opt("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => Ok(head_dim),
        None if heads > 0 && hidden_size.is_multiple_of(heads) => Ok(hidden_size / heads),
        None => {
            Err(keys
                .error("num_attention_heads", format!("{heads} does not divide hidden_size, which is {hidden_size}")))
        }
    }
}

fn activation(keys: &Keys, gemma: bool) -> Result<Activation, ModelFileError> {
    let (key, default) = if gemma { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
    match keys.or(key, default.to_owned())?.as_str() {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(keys.error(key, format!("is {other:?}; supported: silu, gelu_pytorch_tanh"))),
    }
}

/// The rope of full layers, and that of windowed layers where the family has a separate one.
fn ropes(keys: &Keys, gemma: bool, theta: f32) -> Result<(RopeConfig, Option<RopeConfig>), ModelFileError> {
    let default_local = || gemma.then(|| plain_rope(GEMMA3_LOCAL_THETA));
    if let Some(parameters) = keys.section("rope_parameters")? {
        let (full, local) = (parameters.section("full_attention")?, parameters.section("sliding_attention")?);
        let local = local.map(|section| rope(&section, GEMMA3_LOCAL_THETA)).transpose()?;
        return Ok((rope(full.as_ref().unwrap_or(&parameters), theta)?, local.or_else(default_local)));
    }
    let theta = keys.or("rope_theta", theta)?;
    let full = match keys.section("rope_scaling")? {
        Some(section) => rope(&section, theta)?,
        None => plain_rope(theta),
    };
    let local = keys.opt("rope_local_base_freq")?.filter(|_| gemma).map(plain_rope);
    Ok((full, local.or_else(default_local)))
}

fn plain_rope(theta: f32) -> RopeConfig {
    RopeConfig { theta, scaling: RopeScaling::None, rope_freq_factors: None }
}

/// Rope from a section that names its type; `theta` where the section has none.
fn rope(section: &Keys, theta: f32) -> Result<RopeConfig, ModelFileError> {
    let key = if section.opt::<String>("rope_type")?.is_some() { "rope_type" } else { "type" };
    let kind: String = section.or(key, "default".to_owned())?;
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: section.need("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: section.need("factor")?,
            low_freq_factor: section.need("low_freq_factor")?,
            high_freq_factor: section.need("high_freq_factor")?,
            original_context: section.need("original_max_position_embeddings")?,
        },
        other => {
            return Err(section.error(key, format!("is {other:?}; supported: default, linear, llama3")));
        }
    };
    Ok(RopeConfig { theta: section.or("rope_theta", theta)?, scaling, rope_freq_factors: None })
}

fn layer_windows(keys: &Keys, architecture: Architecture, layers: u32) -> Result<Vec<Option<u32>>, ModelFileError> {
    let count = layers as usize;
    // Qwen's sliding window has a switch of its own, which is off unless set.
    let qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
    let switched_off = architecture == Architecture::Llama || (qwen && !keys.or("use_sliding_window", false)?);
    let window = match keys.opt::<u32>("sliding_window")? {
        Some(window) if !switched_off => window,
        None if architecture == Architecture::Gemma3 => 4096,
        _ => return Ok(vec![None; count]),
    };
    if let Some(types) = keys.opt::<Vec<String>>("layer_types")? {
        return typed_windows(keys, &types, count, window);
    }
    Ok(match architecture {
        Architecture::Gemma3 => {
            super::patterned_windows(layers, window, keys.or("sliding_window_pattern", GEMMA3_PATTERN)?)
        }
        Architecture::Mistral => vec![Some(window); count],
        _ => {
            let first = keys.or("max_window_layers", layers)?;
            (0..layers).map(|layer| (layer >= first).then_some(window)).collect()
        }
    })
}

fn typed_windows(
    keys: &Keys,
    types: &[String],
    layers: usize,
    window: u32,
) -> Result<Vec<Option<u32>>, ModelFileError> {
    if types.len() != layers {
        return Err(keys.error("layer_types", format!("has {} entries for {layers} layers", types.len())));
    }
    let parse = |kind: &String| match kind.as_str() {
        "full_attention" => Ok(None),
        "sliding_attention" => Ok(Some(window)),
        other => Err(keys.error("layer_types", format!("has {other:?}; supported: full_attention, sliding_attention"))),
    };
    types.iter().map(parse).collect()
}
