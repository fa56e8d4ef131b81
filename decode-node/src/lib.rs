//! The decode worker: reserves blocks, takes the KV a prefill worker writes, verifies it, streams tokens.
//!
//! `service` is the gRPC side, `role` the part on the engine thread, where the handoff's receiving end meets the engine.
//! It also prefills locally when the router asks for that. Knows nothing of placement or text.

#![forbid(unsafe_code)]

mod role;
mod service;

use baton_worker::{Node, Ready, WorkerConfig, WorkerError};

/// Runs a decode worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::DecodeNode>(config).await
}

/// The same with what `load` loads, instead of what the settings say that it computes on; for tests that bring their own device.
pub async fn run_loaded(
    config: WorkerConfig,
    load: impl FnOnce(&WorkerConfig) -> Result<Ready, WorkerError> + Send + 'static,
) -> Result<(), WorkerError> {
    Node::run_loaded::<service::DecodeNode>(config, load).await
}
