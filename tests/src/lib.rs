//! What tests across crates share: reference outputs of other implementations, and tiny random models.
//!
//! Only data and files; nothing here runs a model.

pub mod references;
pub mod tiny;
