//! The decode worker: reserves blocks, takes the KV a prefill worker writes, verifies it, streams tokens.
//!
//! `service` is the gRPC side, `role` the part on the engine thread, where the handoff's receiving end meets the engine.
//! It also prefills locally when the router asks for that. Knows nothing of placement or text.

mod role;
mod service;

use baton_worker::{Node, WorkerConfig, WorkerError};

/// Runs a decode worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::DecodeNode>(config).await
}
