//! The prefill worker: computes prompts and writes their KV, layer by layer, into a decode worker's reservation.
//!
//! `service` is the gRPC side, `role` the part on the engine thread, where a step's layers become transfers. Knows nothing
//! of placement or text.

mod role;
mod service;

use baton_worker::{Node, WorkerConfig, WorkerError};

/// Runs a prefill worker until it is told to stop.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    Node::run::<service::PrefillNode>(config).await
}
