//! The one decoder for all models, its weights, and the sampler.
//!
//! Implements [`baton_engine::ModelRunner`] with the operations of `kernels`. There is one forward pass for all models; what differs
//! between them is configuration ([`baton_model_files::ModelConfig`]). This crate knows no requests, sockets or schedulers.

mod changes;
mod choose;
mod decoder;
mod error;
mod footprint;
pub mod parallel;
mod rope;
mod runner;
mod sampler;
mod softmax;
mod weights;

pub use baton_model_files::kv_layout;
pub use decoder::{Decoder, DecoderLimits};
pub use error::ModelError;
pub use footprint::Footprint;
pub use sampler::Sampler;
pub use weights::pack;
