//! The model's chat template.
use crate::ModelFileError;
use serde::{Deserialize, Serialize};
/// One message of a conversation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, …
    pub role: String,
    /// Its text.
    pub content: String,
}
/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {}
impl ChatTemplate {
    /// The prompt for these messages; with `add_generation_prompt` it ends where the assistant's answer begins.
    pub fn render(&self, _messages: &[ChatMessage], _add_generation_prompt: bool) -> Result<String, ModelFileError> {
        Err(ModelFileError::ChatTemplate("not there yet".into()))
    }
}
