//! Errors of the store's settings and accounts.

use baton_types::{BatonError, ErrorKind};

/// Errors of this crate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StoreError {
    /// A setting that cannot work.
    #[error("KV store: {field} is {value}; it must be {must}")]
    Setting {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        must: &'static str,
    },
    /// The accounts of the store contradict each other: a defect of this crate.
    #[error("KV store: {0}")]
    Broken(String),
}

impl BatonError for StoreError {
    fn kind(&self) -> ErrorKind {
        match self {
            StoreError::Setting { .. } => ErrorKind::InvalidArgument,
            StoreError::Broken(_) => ErrorKind::Internal,
        }
    }
}
