//! The answer's JSON: one object, or a stream of chunks.

use std::sync::Arc;

use baton_types::{Class, TokenOut};
use compact_str::CompactString;

use super::echo::Echo;
use super::logprobs::{ChatLogprobs, TextLogprobs};
use super::object::{Body, CallObject, Choice, Content, Delta, Logprobs, Message, UsageObject};
use super::reader::{Reader, Said};
use super::request::Asked;
use super::responses::Frame;
use super::template::Template;
use super::usage::UsageSum;
use crate::model::ServedModel;
use crate::sink::{EventKind, Piece};
use crate::tools::Call;

/// About the bytes of a token with its log probability in JSON, and on the way there.
const LOGPROB: usize = 256;
/// About the bytes of a token id, and of its JSON.
const ID: usize = 16;

/// The API that the answer belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Text,
}

/// What all chunks of one answer have in common.
#[derive(Clone)]
pub(crate) struct Answer {
    pub shape: Shape,
    pub id: String,
    /// When the answer began, seconds since 1970.
    pub created: u64,
    pub model: Arc<ServedModel>,
    /// Fingerprint of the workers when the answer began, in the API's words.
    pub fingerprint: String,
    pub asked: Asked,
    /// Token ids of each prompt.
    pub prompts: Vec<Arc<[u32]>>,
    /// The prompts as answers repeat them; empty if they do not.
    pub echoes: Vec<Echo>,
    /// Choices per prompt.
    pub n: u32,
    /// The class that the request was served as.
    pub class: Class,
    /// What a response repeats of its request; None for other answers.
    pub frame: Option<Frame>,
    /// Reads thoughts and calls out of each choice; one that has read nothing.
    pub reader: Reader,
}

/// A part of one choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Part {
    pub choice: u32,
    /// True for the first part of its choice.
    pub first: bool,
    pub reasoning: String,
    pub text: CompactString,
    /// Tokens of the prompt with their log probabilities.
    pub scored: Vec<Piece>,
    pub pieces: Vec<Piece>,
    pub calls: Vec<Call>,
    /// Why the choice ended, in the API's words.
    pub finish: Option<&'static str>,
}

impl Part {
    /// Appends what a choice said.
    pub fn add(&mut self, said: Said) {
        match self.reasoning.is_empty() {
            true => self.reasoning = said.reasoning,
            false => self.reasoning += &said.reasoning,
        }
        match self.text.is_empty() {
            true => self.text = said.text,
            false => self.text += &said.text,
        }
        self.calls.extend(said.calls);
    }

    /// Whether it only goes on with the text.
    pub fn is_only_text(&self) -> bool {
        !self.first && self.finish.is_none() && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// Whether it says nothing.
    pub fn is_silent(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty() && self.calls.is_empty()
    }
}

impl Answer {
    /// Every choice, as yet without its beginning.
    pub fn unopened(&self) -> Vec<Part> {
        (0..self.prompts.len() as u32 * self.n).map(|choice| Part { choice, ..Part::default() }).collect()
    }

    /// A whole choice with its beginning.
    fn opened(&self, part: Part) -> Part {
        let mut opening = self.opening(part.choice);
        if opening.text.is_empty() && opening.scored.is_empty() {
            return part;
        }
        opening.text += &part.text;
        opening.scored.extend(part.scored);
        Part { text: opening.text, scored: opening.scored, ..part }
    }

    /// The beginning of a choice: the prompt, if answers repeat it.
    pub fn opening(&self, choice: u32) -> Part {
        match self.echo(choice) {
            Some(echo) => echo.opening(choice, self.asked.logprobs.is_some()),
            None => Part { choice, ..Part::default() },
        }
    }

    /// The tier that the request was served in, in the API's words.
    pub fn tier(&self) -> &'static str {
        if self.class.is_batch() { "flex" } else { "default" }
    }

    /// Completions have no tier in OpenAI's API.
    fn names_tier(&self) -> bool {
        self.shape == Shape::Chat && (self.asked.tier || self.class.is_batch())
    }

    fn echo(&self, choice: u32) -> Option<&Echo> {
        self.echoes.get((choice / self.n) as usize)
    }

    /// Whether the answer has more of its tokens than their text.
    fn shows_tokens(&self) -> bool {
        self.asked.logprobs.is_some() || self.asked.token_ids || self.asked.best.is_some()
    }

    /// Adds a token to a part of its choice.
    pub fn add(&self, part: &mut Part, piece: Piece) {
        if !self.shows_tokens() {
            return;
        }
        part.pieces.push(match self.echo(part.choice) {
            Some(echo) => echo.after(piece),
            None => piece,
        });
    }

    /// Bytes that a whole answer holds until it is sent, whatever its events are: what it repeats of its request.
    pub fn weight_before(&self) -> usize {
        // Text is held, and then once more as JSON.
        let choice = |choice: u32| self.echo(choice).map_or(0, |echo| 2 * echo.text_bytes()) + self.prompt_ids(choice);
        let choices: usize = (0..self.prompts.len() as u32 * self.n).map(choice).sum();
        let echoes: usize = self.echoes.iter().map(Echo::weight).sum();
        choices + echoes + self.frame.as_ref().map_or(0, Frame::weight)
    }

    /// Bytes of the token ids of a choice's prompt.
    fn prompt_ids(&self, choice: u32) -> usize {
        match self.asked.token_ids {
            true => self.prompts[(choice / self.n) as usize].len() * ID,
            false => 0,
        }
    }

    /// Bytes that a whole answer holds for an event until it is sent.
    pub fn weight(&self, event: &EventKind) -> usize {
        let logprobs = self.asked.logprobs.is_some();
        let token = |token: &TokenOut| match logprobs {
            true => size_of::<Piece>() + (1 + token.top.len()) * LOGPROB,
            false => size_of::<Piece>(),
        };
        match event {
            // Text is held, and then once more as JSON.
            EventKind::Token { piece, text } if self.shows_tokens() => 2 * text.len() + token(&piece.token),
            EventKind::Token { text, .. } | EventKind::Finished { text, .. } => 2 * text.len(),
            EventKind::Scored(tokens) => tokens.iter().map(token).sum(),
            EventKind::Failed(_) => 0,
        }
    }

    /// Adds tokens of the prompt with their log probabilities to a part of their choice.
    pub fn add_scored(&self, part: &mut Part, tokens: Vec<TokenOut>) {
        if let Some(echo) = self.echo(part.choice) {
            part.scored.extend(tokens.into_iter().map(|token| echo.piece(token)));
        }
    }

    /// The log probabilities of these tokens in the form of chats; none if they are not asked for.
    pub fn chat_logprobs(&self, pieces: &[Piece]) -> Vec<serde_json::Value> {
        match self.asked.logprobs {
            Some(_) => ChatLogprobs::of(&self.model, pieces).entries(),
            None => Vec::new(),
        }
    }

    /// Keeps, of the answers to each prompt, as many as are asked for: those with the highest mean log probability.
    fn best(mut self, mut parts: Vec<Part>) -> (Answer, Vec<Part>) {
        let Some(best) = self.asked.best else { return (self, parts) };
        let worth = |part: &Part| {
            let sum: f64 = part.pieces.iter().filter_map(|p| p.token.logprob).map(f64::from).sum();
            sum / part.pieces.len().max(1) as f64
        };
        let n = self.n;
        parts.sort_by(|a, b| (a.choice / n).cmp(&(b.choice / n)).then(worth(b).total_cmp(&worth(a))));
        let kept = parts.into_iter().enumerate().filter(|(at, _)| *at as u32 % n < best).map(|(_, part)| part);
        let parts = (0..).zip(kept).map(|(choice, part)| Part { choice, ..part }).collect();
        self.n = best;
        (self, parts)
    }

    /// One reader per choice.
    pub fn readers(&self) -> Vec<Reader> {
        vec![self.reader.clone(); self.prompts.len() * self.n as usize]
    }

    /// Appends the stream chunk for a part of one choice.
    pub fn chunk(&self, mut part: Part, out: &mut Vec<u8>) {
        let usage = self.asked.include_usage.then_some(None);
        let calls: Vec<_> = part.calls.drain(..).map(|call| CallObject::of(call, true)).collect();
        let (text, reasoning) = (String::from(std::mem::take(&mut part.text)), std::mem::take(&mut part.reasoning));
        let content = match self.shape {
            Shape::Text => Content::Text(text),
            Shape::Chat => Content::Delta(Delta {
                role: part.first.then_some("assistant"),
                content: (part.finish.is_none() && calls.is_empty() && reasoning.is_empty() || !text.is_empty())
                    .then_some(text),
                reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
                tool_calls: calls,
            }),
        };
        let show_prompt = part.first;
        self.json(self.object(true), &[self.choice(part, content, show_prompt)], usage, show_prompt, out);
    }

    /// What those chunks of a choice have in common that only say text. None if they have more of each token.
    pub fn template(&self, choice: u32) -> Option<Template> {
        if self.shows_tokens() {
            return None;
        }
        let mut chunk = Vec::new();
        self.chunk(Part { choice, text: Template::TEXT.into(), ..Part::default() }, &mut chunk);
        Template::cut(chunk)
    }

    /// Appends the last chunk of a stream whose client asked for the usage.
    pub fn usage_chunk(&self, usage: &UsageSum, out: &mut Vec<u8>) {
        self.json(self.object(true), &[], Some(Some(usage.into())), false, out);
    }

    /// The whole answer; `parts` are the choices in order.
    pub fn whole(self, parts: Vec<Part>, usage: &UsageSum) -> Vec<u8> {
        let (this, parts) = self.best(parts);
        let parts = parts.into_iter().map(|part| this.opened(part)).collect();
        this.body(parts, usage)
    }

    fn body(&self, parts: Vec<Part>, usage: &UsageSum) -> Vec<u8> {
        let choice = |mut part: Part| {
            let tool_calls: Vec<_> = part.calls.drain(..).map(|call| CallObject::of(call, false)).collect();
            let (text, reasoning) = (String::from(std::mem::take(&mut part.text)), std::mem::take(&mut part.reasoning));
            let content = match self.shape {
                Shape::Text => Content::Text(text),
                Shape::Chat => Content::Message(Message {
                    reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
                    role: "assistant",
                    content: (tool_calls.is_empty() || !text.is_empty()).then_some(text),
                    refusal: None,
                    tool_calls,
                }),
            };
            self.choice(part, content, true)
        };
        let choices: Vec<_> = parts.into_iter().map(choice).collect();
        let mut out = Vec::new();
        self.json(self.object(false), &choices, Some(Some(usage.into())), true, &mut out);
        out
    }

    fn object(&self, chunk: bool) -> &'static str {
        match (self.shape, chunk) {
            (Shape::Text, _) => "text_completion",
            (Shape::Chat, true) => "chat.completion.chunk",
            (Shape::Chat, false) => "chat.completion",
        }
    }

    fn choice(&self, part: Part, content: Content, show_prompt: bool) -> Choice {
        let (message, delta, text) = match content {
            Content::Message(message) => (Some(message), None, None),
            Content::Delta(delta) => (None, Some(delta), None),
            Content::Text(text) => (None, None, Some(text)),
        };
        let some = !part.scored.is_empty() || !part.pieces.is_empty();
        let logprobs = self.asked.logprobs.filter(|_| some).map(|_| match self.shape {
            Shape::Chat => Logprobs::Chat(ChatLogprobs::of(&self.model, &part.pieces)),
            Shape::Text => Logprobs::Text(TextLogprobs::of(&self.model, part.scored.iter().chain(&part.pieces))),
        });
        let ids = self.asked.token_ids;
        let per_choice = ids && show_prompt && self.shape == Shape::Text;
        Choice {
            index: part.choice,
            message,
            delta,
            text,
            logprobs,
            finish_reason: part.finish,
            prompt_token_ids: per_choice.then(|| self.prompts[(part.choice / self.n) as usize].to_vec()),
            token_ids: ids.then(|| part.pieces.iter().map(|p| p.token.id).collect()),
        }
    }

    fn json(
        &self,
        object: &'static str,
        choices: &[Choice],
        usage: Option<Option<UsageObject>>,
        show_prompt: bool,
        out: &mut Vec<u8>,
    ) {
        // With several prompts, each choice has its own prompt ids instead.
        let prompt_token_ids = match &self.prompts[..] {
            [only] if show_prompt && self.asked.token_ids => Some(&only[..]),
            _ => None,
        };
        let body = Body {
            id: &self.id,
            object,
            created: self.created,
            model: self.model.id(),
            system_fingerprint: &self.fingerprint,
            service_tier: self.names_tier().then(|| self.tier()),
            choices,
            usage,
            prompt_token_ids,
        };
        // Cannot fail: the body consists of strings, numbers and lists of them.
        let _ = serde_json::to_writer(out, &body);
    }
}
