//! What the one decoder is told about a model. Filled from GGUF metadata or from `config.json`, then checked once, here.
//!
//! Knows nothing about tensors' bytes: only sizes, switches and scalars.

pub(crate) mod gguf;
pub(crate) mod hf;
mod keys;

use serde::{Deserialize, Serialize};

pub(crate) use keys::Keys;

/// Families of models the decoder implements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama and everything shaped like it (SmolLM2, TinyLlama, Llama 3.x).
    Llama,
    /// Qwen2 and Qwen2.5: biases on Q, K and V.
    Qwen2,
    /// Qwen3: RMS norm on each head of Q and K.
    Qwen3,
    /// Mistral: Llama, optionally with a sliding window in every layer.
    Mistral,
    /// Gemma 3, text part: sandwich norms, local and global layers with two rope bases, scaled embeddings.
    Gemma3,
}

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
    /// Llama 3: low frequencies are divided by `factor`, high ones kept, those between blended.
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

/// Everything the decoder must know apart from the weights.
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
    /// For each layer how many latest tokens a query sees, itself included; None: all.
    pub layer_windows: Vec<Option<u32>>,
    /// The output head is the embedding.
    pub tied_embeddings: bool,
    /// Rows of Q and K are ordered for interleaved rope (pairs 2i, 2i+1); whoever loads the weights restores half-split order.
    pub interleaved_qk: bool,
}

impl ModelConfig {
    /// Elements of one token's K or V in one layer.
    pub fn kv_size(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Elements of one token's Q in one layer.
    pub fn q_size(&self) -> u32 {
        self.heads * self.head_dim
    }
}
