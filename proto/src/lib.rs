//! The wire contract: generated gRPC code, and checked conversion between it and `baton-types`.
//!
//! This crate makes no decisions. A value that cannot be represented is an error that names its field.

#![forbid(unsafe_code)]

mod convert;
mod meant;

/// Generated messages, clients and servers.
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
    /// Encoded file descriptors, for server reflection.
    pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("baton");
}

pub use convert::{ConvertError, draining_status, says_draining, status_of};
pub use meant::{MeantFor, OnlyFor, another_worker_status, says_another_worker};
