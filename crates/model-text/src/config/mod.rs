//! A model's configuration, as the decoder needs it. It is filled from GGUF metadata or from `config.json`, and then checked once,
//! here.
//!
//! It knows nothing about the bytes of tensors: only sizes, switches and scalars.

mod gguf;
mod hf;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use gguf::TensorFacts;

use crate::{Architecture, Family, Keys, MAX_VOCABULARY, ModelFileError, check_size};

/// The gate's activation in the feed-forward block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// How rotation frequencies are stretched beyond the trained context.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// Divisor, above 0.
        factor: f32,
    },
    /// Llama 3: low frequencies are divided by `factor`, high ones are kept, and frequencies in between are blended.
    Llama3 {
        /// Divisor of low frequencies, above 0.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are low frequencies.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are high frequencies.
        high_freq_factor: f32,
        /// Context the model was trained with, tokens.
        original_context: u32,
    },
}

/// Rotary position embedding over the whole head.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// Their scaling.
    pub scaling: RopeScaling,
    /// Divisor of each of the `head_dim / 2` frequencies, when the file carries them as a tensor; `scaling` is then `None`.
    pub rope_freq_factors: Option<Vec<f32>>,
}

/// Everything that the decoder must know except the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding, which may exceed the tokenizer's vocabulary.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the feed-forward block.
    pub intermediate_size: u32,
    /// Layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads, a divisor of `heads`.
    pub kv_heads: u32,
    /// Elements of a head, even. `heads * head_dim` need not equal `hidden_size`.
    pub head_dim: u32,
    /// Longest sequence, tokens.
    pub context_length: u32,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Added to norm weights as stored: 1 where the file holds w and the norm is (1 + w), else 0.
    pub norm_weight_offset: f32,
    /// Q, K and V projections have biases.
    pub qkv_bias: bool,
    /// Each head of Q and K is RMS-normalised before rope.
    pub qk_norm: bool,
    /// Attention and feed-forward outputs are normalised before they join the residual stream.
    pub post_norms: bool,
    /// Activation of the gate.
    pub activation: Activation,
    /// Factor on embeddings.
    pub embedding_scale: f32,
    /// Factor on Q · K.
    pub attention_scale: f32,
    /// Rope of layers without a window, and of all layers where `local_rope` is absent.
    pub rope: RopeConfig,
    /// Rope of layers with a window, where it differs.
    pub local_rope: Option<RopeConfig>,
    /// For each layer, the number of latest tokens that a query sees, itself included; None: all.
    pub layer_windows: Vec<Option<u32>>,
    /// The output head is the embedding.
    pub tied_embeddings: bool,
    /// Rows of Q and K are ordered for interleaved rope (pairs 2i, 2i+1); whoever loads the weights restores half-split order.
    pub interleaved_qk: bool,
}

/// Base of Gemma 3's local rope and distance between its global layers: fixed by the family, absent from many of its files.
const GEMMA3_LOCAL_THETA: f32 = 10_000.0;
const GEMMA3_PATTERN: u32 = 6;

// Far above any model, but low enough that products of two fit in the types used for them.
const MAX_SIZE: u32 = 1 << 24;
const MAX_LAYERS: u32 = 1 << 10;
const MAX_HEADS: u32 = 1 << 12;
const MAX_HEAD_DIM: u32 = 1 << 12;

impl ModelConfig {
    /// The configuration from the keys of a `config.json`.
    ///
    /// # Errors
    /// A key is missing, or its value does not work.
    pub fn of_family(family: &Family) -> Result<ModelConfig, ModelFileError> {
        hf::read(family)
    }

    /// The configuration from the metadata of a GGUF file, and from what its tensors say.
    ///
    /// # Errors
    /// A key is missing, or its value does not work.
    pub fn of_gguf(family: &Family, facts: TensorFacts) -> Result<ModelConfig, ModelFileError> {
        gguf::read(family, facts)
    }

    /// Elements of one token's K or V in one layer.
    pub fn kv_size(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Elements of one token's Q in one layer.
    pub fn q_size(&self) -> u32 {
        self.heads * self.head_dim
    }
    /// The configuration, if its parts fit together. `path` is the file that errors name.
    pub(crate) fn checked(self, path: &Path) -> Result<ModelConfig, ModelFileError> {
        let fail = |key: &str, problem: String| Err(ModelFileError::config(path, key, problem));
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_VOCABULARY),
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("heads", self.heads, MAX_HEADS),
            ("kv_heads", self.kv_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("context_length", self.context_length, u32::MAX),
        ];
        sizes.into_iter().try_for_each(|(key, value, most)| check_size(path, key, value, most))?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail("kv_heads", format!("{} does not divide the {} query heads", self.kv_heads, self.heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail("head_dim", format!("is {}; rope needs an even number", self.head_dim));
        }
        if self.layer_windows.len() != self.layers as usize || self.layer_windows.contains(&Some(0)) {
            return fail("sliding_window", "must be at least 1, for each layer or for none".to_owned());
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps < 1.0) {
            return fail("norm_eps", format!("is {}; it must be at least 0 and below 1", self.norm_eps));
        }
        if !(self.attention_scale.is_finite() && self.attention_scale > 0.0) {
            return fail("attention_scale", format!("is {}; it must be above 0", self.attention_scale));
        }
        for rope in [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten() {
            rope.check().map_err(|problem| ModelFileError::config(path, "rope", problem))?;
        }
        Ok(self)
    }
}

impl RopeConfig {
    fn check(&self) -> Result<(), String> {
        let positive = |name: &str, value: f32| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(format!("{name} is {value}; it must be a finite number above 0")),
        };
        positive("theta", self.theta)?;
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("factor", factor)?,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)?;
                positive("original_max_position_embeddings", original_context as f32)?;
            }
        }
        self.rope_freq_factors.iter().flatten().try_for_each(|&divisor| positive("a frequency divisor", divisor))
    }
}

/// Every `pattern`-th layer is global, the others see `window` tokens. A pattern of 0 has no global layer.
fn patterned_windows(layers: u32, window: u32, pattern: u32) -> Vec<Option<u32>> {
    let global = |layer: u32| pattern > 0 && (layer + 1).is_multiple_of(pattern);
    (0..layers).map(|layer| (!global(layer)).then_some(window)).collect()
}

/// The number of layers, bounded before anything is allocated for each of them.
fn layer_count(keys: &Keys, key: &str, default: Option<u32>) -> Result<u32, ModelFileError> {
    let layers = match default {
        Some(default) => keys.or(key, default)?,
        None => keys.need(key)?,
    };
    match layers {
        1..=MAX_LAYERS => Ok(layers),
        _ => Err(keys.error(key, format!("is {layers}; it must be between 1 and {MAX_LAYERS}"))),
    }
}
