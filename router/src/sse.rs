//! An answer as server-sent events: chunks as they arrive, comments while nothing arrives, an error as the last event.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use futures::Stream;
use tokio::time::{Instant, timeout};

use crate::body::Share;
use crate::error::RequestError;
use crate::front::Generation;
use crate::openai::{Answer, ErrorBody, Events, Part, Reader, Shape, Template, UsageSum};
use crate::sink::{Event, EventKind};
use crate::waits::Alarm;

/// Waits for the first event before it starts the stream, so that a request that fails at once gets a proper HTTP status.
/// When prefill takes longer than `keep_alive`, the stream starts with a comment.
pub(crate) async fn respond(
    mut generation: Generation,
    answer: Answer,
    share: Share,
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
    let stream = ServerSent::new(generation, (Writer::new(answer), share), first, keep_alive);
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// The answer's events as they arrive.
struct ServerSent {
    generation: Generation,
    writer: Writer,
    /// Of the memory, for the prompts that the answer repeats.
    _share: Share,
    /// The first event, if it came in time.
    first: Option<Event>,
    stage: Stage,
    keep_alive: Duration,
    alarm: Alarm,
    /// When something was sent last.
    sent: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is sent yet.
    Begins,
    Runs,
    Over,
}

impl ServerSent {
    fn new(
        generation: Generation,
        (writer, share): (Writer, Share),
        first: Option<Event>,
        keep_alive: Duration,
    ) -> ServerSent {
        let sent = Instant::now();
        let alarm = Alarm::new(sent + keep_alive);
        ServerSent { generation, writer, _share: share, first, stage: Stage::Begins, keep_alive, alarm, sent }
    }

    /// Takes in an event and all that are there by now, which go out in one write.
    fn take(&mut self, event: Event) -> Bytes {
        let ServerSent { generation, writer, .. } = self;
        let mut failed = writer.event(event);
        generation.all_ready().for_each(|event| failed |= writer.event(event));
        if failed {
            self.stage = Stage::Over;
        }
        writer.take()
    }

    /// What goes out next; None at the end.
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.stage == Stage::Begins {
            self.stage = Stage::Runs;
            match self.first.take() {
                Some(event) => match self.take(event) {
                    ready if ready.is_empty() => {}
                    ready => return Poll::Ready(Some(ready)),
                },
                None => return Poll::Ready(Some(KEEP_ALIVE.into())),
            }
        }
        while self.stage == Stage::Runs {
            match self.generation.poll_next(cx) {
                Poll::Ready(Some(event)) => match self.take(event) {
                    ready if ready.is_empty() => {}
                    ready => return Poll::Ready(Some(ready)),
                },
                Poll::Ready(None) => {
                    self.stage = Stage::Over;
                    return Poll::Ready(Some(self.writer.end()).filter(|end| !end.is_empty()));
                }
                Poll::Pending => {
                    let silent = self.alarm.poll_at(self.sent + self.keep_alive, cx);
                    return silent.map(|()| Some(KEEP_ALIVE.into()));
                }
            }
        }
        Poll::Ready(None)
    }
}

impl Stream for ServerSent {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.poll_bytes(cx);
        if polled.is_ready() {
            self.sent = Instant::now();
        }
        polled.map(|bytes| bytes.map(Ok))
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
    /// Of each choice, what its chunks have in common.
    templates: Vec<Option<Template>>,
    out: Vec<u8>,
    /// Where what is taken waits until it is sent.
    ready: BytesMut,
}

impl Chunks {
    fn new(answer: Answer) -> Chunks {
        let readers = answer.readers();
        let (begun, usage) = (vec![false; readers.len()], UsageSum::default());
        let templates = (0..).take(readers.len()).map(|choice| answer.template(choice)).collect();
        Chunks { begun, readers, usage, answer, waiting: None, templates, out: Vec::new(), ready: BytesMut::new() }
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
        // What is sent gives its room back, so that tokens one at a time take no new memory.
        self.ready.extend_from_slice(&self.out);
        self.out.clear();
        self.ready.split().freeze()
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
        let part = Part { first, ..part };
        let template = self.templates[part.choice as usize].as_ref();
        data(&mut self.out, |out| match template.filter(|_| part.is_only_text()) {
            Some(template) => template.chunk(&part.text, out),
            None => self.answer.chunk(part, out),
        });
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
