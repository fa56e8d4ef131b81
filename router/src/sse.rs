//! An answer as server-sent events: chunks as they arrive, comments while nothing arrives, an error as the last event.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use tokio::time::timeout;

use crate::error::RequestError;
use crate::front::Generation;
use crate::openai::{Answer, ErrorBody, Part, Reader, Shape, UsageSum};
use crate::sink::{Event, EventKind};

/// Waits for the first event before it starts the stream, so that a request that fails at once gets a proper HTTP status.
/// When prefill takes longer than `keep_alive`, the stream starts with a comment.
pub(crate) async fn respond(
    mut generation: Generation,
    answer: Answer,
    keep_alive: Duration,
) -> Result<Response, RequestError> {
    let first = timeout(keep_alive, generation.next()).await.ok().flatten();
    if let Some(Event { kind: EventKind::Failed(error), .. }) = first {
        return Err(error);
    }
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(events(generation, answer, first, keep_alive))).into_response())
}

fn events(
    mut generation: Generation,
    answer: Answer,
    first: Option<Event>,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    async_stream::stream! {
        let mut writer = Writer::new(answer);
        if first.is_none() {
            yield Ok(KEEP_ALIVE.into());
        }
        let mut next = Ok(first);
        loop {
            match next {
                Err(_) => yield Ok(KEEP_ALIVE.into()),
                Ok(None) => {}
                Ok(Some(event)) => {
                    let failed = matches!(event.kind, EventKind::Failed(_));
                    let text = writer.event(event);
                    if !text.is_empty() {
                        yield Ok(text.into());
                    }
                    if failed {
                        return;
                    }
                }
            }
            if generation.ended() {
                break;
            }
            next = timeout(keep_alive, generation.next()).await;
        }
        yield Ok(writer.end().into());
    }
}

const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// Writes the events of one answer as text.
struct Writer {
    answer: Answer,
    begun: Vec<bool>,
    readers: Vec<Reader>,
    usage: UsageSum,
}

fn data(json: &str) -> String {
    format!("data: {json}\n\n")
}

impl Writer {
    fn new(answer: Answer) -> Writer {
        let readers = answer.readers();
        Writer { begun: vec![false; readers.len()], readers, usage: UsageSum::default(), answer }
    }

    /// The server-sent events for one event of a choice; there may be none.
    fn event(&mut self, event: Event) -> String {
        let choice = event.choice;
        let mut part = Part { choice, ..Part::default() };
        match event.kind {
            EventKind::Token { piece, text } => {
                let begin = self.begin(choice);
                part.add(self.readers[choice as usize].push(&text));
                part.pieces = vec![piece];
                let asked = self.answer.asked;
                let worth =
                    !part.text.is_empty() || !part.calls.is_empty() || asked.logprobs.is_some() || asked.token_ids;
                begin + &if worth { self.part(part) } else { String::new() }
            }
            EventKind::Finished { reason, text, usage } => {
                self.usage.add(choice, self.answer.n, usage);
                let mut all = self.begin(choice);
                let reader = &mut self.readers[choice as usize];
                let mut rest = Part { choice, ..Part::default() };
                rest.add(reader.push(&text));
                rest.add(reader.finish());
                part.finish = Some(reader.finish_reason(reason));
                if !rest.text.is_empty() || !rest.calls.is_empty() {
                    all += &self.part(rest);
                }
                all + &self.part(part)
            }
            EventKind::Failed(error) => data(&serde_json::to_string(&ErrorBody::from(&error)).unwrap_or_default()),
        }
    }

    /// The first chunk of a choice in a chat, which carries the role. Empty after that, and for completions.
    fn begin(&mut self, choice: u32) -> String {
        match (self.answer.shape, self.begun[choice as usize]) {
            (Shape::Chat, false) => self.part(Part { choice, ..Part::default() }),
            _ => String::new(),
        }
    }

    fn part(&mut self, part: Part) -> String {
        let first = !std::mem::replace(&mut self.begun[part.choice as usize], true);
        data(&self.answer.chunk(Part { first, ..part }))
    }

    fn end(&self) -> String {
        let usage = self.answer.asked.include_usage.then(|| data(&self.answer.usage_chunk(&self.usage)));
        usage.unwrap_or_default() + &data("[DONE]")
    }
}
