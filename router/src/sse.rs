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
use crate::openai::{Answer, ErrorBody, Events, Part, Reader, Shape, UsageSum};
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
                    let mut failed = writer.event(event);
                    // All that is there by now goes out in one write.
                    generation.all_ready().for_each(|event| failed |= writer.event(event));
                    let ready = writer.take();
                    if !ready.is_empty() {
                        yield Ok(ready);
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
        let end = writer.end();
        if !end.is_empty() {
            yield Ok(end);
        }
    }
}

const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// Writes the events of one answer as text.
enum Writer {
    Chunks(Box<Chunks>),
    Response(Box<Events>),
}

impl Writer {
    fn new(answer: Answer) -> Writer {
        match answer.frame {
            Some(_) => Writer::Response(Box::new(Events::new(answer))),
            None => Writer::Chunks(Box::new(Chunks::new(answer))),
        }
    }

    /// Takes in an event of a choice. True when it was a failure.
    fn event(&mut self, event: Event) -> bool {
        match self {
            Writer::Chunks(chunks) => chunks.event(event),
            Writer::Response(events) => events.event(event),
        }
    }

    /// What was written and is not taken yet.
    fn take(&mut self) -> Bytes {
        match self {
            Writer::Chunks(chunks) => chunks.take(),
            Writer::Response(events) => events.take(),
        }
    }

    /// What follows the last event. A response says itself that it is complete.
    fn end(&mut self) -> Bytes {
        match self {
            Writer::Chunks(chunks) => chunks.end(),
            Writer::Response(events) => events.take(),
        }
    }
}

/// Writes an answer's chunks. Tokens of a choice that are ready together become one chunk.
struct Chunks {
    answer: Answer,
    begun: Vec<bool>,
    readers: Vec<Reader>,
    usage: UsageSum,
    /// Tokens that are not written yet.
    waiting: Option<Part>,
    out: Vec<u8>,
}

impl Chunks {
    fn new(answer: Answer) -> Chunks {
        let readers = answer.readers();
        let (begun, usage) = (vec![false; readers.len()], UsageSum::default());
        Chunks { begun, readers, usage, answer, waiting: None, out: Vec::new() }
    }

    fn event(&mut self, event: Event) -> bool {
        let choice = event.choice;
        if self.waiting.as_ref().is_some_and(|part| part.choice != choice) {
            self.write_waiting();
        }
        match event.kind {
            EventKind::Token { piece, text } => {
                self.begin(choice);
                let part = self.waiting.get_or_insert_with(|| Part { choice, ..Part::default() });
                part.add(self.readers[choice as usize].push(text));
                self.answer.add(part, piece);
            }
            EventKind::Scored(tokens) => {
                self.begin(choice);
                let part = self.waiting.get_or_insert_with(|| Part { choice, ..Part::default() });
                self.answer.add_scored(part, tokens);
            }
            EventKind::Finished { reason, text, usage } => {
                self.write_waiting();
                self.usage.add(choice, self.answer.n, usage);
                self.begin(choice);
                let reader = &mut self.readers[choice as usize];
                self.usage.thought += reader.thought();
                let mut rest = Part { choice, ..Part::default() };
                rest.add(reader.push(text));
                rest.add(reader.finish());
                let last = Part { choice, finish: Some(reader.finish_reason(reason)), ..Part::default() };
                if !rest.is_silent() {
                    self.part(rest);
                }
                self.part(last);
            }
            EventKind::Failed(error) => {
                self.write_waiting();
                data(&mut self.out, |out| drop(serde_json::to_writer(out, &ErrorBody::from(&error))));
                return true;
            }
        }
        false
    }

    /// Everything that was taken in and is not taken yet.
    fn take(&mut self) -> Bytes {
        self.write_waiting();
        std::mem::take(&mut self.out).into()
    }

    fn write_waiting(&mut self) {
        let Some(part) = self.waiting.take() else { return };
        let asked = self.answer.asked;
        let logprobs = asked.logprobs.is_some() && !(part.pieces.is_empty() && part.scored.is_empty());
        if !part.is_silent() || logprobs || asked.token_ids && !part.pieces.is_empty() {
            self.part(part);
        }
    }

    /// Writes the first chunk of a choice, which carries the role in a chat, or the prompt that is repeated.
    fn begin(&mut self, choice: u32) {
        let asked = self.answer.asked;
        if (self.answer.shape == Shape::Chat || asked.echo) && !self.begun[choice as usize] {
            self.part(self.answer.opening(choice));
        }
    }

    fn part(&mut self, part: Part) {
        let first = !std::mem::replace(&mut self.begun[part.choice as usize], true);
        data(&mut self.out, |out| self.answer.chunk(Part { first, ..part }, out));
    }

    fn end(&mut self) -> Bytes {
        if self.answer.asked.include_usage {
            data(&mut self.out, |out| self.answer.usage_chunk(&self.usage, out));
        }
        data(&mut self.out, |out| out.extend_from_slice(b"[DONE]"));
        self.take()
    }
}

/// Appends a server-sent event with these data.
fn data(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(b"data: ");
    write(out);
    out.extend_from_slice(b"\n\n");
}
