//! Whole models, from a name to tensors: GGUF, safetensors, random weights.
//!
//! `fetch::Source` turns what a user typed into a path or a shape, and [`Model::open`] maps what lies there. Tokenizer and chat template
//! are in `baton-model-text`, which the router uses without this crate. This crate knows nothing about kernels, batching or the network
//! between workers.

pub mod fetch;
mod fingerprint;
mod gguf;
mod inspect;
mod model;
mod names;
mod random;
mod safetensors;
mod store;
mod tensors;
mod weights;

pub use baton_model_text::{
    Activation, Architecture, Arithmetic, ChatTemplate, Device, Estimate, EstimateOptions, LINKS, Link, ModelConfig,
    ModelFileError, RopeConfig, RopeScaling, SCRATCH_BYTES, TextModel, Tokenizer, Travel, WeightKind, activation_bytes,
    estimate, kv_layout, operand_bytes,
};
pub use inspect::{Inspection, inspect};
pub use model::Model;
pub use random::RandomModel;
pub use tensors::{LayerTensor, TensorInfo, TensorName, TensorRef, WeightDtype};
