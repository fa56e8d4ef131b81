//! An open model.
use crate::{ChatTemplate, ModelConfig, ModelFileError, TensorName, TensorRef, Tokenizer};
use std::path::Path;
/// A memory-mapped model.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    name: String,
    fingerprint: u64,
}
impl Model {
    /// Opens a `.gguf` file or a Hugging Face directory.
    pub fn open(path: &Path) -> Result<Model, ModelFileError> {
        Err(ModelFileError::malformed(path, "GGUF", "not there yet"))
    }
    /// Configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    /// Tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
    /// Chat template, where the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }
    /// Name for people.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Equal on every host for equal files.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
    /// A tensor the model must have.
    pub fn tensor(&self, _name: TensorName) -> Result<TensorRef<'_>, ModelFileError> {
        Err(ModelFileError::Encode(String::new()))
    }
    /// A tensor the model may have.
    pub fn find(&self, _name: TensorName) -> Option<TensorRef<'_>> {
        None
    }
}
