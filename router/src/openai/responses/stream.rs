//! A response as a stream of typed events.
//!
//! Items open and close one after the other: thoughts, text, calls. Each event has a number, from 0.

use axum::body::Bytes;
use serde_json::{Value, json};

use super::object::{self, Status, item_id, object};
use crate::error::RequestError;
use crate::openai::answer::Answer;
use crate::openai::reader::{Reader, Said};
use crate::openai::types::ErrorBody;
use crate::openai::usage::UsageSum;
use crate::sink::{Event, EventKind, Piece};
use crate::tools::Call;

/// Writes the events of one answer.
pub(crate) struct Events {
    answer: Answer,
    reader: Reader,
    usage: UsageSum,
    begun: bool,
    number: u32,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    out: Vec<u8>,
}

/// The item that is being written.
struct Open {
    kind: Kind,
    id: String,
    text: String,
    /// Of its tokens, as far as they are asked for.
    logprobs: Vec<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thoughts,
    Text,
}

impl Kind {
    /// The beginning of its events' names.
    fn name(self) -> &'static str {
        match self {
            Kind::Thoughts => "response.reasoning_text",
            Kind::Text => "response.output_text",
        }
    }
}

impl Events {
    pub fn new(answer: Answer) -> Events {
        let reader = answer.reader.clone();
        let (usage, output, out) = (UsageSum::default(), Vec::new(), Vec::new());
        Events { answer, reader, usage, begun: false, number: 0, output, open: None, out }
    }

    /// Takes in an event. True when it was a failure.
    pub fn event(&mut self, event: Event) -> bool {
        self.begin();
        match event.kind {
            EventKind::Scored(_) => {}
            EventKind::Token { piece, text } => {
                let said = self.reader.push(text);
                self.say(said, Some(piece));
            }
            EventKind::Finished { reason, text, usage } => {
                self.usage.add(0, self.answer.n, usage);
                let said = self.reader.push(text);
                self.say(said, None);
                let said = self.reader.finish();
                self.say(said, None);
                self.usage.thought = self.reader.thought();
                self.finish(Status::of(Some(self.reader.finish_reason(reason))));
            }
            EventKind::Failed(error) => {
                self.fail(&error);
                return true;
            }
        }
        false
    }

    /// What was written and is not taken yet.
    pub fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.out).into()
    }

    fn begin(&mut self) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let response = object(&self.answer, Status::InProgress, &[], None);
        self.send("response.created", json!({"response": response}));
        self.send("response.in_progress", json!({"response": response}));
    }

    fn say(&mut self, said: Said, piece: Option<Piece>) {
        let Said { reasoning, text, calls } = said;
        if !reasoning.is_empty() {
            self.text(Kind::Thoughts, &reasoning, Vec::new());
        }
        if !text.is_empty() {
            let logprobs = piece.map_or_else(Vec::new, |piece| self.answer.chat_logprobs(&[piece]));
            self.text(Kind::Text, &text, logprobs);
        }
        calls.iter().for_each(|call| self.call(call));
    }

    fn text(&mut self, kind: Kind, delta: &str, logprobs: Vec<Value>) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.open(kind);
        }
        let Some(open) = &mut self.open else { return };
        open.text += delta;
        open.logprobs.extend(logprobs.iter().cloned());
        let mut fields = json!({"item_id": open.id, "content_index": 0, "delta": delta});
        if kind == Kind::Text {
            fields["logprobs"] = logprobs.into();
        }
        self.send_of_item(&format!("{}.delta", kind.name()), fields);
    }

    fn open(&mut self, kind: Kind) {
        self.close(Status::Completed);
        let (id, item, part) = match kind {
            Kind::Thoughts => {
                let id = item_id("rs");
                (id.clone(), object::reasoning(&id, None, Status::InProgress), object::reasoning_part(""))
            }
            Kind::Text => {
                let id = item_id("msg");
                (id.clone(), object::message(&id, None, Status::InProgress), object::text_part("", Vec::new()))
            }
        };
        self.send_of_item("response.output_item.added", json!({"item": item}));
        self.send_of_item("response.content_part.added", json!({"item_id": id, "content_index": 0, "part": part}));
        self.open = Some(Open { kind, id, text: String::new(), logprobs: Vec::new() });
    }

    fn close(&mut self, status: Status) {
        let Some(Open { kind, id, text, logprobs }) = self.open.take() else { return };
        let mut done = json!({"item_id": id, "content_index": 0, "text": text});
        let (part, item) = match kind {
            Kind::Thoughts => (object::reasoning_part(&text), object::reasoning(&id, Some(&text), status)),
            Kind::Text => {
                done["logprobs"] = logprobs.clone().into();
                let part = object::text_part(&text, logprobs);
                (part.clone(), object::message(&id, Some(part), status))
            }
        };
        self.send_of_item(&format!("{}.done", kind.name()), done);
        self.send_of_item("response.content_part.done", json!({"item_id": id, "content_index": 0, "part": part}));
        self.done(item);
    }

    fn call(&mut self, call: &Call) {
        self.close(Status::Completed);
        let id = item_id("fc");
        let item = object::function_call(&id, call, "", Status::InProgress);
        self.send_of_item("response.output_item.added", json!({"item": item}));
        let delta = json!({"item_id": id, "delta": call.arguments});
        self.send_of_item("response.function_call_arguments.delta", delta);
        let done = json!({"item_id": id, "name": call.name, "arguments": call.arguments});
        self.send_of_item("response.function_call_arguments.done", done);
        self.done(object::function_call(&id, call, &call.arguments, Status::Completed));
    }

    fn done(&mut self, item: Value) {
        self.send_of_item("response.output_item.done", json!({"item": item}));
        self.output.push(item);
    }

    fn finish(&mut self, status: Status) {
        if self.output.is_empty() && self.open.is_none() {
            self.open(Kind::Text);
        }
        self.close(status);
        let response = object(&self.answer, status, &self.output, Some(&self.usage));
        self.send(&format!("response.{}", status.as_str()), json!({"response": response}));
    }

    fn fail(&mut self, error: &RequestError) {
        let mut response = object(&self.answer, Status::Failed, &self.output, None);
        let ErrorBody { error } = ErrorBody::from(error);
        let code = error.code.unwrap_or("server_error");
        response["error"] = json!({"code": code, "message": error.message});
        self.send("response.failed", json!({"response": response}));
    }

    /// Sends an event about the item that comes after the complete ones.
    fn send_of_item(&mut self, kind: &str, mut fields: Value) {
        fields["output_index"] = self.output.len().into();
        self.send(kind, fields);
    }

    fn send(&mut self, kind: &str, mut fields: Value) {
        fields["type"] = kind.into();
        fields["sequence_number"] = self.number.into();
        self.number += 1;
        self.out.extend_from_slice(format!("event: {kind}\ndata: {fields}\n\n").as_bytes());
    }
}
