//! Why a store cannot be opened. Once it is open, whatever fails is a miss.

use std::path::PathBuf;

use baton_kv_store::StoreError;
use baton_types::{BatonError, ErrorKind};

/// A store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Settings that cannot work.
    #[error(transparent)]
    Settings(#[from] StoreError),
    /// The directory of the disk tier cannot be used.
    #[error("KV store: cannot {doing} {}: {cause}; give a directory that this process may write to", path.display())]
    Directory {
        /// What was tried.
        doing: &'static str,
        /// With which path.
        path: PathBuf,
        /// What came of it.
        cause: std::io::Error,
    },
    /// Another process uses the directory.
    #[error("KV store: {} is used by another process{}; give each worker a directory of its own, or stop that process", path.display(), named(*process))]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The process, in its own namespace of processes, if it has said so.
        process: Option<u32>,
    },
    /// The object store cannot be used.
    #[error(
        "KV store: cannot use the object store {url:?} (kv_object): {cause}; give s3://BUCKET/PREFIX or file:///DIRECTORY"
    )]
    Object {
        /// Its URL.
        url: String,
        /// Why not.
        cause: String,
    },
    /// Memory or a thread cannot be had.
    #[error("KV store: cannot {doing}: {cause}; give the host tier less memory")]
    Host {
        /// What was tried.
        doing: &'static str,
        /// What came of it.
        cause: std::io::Error,
    },
}

fn named(process: Option<u32>) -> String {
    process.map_or_else(String::new, |id| format!(", {id}"))
}

impl BatonError for OpenError {
    fn kind(&self) -> ErrorKind {
        match self {
            OpenError::Settings(error) => error.kind(),
            OpenError::Directory { .. } | OpenError::InUse { .. } | OpenError::Object { .. } => {
                ErrorKind::InvalidArgument
            }
            OpenError::Host { .. } => ErrorKind::ResourceExhausted,
        }
    }
}
