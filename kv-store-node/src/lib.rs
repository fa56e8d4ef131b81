//! The KV store as a process of its own: it keeps KV that workers computed, and gives it to workers that lack it. So memory scales without
//! compute.
//!
//! It is a worker without a model: a pool in host memory, the tiers below it, and the two ends of handoffs. Routers have it fetch prefixes from
//! the workers that hold them, and have other workers fetch these from it (`baton_roles::exchange`). It takes no prompts.

#![forbid(unsafe_code)]

mod config;
mod node;

use baton_worker::{Node, WorkerError, load_pool};

pub use config::KvStoreConfig;

/// Runs a KV store until it is told to stop.
///
/// # Errors
/// A setting is out of range, the model or the store cannot be opened, or the registry refuses it.
pub async fn run(config: KvStoreConfig) -> Result<(), WorkerError> {
    config.check()?;
    let computed_by = config.computed_by.clone();
    Node::run_loaded::<node::KvStoreNode>(config.into(), move |config| load_pool(config, computed_by)).await
}
