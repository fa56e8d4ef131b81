//! What tests across crates share: reference outputs of other implementations, tiny random
//! models, a way to run a model in this process, and one to run a cluster of real processes.

#![forbid(unsafe_code)]

pub mod binary;
pub mod cluster;
pub mod collector;
pub mod local;
pub mod logits;
pub mod needs;
pub mod perplexity;
pub mod references;
pub mod soak;
pub mod tiny;
pub mod ucx;
