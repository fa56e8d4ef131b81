//! What programs that never read weights need of a model: tokenizer, chat template, configuration, and what memory follows from it.
//! This crate also finds and fetches models.
//!
//! [`fetch::Source`] turns what a user typed into a path, [`TextModel::open`] reads what lies there: a directory's text files, or the
//! header of a GGUF file. `baton-model-files` adds the tensors. This crate knows the names of weight files, but not their content.

#![forbid(unsafe_code)]

mod arithmetic;
mod chat;
mod config;
mod error;
mod estimate;
mod family;
pub mod fetch;
pub mod gguf;
mod keys;
mod layout;
mod random;
mod sampling;
mod text;
mod tokenizer;

pub use arithmetic::Arithmetic;
pub use chat::{ChatMessage, ChatTemplate, FunctionCall, THOUGHTS, TemplateOptions, ToolCall, ToolSyntax};
pub use config::{Activation, ModelConfig, RopeConfig, RopeScaling, TensorFacts};
pub use error::ModelFileError;
pub use estimate::{
    Device, Estimate, EstimateOptions, LINKS, Link, SCRATCH_BYTES, Travel, WeightKind, activation_bytes, estimate,
    operand_bytes,
};
pub use family::{Architecture, Family, MAX_VOCABULARY, check_size};
pub use keys::Keys;
pub use layout::kv_layout;
pub use random::{PREFIX as RANDOM_PREFIX, RandomShape};
pub use sampling::SamplingDefaults;
pub use text::TextModel;
pub use tokenizer::{Lookup, TextStream, TokenCache, Tokenizer};
