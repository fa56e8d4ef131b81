//! A summary of a model for people and for scripts.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Architecture, Model};

/// What a model is made of.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Inspection {
    /// Name for people.
    pub name: String,
    /// Family.
    pub architecture: Architecture,
    /// Number of weights; a tied output head is not counted twice.
    pub parameters: u64,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Element types in use, with their shares.
    pub quantisation: BTreeMap<String, Share>,
    /// Layers.
    pub layers: u32,
    /// Layers that see only a window.
    pub windowed_layers: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Longest sequence, tokens.
    pub context_length: u32,
    /// Bytes of KV that one token takes in all layers together, at two bytes an element.
    pub kv_bytes_per_token: u64,
    /// The model has a chat template.
    pub chat: bool,
    /// Fingerprint, hexadecimal.
    pub fingerprint: String,
}

/// The tensors of one element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Share {
    /// Number of tensors.
    pub tensors: u32,
    /// Their elements.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Summarises an open model.
pub fn inspect(model: &Model) -> Inspection {
    let config = model.config();
    let mut quantisation: BTreeMap<String, Share> = BTreeMap::new();
    for tensor in model.tensors() {
        let share = quantisation.entry(tensor.dtype.to_string()).or_default();
        share.tensors += 1;
        share.parameters += tensor.elements();
        share.bytes += tensor.bytes();
    }
    Inspection {
        name: model.name().to_owned(),
        architecture: config.architecture,
        parameters: quantisation.values().map(|share| share.parameters).sum(),
        bytes: quantisation.values().map(|share| share.bytes).sum(),
        quantisation,
        layers: config.layers,
        windowed_layers: config.layer_windows.iter().flatten().count() as u32,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocab_size: config.vocab_size,
        context_length: config.context_length,
        kv_bytes_per_token: 2 * 2 * u64::from(config.kv_size()) * u64::from(config.layers),
        chat: model.chat_template().is_some(),
        fingerprint: format!("{:016x}", model.fingerprint()),
    }
}
