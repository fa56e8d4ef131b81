//! The OpenAI-compatible HTTP API: its JSON, in and out. Everything in between is shared by both front doors.

mod answer;
mod cut;
mod document;
mod echo;
mod embedded;
mod fields;
mod logprobs;
mod object;
mod once;
mod output;
mod parse;
mod reader;
mod request;
mod responses;
mod template;
mod tokens;
mod tools;
mod types;
mod usage;

pub(crate) use answer::{Answer, Part, Shape};
pub(crate) use document::document;
pub(crate) use echo::Echo;
pub(crate) use embedded::Embedded;
pub(crate) use fields::names;
pub(crate) use reader::{Reader, Said};
pub(crate) use request::{Asked, Envelope, conversation};
pub(crate) use responses::{Events, Frame, whole as whole_response};
pub(crate) use template::Template;
pub(crate) use tokens::{TokenizeInput, Unwritten, detokenize, tokenize};
pub(crate) use types::{ErrorBody, Model, ModelList};
pub(crate) use usage::UsageSum;

use crate::error::RequestError;
use crate::input::GenerateInput;

/// An endpoint that generates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// POST /v1/chat/completions
    Chat,
    /// POST /v1/completions
    Completions,
    /// POST /v1/responses
    Responses,
}

impl Endpoint {
    /// The beginning of its answers' ids.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Completions => "cmpl-",
            Endpoint::Responses => "resp_",
        }
    }

    /// An error with the names that this endpoint's fields have.
    pub(crate) fn reworded(self, error: RequestError) -> RequestError {
        match self {
            Endpoint::Responses => responses::reworded(error, &[]),
            Endpoint::Chat | Endpoint::Completions => error,
        }
    }

    pub(crate) fn shape(self) -> Shape {
        match self {
            Endpoint::Chat | Endpoint::Responses => Shape::Chat,
            Endpoint::Completions => Shape::Text,
        }
    }
}

/// Reads a request's body. A response also repeats some of it.
pub(crate) fn read(
    endpoint: Endpoint,
    body: &[u8],
    envelope: Envelope,
) -> Result<(GenerateInput, Asked, Option<Frame>), RequestError> {
    match endpoint {
        Endpoint::Chat => request::chat(body, envelope).map(|(input, asked)| (input, asked, None)),
        Endpoint::Completions => request::completion(body, envelope).map(|(input, asked)| (input, asked, None)),
        Endpoint::Responses => responses::read(body, envelope).map(|(input, asked, frame)| (input, asked, Some(frame))),
    }
}
