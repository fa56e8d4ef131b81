//! Finds, fetches and reads models: from a name to tensors, tokenizer and chat template.
//!
//! `fetch::Source::find` turns what a user typed into a path or a shape, [`Model::open`] maps what lies there. The router uses the tokenizer and
//! the template, the workers the configuration and the tensors. Knows nothing about kernels, batching or the network
//! between workers.

mod chat;
mod config;
mod error;
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
mod tokenizer;

pub use chat::{ChatMessage, ChatTemplate, FunctionCall, ToolCall, ToolSyntax};
pub use config::{Activation, Architecture, ModelConfig, RopeConfig, RopeScaling};
pub use error::ModelFileError;
pub use inspect::{Inspection, inspect};
pub use model::Model;
pub use random::RandomModel;
pub use tensors::{LayerTensor, TensorInfo, TensorName, TensorRef, WeightDtype};
pub use tokenizer::{TextStream, Tokenizer};
