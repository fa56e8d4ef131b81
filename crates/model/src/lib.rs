//! The one decoder for all models, its weights, and the sampler.
//!
//! Between `engine`, whose trait [`baton_engine::ModelRunner`] it implements, and `kernels`, whose operations it composes.
//! What differs between models is configuration ([`baton_model_files::ModelConfig`]); there is one forward pass. Knows no
//! requests, sockets or schedulers.

mod changes;
mod choose;
mod decoder;
mod error;
mod footprint;
mod layout;
pub mod parallel;
mod rope;
mod runner;
mod sampler;
mod softmax;
mod weights;

pub use decoder::{Decoder, DecoderLimits};
pub use error::ModelError;
pub use footprint::Footprint;
pub use layout::kv_layout;
pub use sampler::Sampler;
