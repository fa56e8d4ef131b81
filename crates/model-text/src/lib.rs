//! The text part of a model, for programs that never read weights: tokenizer, chat template, and the few configuration values that
//! text depends on. This crate also finds and fetches models.
//!
//! [`fetch::Source`] turns what a user typed into a path, [`TextModel::open`] reads what lies there: a directory's text files, or the
//! header of a GGUF file. `baton-model-files` adds the tensors. This crate knows the names of weight files, but not their content.

#![forbid(unsafe_code)]

mod chat;
mod error;
mod family;
pub mod fetch;
pub mod gguf;
mod keys;
mod random;
mod sampling;
mod text;
mod tokenizer;

pub use chat::{ChatMessage, ChatTemplate, FunctionCall, THOUGHTS, TemplateOptions, ToolCall, ToolSyntax};
pub use error::ModelFileError;
pub use family::{Architecture, Family, MAX_VOCABULARY, check_size};
pub use keys::Keys;
pub use random::{PREFIX as RANDOM_PREFIX, RandomShape};
pub use sampling::SamplingDefaults;
pub use text::TextModel;
pub use tokenizer::{Lookup, TextStream, TokenCache, Tokenizer};
