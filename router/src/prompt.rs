//! What a request gives the model to read, and what it wants of every answer.

use std::sync::Arc;

use baton_model_text::ChatMessage;
use baton_types::Constraint;

/// The prompt as the client gave it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Prompt {
    /// Tokenised as is.
    Text(String),
    /// Used as they are.
    Ids(Vec<u32>),
    /// Rendered with the model's chat template.
    Chat(Vec<ChatMessage>),
}

impl Prompt {
    /// The field of a request it comes from.
    pub fn field(&self) -> &'static str {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => "prompt",
            Prompt::Chat(_) => "messages",
        }
    }
}

/// What every answer must look like.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wanted {
    /// The field that asks for it.
    pub field: &'static str,
    /// What it asks for.
    pub constraint: Arc<Constraint>,
}
