//! Log probabilities in the API's two forms. Every generated token has an entry, also one that only ends the answer.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::model::ServedModel;
use crate::sink::Piece;

/// The API's value for minus infinity, which JSON cannot express.
const LEAST: f32 = -9999.0;

/// The form of chats: one entry per token.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopToken>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
struct TopToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// The form of completions: four lists of equal length.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    /// The first token of a prompt has none.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<u32>,
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LEAST } else { logprob.clamp(LEAST, 0.0) }
}

impl ChatLogprobs {
    /// The log probabilities of these tokens.
    pub fn of(model: &ServedModel, pieces: &[Piece]) -> ChatLogprobs {
        let top = |(id, logprob): &(u32, f32)| {
            let (token, bytes) = model.token(*id);
            TopToken { token, logprob: finite(*logprob), bytes }
        };
        let entry = |piece: &Piece| {
            let (token, bytes) = model.token(piece.token.id);
            let top_logprobs = piece.token.top.iter().map(top).collect();
            ChatToken { token, logprob: finite(piece.token.logprob.unwrap_or(LEAST)), bytes, top_logprobs }
        };
        ChatLogprobs { content: pieces.iter().map(entry).collect(), refusal: None }
    }

    /// One entry per token.
    pub fn entries(&self) -> Vec<serde_json::Value> {
        // Cannot fail: an entry consists of strings, numbers and lists of them.
        self.content.iter().map(|entry| serde_json::to_value(entry).unwrap_or_default()).collect()
    }
}

impl TextLogprobs {
    /// The log probabilities of these tokens. `top_logprobs` always includes the chosen token.
    pub fn of<'a>(model: &ServedModel, pieces: impl IntoIterator<Item = &'a Piece>) -> TextLogprobs {
        let mut all = TextLogprobs::default();
        for piece in pieces {
            let (token, _) = model.token(piece.token.id);
            let logprob = piece.token.logprob.map(finite);
            let top = logprob.map(|logprob| {
                let mut top = BTreeMap::new();
                // Of tokens with the same text, keeps the most likely.
                for (id, logprob) in &piece.token.top {
                    top.entry(model.token(*id).0).or_insert(finite(*logprob));
                }
                top.entry(token.clone()).or_insert(logprob);
                top
            });
            all.tokens.push(token);
            all.token_logprobs.push(logprob);
            all.top_logprobs.push(top);
            all.text_offset.push(piece.offset);
        }
        all
    }
}
