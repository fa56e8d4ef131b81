//! Models without a download: `random:NAME`, `random:NAME:SEED` or `random:PATH/config.json`. This module has everything but the
//! weights: named shapes, a byte tokenizer, and a chat template.

use std::path::Path;

use baton_types::nearest;

use crate::family::Family;
use crate::keys::Keys;
use crate::tokenizer::bytes;
use crate::{ChatTemplate, ModelConfig, ModelFileError, TextModel};

/// Prefix of the name of a random model.
pub const PREFIX: &str = "random:";
/// The smallest chat template that tells the messages of a conversation apart.
const CHAT: &str = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}\
                    {% if add_generation_prompt %}assistant: {% endif %}";

/// Each shape's name and configuration.
const ALL: [(&str, &str); 9] = [
    ("tiny", include_str!("shapes/tiny.json")),
    ("smollm2-135m", include_str!("shapes/smollm2-135m.json")),
    ("gemma-3-270m", include_str!("shapes/gemma-3-270m.json")),
    ("llama-3.2-1b", include_str!("shapes/llama-3.2-1b.json")),
    ("qwen2.5-1.5b", include_str!("shapes/qwen2.5-1.5b.json")),
    ("mistral-7b", include_str!("shapes/mistral-7b.json")),
    ("llama-3.1-8b", include_str!("shapes/llama-3.1-8b.json")),
    ("qwen3-8b", include_str!("shapes/qwen3-8b.json")),
    ("llama-3.1-70b", include_str!("shapes/llama-3.1-70b.json")),
];

/// A shape and a seed, which together define a random model.
#[derive(Clone, Debug)]
pub struct RandomShape {
    name: String,
    seed: u64,
    /// The family, and the keys of the configuration.
    family: Family,
}

impl RandomShape {
    /// Parses `spec`; None if it does not name a random model.
    ///
    /// # Errors
    /// The shape or the seed is invalid, or the vocabulary is too small for a tokenizer of bytes.
    pub fn parse(spec: &str) -> Result<Option<RandomShape>, ModelFileError> {
        let Some(asked) = spec.strip_prefix(PREFIX) else { return Ok(None) };
        let (shape, seed) = match asked.rsplit_once(':') {
            None => (asked, 0),
            Some((shape, text)) => {
                let seed = text.parse();
                let hint = format!("its seed {text:?} is not a whole number between 0 and {}", u64::MAX);
                (shape, seed.map_err(|_| ModelFileError::UnknownModel { spec: spec.to_owned(), hint })?)
            }
        };
        let family = Family::of_config(read_shape(spec, shape)?)?;
        let words = bytes::LEAST_VOCABULARY;
        if family.vocab_size < words {
            let problem =
                format!("is {}; a model without a tokenizer's file needs at least {words}", family.vocab_size);
            return Err(ModelFileError::config(Path::new(shape), "vocab_size", problem));
        }
        Ok(Some(RandomShape { name: spec.to_owned(), seed, family }))
    }

    /// The names of the known shapes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|(name, _)| *name)
    }

    /// The seed of the weights.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The family, and the keys of the configuration.
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// The text part of the model.
    pub fn open(&self) -> Result<TextModel, ModelFileError> {
        let path = Path::new(&self.name);
        let tokenizer = bytes::tokenizer(self.family.vocab_size);
        let chat = ChatTemplate::compile(path, CHAT, String::new(), String::new())?;
        let model = TextModel::of(path, self.name.clone(), tokenizer, Some(chat), &self.family)?;
        Ok(model.with_config(ModelConfig::of_family(&self.family).ok()))
    }
}

/// The configuration of a named shape, or of a file.
fn read_shape(spec: &str, shape: &str) -> Result<Keys, ModelFileError> {
    if let Some((name, json)) = ALL.iter().find(|(name, _)| *name == shape) {
        return Keys::parse_json(Path::new(name), json.as_bytes());
    }
    let path = Path::new(shape);
    if path.is_file() {
        return Keys::read_json(path);
    }
    let names: Vec<&str> = RandomShape::names().collect();
    let meant =
        nearest(shape, names.iter().copied()).map_or(String::new(), |name| format!("did you mean {PREFIX}{name}? "));
    let hint = format!("{meant}{PREFIX} is followed by the path of a config.json or one of {}", names.join(", "));
    Err(ModelFileError::UnknownModel { spec: spec.to_owned(), hint })
}
