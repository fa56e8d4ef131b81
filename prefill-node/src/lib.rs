//! The prefill worker: computes prompts and writes their KV, layer by layer, into a decode worker's reservation.
//!
//! `service` is the gRPC side. `role` runs on the engine thread and turns the layers of a step into transfers. The worker
//! knows nothing of placement or text.

#![forbid(unsafe_code)]

mod role;
mod service;

use baton_worker::{Node, Ready, WorkerConfig, WorkerError};

/// Runs a prefill worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::PrefillNode>(config).await
}

/// Like [`run`], but computes on what `load` returns, not on what the settings name. For tests that bring their own device.
pub async fn run_loaded(
    config: WorkerConfig,
    load: impl FnOnce(&WorkerConfig) -> Result<Ready, WorkerError> + Send + 'static,
) -> Result<(), WorkerError> {
    Node::run_loaded::<service::PrefillNode>(config, load).await
}
