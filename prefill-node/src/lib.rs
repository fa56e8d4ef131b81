//! The prefill worker: computes prompts and writes their KV, layer by layer, into a decode worker's reservation.
//!
//! `service` is the gRPC side, `role` the part on the engine thread, where a step's layers become transfers. Knows nothing
//! of placement or text.

#![forbid(unsafe_code)]

mod role;
mod service;

use baton_worker::{Node, Ready, WorkerConfig, WorkerError};

/// Runs a prefill worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::PrefillNode>(config).await
}

/// The same with what `load` loads, instead of what the settings say that it computes on; for tests that bring their own device.
pub async fn run_loaded(
    config: WorkerConfig,
    load: impl FnOnce(&WorkerConfig) -> Result<Ready, WorkerError> + Send + 'static,
) -> Result<(), WorkerError> {
    Node::run_loaded::<service::PrefillNode>(config, load).await
}
