//! The OpenAI-compatible HTTP API: its JSON, in and out. Everything in between is shared by both front doors.

mod answer;
mod echo;
mod fields;
mod logprobs;
mod once;
mod output;
mod parse;
mod reader;
mod request;
mod tokens;
mod tools;
mod types;

pub(crate) use answer::{Answer, Part, Shape, UsageSum};
pub(crate) use echo::Echo;
pub(crate) use reader::Reader;
pub(crate) use request::{Asked, Envelope};
pub(crate) use tokens::{detokenize, tokenize};
pub(crate) use types::{ErrorBody, Model, ModelList};

use crate::error::RequestError;
use crate::input::GenerateInput;

/// Reads a request's body.
pub(crate) fn read(shape: Shape, body: &[u8], envelope: Envelope) -> Result<(GenerateInput, Asked), RequestError> {
    match shape {
        Shape::Chat => request::chat(body, envelope),
        Shape::Text => request::completion(body, envelope),
    }
}
