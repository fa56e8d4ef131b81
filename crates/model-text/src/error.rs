//! Errors on the way from a model's name to its tensors. Every message names the file, the key or tensor, and what to do about it.

use std::path::{Path, PathBuf};

use baton_types::{BatonError, ErrorKind};

/// Any failure of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// The operating system refused.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file ends before its content does.
    #[error("{} is truncated: {what}; the file has {size} bytes. Fetch it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Which part is cut off, and where it should end.
        what: String,
        /// Bytes the file has.
        size: u64,
    },
    /// The file's structure cannot be read.
    #[error("{} is not a readable {format} file: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected format.
        format: &'static str,
        /// The first thing wrong with it.
        reason: String,
    },
    /// A key of the model's configuration is missing or has a value that does not work.
    #[error("{}: {key}: {problem}", path.display())]
    Config {
        /// The file that holds, or lacks, the key.
        path: PathBuf,
        /// The key as the file spells it.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor is missing, misshapen or of an element type that is not supported.
    #[error("{}: tensor {tensor}: {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor as the file spells it.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A model of a family that the decoder does not implement.
    #[error("{}: architecture {architecture:?} is not supported; supported: llama, mistral, qwen2, qwen3, gemma3", path.display())]
    UnsupportedArchitecture {
        /// The file.
        path: PathBuf,
        /// The architecture that the file names.
        architecture: String,
    },
    /// The tokenizer could not turn a text into tokens.
    #[error("cannot tokenise the text: {0}")]
    Encode(String),
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenId {
        /// The id.
        id: u32,
        /// The vocabulary's size.
        vocab_size: usize,
    },
    /// The chat template refused the messages, or could not be rendered with them.
    #[error("the model's chat template rejects these messages: {0}")]
    ChatTemplate(String),
    /// No model goes by this name.
    #[error("no model {spec:?}: {hint}")]
    UnknownModel {
        /// What was asked for.
        spec: String,
        /// What would have worked.
        hint: String,
    },
    /// A setting of the fetch does not work.
    #[error("{name}: {problem}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A registry or hub did not deliver.
    #[error("cannot fetch {what}: {problem}")]
    Fetch {
        /// The model, package or file.
        what: String,
        /// What happened.
        problem: String,
    },
    /// The delivered bytes do not have the expected digest or size.
    #[error(
        "{what} was delivered damaged: {property} is {actual}, expected {expected}; nothing was kept, fetch it again"
    )]
    Digest {
        /// The model or file.
        what: String,
        /// What was compared: the SHA-256 or the size.
        property: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        actual: String,
    },
}

impl BatonError for ModelFileError {
    fn kind(&self) -> ErrorKind {
        use ModelFileError::*;
        match self {
            Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            Io { .. } => ErrorKind::Internal,
            UnknownModel { .. } => ErrorKind::NotFound,
            Fetch { .. } | Digest { .. } => ErrorKind::Unavailable,
            // At start, whoever starts the process chose the model. `Encode`, `TokenId` and `ChatTemplate` also arise in a request, from what
            // its client sent.
            Truncated { .. }
            | Malformed { .. }
            | Config { .. }
            | Tensor { .. }
            | UnsupportedArchitecture { .. }
            | Setting { .. }
            | Encode(_)
            | TokenId { .. }
            | ChatTemplate(_) => ErrorKind::InvalidArgument,
        }
    }
}

impl ModelFileError {
    /// For `map_err` on an I/O call about `path`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> ModelFileError + '_ {
        move |source| ModelFileError::Io { path: path.to_owned(), source }
    }

    /// An error about a file that is not what its name or its beginning says.
    pub fn malformed(path: &Path, format: &'static str, reason: impl ToString) -> ModelFileError {
        ModelFileError::Malformed { path: path.to_owned(), format, reason: reason.to_string() }
    }

    /// An error about a tensor, with its name in the file.
    pub fn tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> ModelFileError {
        ModelFileError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), problem: problem.into() }
    }

    /// An error about a key, as the file spells it.
    pub fn config(path: &Path, key: &str, problem: impl Into<String>) -> ModelFileError {
        ModelFileError::Config { path: path.to_owned(), key: key.to_owned(), problem: problem.into() }
    }

    pub(crate) fn fetch(what: &str, problem: impl ToString) -> ModelFileError {
        ModelFileError::Fetch { what: what.to_owned(), problem: problem.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_texts_are_their_owners_fault_and_what_others_do_is_not() {
        let (path, why) = (|| PathBuf::from("model.gguf"), || "why".to_owned());
        let io = |kind: std::io::ErrorKind| ModelFileError::Io { path: path(), source: kind.into() };
        for (error, kind) in [
            (io(std::io::ErrorKind::NotFound), ErrorKind::NotFound),
            (io(std::io::ErrorKind::PermissionDenied), ErrorKind::Internal),
            (ModelFileError::Truncated { path: path(), what: why(), size: 1 }, ErrorKind::InvalidArgument),
            (ModelFileError::malformed(&path(), "GGUF", "why"), ErrorKind::InvalidArgument),
            (ModelFileError::config(&path(), "key", "why"), ErrorKind::InvalidArgument),
            (ModelFileError::tensor(&path(), "tensor", "why"), ErrorKind::InvalidArgument),
            (ModelFileError::UnsupportedArchitecture { path: path(), architecture: why() }, ErrorKind::InvalidArgument),
            (ModelFileError::Setting { name: "hub_endpoint", problem: why() }, ErrorKind::InvalidArgument),
            (ModelFileError::Encode(why()), ErrorKind::InvalidArgument),
            (ModelFileError::TokenId { id: 9, vocab_size: 8 }, ErrorKind::InvalidArgument),
            (ModelFileError::ChatTemplate(why()), ErrorKind::InvalidArgument),
            (ModelFileError::UnknownModel { spec: why(), hint: why() }, ErrorKind::NotFound),
            (ModelFileError::fetch("model", "why"), ErrorKind::Unavailable),
            (
                ModelFileError::Digest { what: why(), property: "size", expected: why(), actual: why() },
                ErrorKind::Unavailable,
            ),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
