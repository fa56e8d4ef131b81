//! For tests and fuzzers: a model whose tokens are bytes, and the processing of a body without a socket or workers.

pub mod model;

use std::sync::Arc;

use baton_policy::Capacity;
use baton_types::{RequestId, SamplingParams};
use tokio::time::Instant;

use crate::models::Defaults;
pub use crate::openai::Endpoint;
use crate::openai::{self, Asked, Envelope};
use crate::{RequestError, ServedModel};

/// A request that passed every check and could be sent to workers.
#[derive(Clone, PartialEq, Debug)]
pub struct Checked {
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the model may call functions.
    pub tools: bool,
    /// Token ids of each prompt, and the sampling parameters of its choices.
    pub prompts: Vec<(Arc<[u32]>, Vec<SamplingParams>)>,
}

/// Processes a body up to the point where the router would send work to the first worker.
///
/// # Errors
/// The error that the client would get.
pub async fn read(endpoint: Endpoint, body: &[u8], model: &Arc<ServedModel>) -> Result<Checked, RequestError> {
    let now = Instant::now();
    let (request_id, defaults) = (RequestId("test".to_owned()), Arc::new(Defaults::only(model.defaults().clone())));
    let envelope = Envelope { request_id, tenant: None, received: now, deadline: now, defaults, span: None };
    let (input, Asked { stream, .. }, _) = openai::read(endpoint, body, envelope)?;
    input.check(model)?;
    let tools = input.tools.is_some();
    let planned = input.plan(model, Capacity::UNKNOWN).await?;
    Ok(Checked { stream, tools, prompts: planned.into_iter().map(|plan| (plan.prompt, plan.choices)).collect() })
}
