//! The beginning of a configuration: the family, and the two sizes that need neither tensors nor a decoder. Read from `config.json`
//! or from the metadata of a GGUF file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::ModelFileError;
use crate::gguf::Header;
use crate::keys::Keys;

/// Largest vocabulary: far above any model's, but low enough to allocate something small for each token.
pub const MAX_VOCABULARY: u32 = 1 << 24;

/// Families of models the decoder implements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama and everything shaped like it (SmolLM2, TinyLlama, Llama 3.x).
    Llama,
    /// Qwen2 and Qwen2.5: biases on Q, K and V.
    Qwen2,
    /// Qwen3: RMS norm on each head of Q and K.
    Qwen3,
    /// Mistral: Llama, optionally with a sliding window in every layer.
    Mistral,
    /// Gemma 3, text part: sandwich norms, local and global layers with two rope bases, scaled embeddings.
    Gemma3,
}

/// The family of a model, its two sizes, and where the rest of its configuration is.
#[derive(Clone, Debug)]
pub struct Family {
    /// The family.
    pub architecture: Architecture,
    /// The keys of the text model.
    pub keys: Keys,
    /// Rows of the embedding, which may exceed the tokenizer's vocabulary.
    pub vocab_size: u32,
    /// Longest sequence, tokens.
    pub context_length: u32,
}

impl Family {
    /// Reads a directory's `config.json`.
    pub fn of_directory(dir: &Path) -> Result<Family, ModelFileError> {
        Family::of_config(Keys::read_json(&dir.join("config.json"))?)
    }

    /// Reads the keys of a `config.json`. In a larger (multimodal) model the text model has a section of its own.
    pub fn of_config(root: Keys) -> Result<Family, ModelFileError> {
        let name: String = root.need("model_type")?;
        let architecture = match name.as_str() {
            "llama" => Architecture::Llama,
            "mistral" => Architecture::Mistral,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            "gemma3_text" | "gemma3" => Architecture::Gemma3,
            _ => return Err(unsupported(root.path(), name)),
        };
        let keys = root.section("text_config")?.unwrap_or(root);
        // The 4B and larger Gemma 3 files leave out values that equal the family's defaults.
        let gemma = architecture == Architecture::Gemma3;
        let size = |key: &str, gemma_default: u32| if gemma { keys.or(key, gemma_default) } else { keys.need(key) };
        let (vocab_size, context_length) = (size("vocab_size", 262_208)?, size("max_position_embeddings", 131_072)?);
        Family { architecture, keys, vocab_size, context_length }.checked()
    }

    /// Reads the header of a GGUF file.
    pub fn of_gguf(header: &Header) -> Result<Family, ModelFileError> {
        let name: String = header.keys.need("general.architecture")?;
        let architecture = match name.as_str() {
            "llama" => Architecture::Llama,
            "mistral" => Architecture::Mistral,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            "gemma3" => Architecture::Gemma3,
            _ => return Err(unsupported(header.keys.path(), name)),
        };
        let keys = header.keys.family(&name);
        let (vocab_size, context_length) = (header.embedding_rows()?, keys.need("context_length")?);
        Family { architecture, keys, vocab_size, context_length }.checked()
    }

    fn checked(self) -> Result<Family, ModelFileError> {
        check_size(self.keys.path(), "vocab_size", self.vocab_size, MAX_VOCABULARY)?;
        check_size(self.keys.path(), "context_length", self.context_length, u32::MAX)?;
        Ok(self)
    }
}

fn unsupported(path: &Path, architecture: String) -> ModelFileError {
    ModelFileError::UnsupportedArchitecture { path: path.to_owned(), architecture }
}

/// An error unless a size is between 1 and `most`. `path` is the file that errors name.
pub fn check_size(path: &Path, key: &str, value: u32, most: u32) -> Result<(), ModelFileError> {
    match value == 0 || value > most {
        true => Err(ModelFileError::config(path, key, format!("is {value}; it must be between 1 and {most}"))),
        false => Ok(()),
    }
}
