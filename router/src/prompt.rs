//! The input of a request, and its constraint on every answer.

use std::sync::Arc;

use baton_model_text::{ChatMessage, TemplateOptions};
use baton_types::Constraint;

/// The prompt as the client gave it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Prompt {
    /// Tokenised as is.
    Text(String),
    /// Token ids, used as they are.
    Ids(Vec<u32>),
    /// Rendered with the model's chat template, which gets these options.
    Chat(Vec<ChatMessage>, TemplateOptions),
}

impl Prompt {
    /// The request field that the prompt comes from.
    pub fn field(&self) -> &'static str {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => "prompt",
            Prompt::Chat(..) => "messages",
        }
    }
}

/// A constraint on the form of every answer.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wanted {
    /// The request field that asks for it.
    pub field: &'static str,
    /// The constraint.
    pub constraint: Arc<Constraint>,
}
