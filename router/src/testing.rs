//! For tests and the fuzzers: a model of bytes, and what becomes of a body, without a socket and without workers.

pub mod model;

use std::sync::Arc;

use baton_policy::Capacity;
use baton_types::{RequestId, SamplingParams};
use tokio::time::Instant;

use crate::openai::{self, Asked, Envelope, Shape};
use crate::{RequestError, ServedModel};

/// Where a body was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// POST /v1/chat/completions
    Chat,
    /// POST /v1/completions
    Completions,
}

/// A request that could be given to workers.
#[derive(Clone, PartialEq, Debug)]
pub struct Checked {
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the model may call functions.
    pub tools: bool,
    /// Token ids of each prompt, and what its choices are sampled by.
    pub prompts: Vec<(Arc<[u32]>, Vec<SamplingParams>)>,
}

/// The way of a body up to the first worker, which it would begin now.
///
/// # Errors
/// What the client would be told.
pub async fn read(endpoint: Endpoint, body: &[u8], model: &Arc<ServedModel>) -> Result<Checked, RequestError> {
    let now = Instant::now();
    let envelope = Envelope { request_id: RequestId("test".to_owned()), received: now, deadline: now };
    let shape = match endpoint {
        Endpoint::Chat => Shape::Chat,
        Endpoint::Completions => Shape::Text,
    };
    let (input, Asked { stream, .. }) = openai::read(shape, body, envelope)?;
    input.check(model)?;
    let tools = input.tools.is_some();
    let planned = input.plan(model, Capacity::UNKNOWN).await?;
    Ok(Checked { stream, tools, prompts: planned.into_iter().map(|plan| (plan.prompt, plan.choices)).collect() })
}
