//! What tests across crates share: reference outputs of other implementations, tiny random
//! models, and a way to run a model in this process.
//!

pub mod local;
pub mod references;
pub mod tiny;
