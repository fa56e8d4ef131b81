//! The OpenAI-compatible HTTP API: its JSON in and out. What happens in between is the same for every front door.

mod answer;
mod fields;
mod logprobs;
mod output;
mod parse;
mod reader;
mod request;
mod tools;
mod types;

pub(crate) use answer::{Answer, Part, Shape, UsageSum};
pub(crate) use reader::Reader;
pub(crate) use request::{Asked, Envelope, chat, completion};
pub(crate) use types::{ErrorBody, Model, ModelList};
