//! The decode worker: reserves blocks, receives the KV that a prefill worker writes, verifies it, and streams tokens.
//!
//! `service` is the gRPC side. `role` runs on the engine thread and connects the receiving end of handoffs with the engine.
//! The worker also prefills locally when the router asks for that. It knows nothing of placement or text.

#![forbid(unsafe_code)]

mod role;
mod service;

use baton_worker::{Node, Ready, WorkerConfig, WorkerError};

/// Runs a decode worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::DecodeNode>(config).await
}

/// Like [`run`], but computes on what `load` returns, not on what the settings name. For tests that bring their own device.
pub async fn run_loaded(
    config: WorkerConfig,
    load: impl FnOnce(&WorkerConfig) -> Result<Ready, WorkerError> + Send + 'static,
) -> Result<(), WorkerError> {
    Node::run_loaded::<service::DecodeNode>(config, load).await
}
