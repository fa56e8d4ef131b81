//! Text to token ids and back.
use crate::ModelFileError;
/// A model's tokenizer. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tokenizer {}
fn later<T>() -> Result<T, ModelFileError> {
    Err(ModelFileError::Encode("not there yet".into()))
}
impl Tokenizer {
    /// Token ids of a text; special tokens written in it are recognised. `add_special` adds what the model wants around a
    /// text (bos).
    pub fn encode(&self, _text: &str, _add_special: bool) -> Result<Vec<u32>, ModelFileError> {
        later()
    }
    /// Token ids of a rendered chat: bos is added if the model wants it and the template has not written it.
    pub fn encode_chat(&self, _text: &str) -> Result<Vec<u32>, ModelFileError> {
        later()
    }
    /// The text of a whole sequence; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, _ids: &[u32], _skip_special: bool) -> Result<String, ModelFileError> {
        later()
    }
    /// The bytes a token stands for, which may be part of a character.
    pub fn token_bytes(&self, _id: u32) -> Result<&[u8], ModelFileError> {
        later()
    }
    /// The token as text, incomplete characters as U+FFFD.
    pub fn token_text(&self, _id: u32) -> Result<String, ModelFileError> {
        later()
    }
    /// Tokens that end an answer, ascending.
    pub fn eos_ids(&self) -> &[u32] {
        &[]
    }
    /// The token that begins a text.
    pub fn bos_id(&self) -> Option<u32> {
        None
    }
    /// Number of token ids, from 0.
    pub fn vocab_size(&self) -> usize {
        0
    }
    /// Starts detokenising a stream.
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream { _t: self.clone(), _s: skip_special }
    }
}
/// Incremental detokeniser.
#[derive(Clone, Debug)]
pub struct TextStream {
    _t: Tokenizer,
    _s: bool,
}
impl TextStream {
    /// The text that `id` completes; empty while a character is incomplete.
    pub fn push(&mut self, _id: u32) -> String {
        String::new()
    }
    /// What is left, an incomplete character as U+FFFD.
    pub fn finish(self) -> String {
        String::new()
    }
}
