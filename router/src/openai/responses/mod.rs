//! POST /v1/responses: OpenAI's newer API, without state: nothing is stored, and no response can be referred to.
//!
//! A request is rewritten as a chat (`request`), so that both have the same checks, fields and extensions. The answer is written as a
//! response: whole (`object`) or as a stream of typed events (`stream`).

mod items;
mod object;
mod request;
mod schema;
mod stream;

pub(crate) use object::{Frame, whole};
pub(crate) use request::{read, reworded};
#[cfg(test)]
pub(super) use schema::OTHERWISE;
pub(super) use schema::{request_schema, schema};
pub(crate) use stream::Events;
