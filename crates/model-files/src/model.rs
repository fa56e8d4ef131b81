//! An open model: its text part, its configuration and its weights. Opening checks everything that can be checked without reading the
//! weights.

use std::collections::BTreeMap;
use std::path::Path;

use baton_model_text::Family;

use crate::fingerprint::fingerprint;
use crate::gguf;
use crate::names::{self, Naming};
use crate::safetensors;
use crate::store::{Entry, StoredDtype, TensorStore};
use crate::weights::RandomWeights;
use crate::{ChatTemplate, ModelConfig, ModelFileError, TensorInfo, TensorName, TensorRef, TextModel, Tokenizer};

/// A memory-mapped model, or a random one: configuration, tokenizer, chat template and tensors. All shapes and extents are checked.
#[derive(Debug)]
pub struct Model {
    text: TextModel,
    config: ModelConfig,
    fingerprint: u64,
    weights: Weights,
}

/// Where tensors come from.
#[derive(Debug)]
enum Weights {
    Files { store: TensorStore, tensors: BTreeMap<TensorName, Entry> },
    Random(RandomWeights),
}

impl Model {
    /// Opens a `.gguf` file, or a directory with `config.json`, `tokenizer.json` and safetensors weights. The files must not be
    /// shortened while the model is open.
    pub fn open(path: &Path) -> Result<Model, ModelFileError> {
        let metadata = std::fs::metadata(path).map_err(ModelFileError::io(path))?;
        if metadata.is_dir() { open_directory(path) } else { open_gguf(path) }
    }

    /// A random model.
    pub(crate) fn random(text: TextModel, config: ModelConfig, fingerprint: u64, weights: RandomWeights) -> Model {
        Model { text, config, fingerprint, weights: Weights::Random(weights) }
    }

    /// The text part: everything but the tensors and their configuration.
    pub fn text(&self) -> &TextModel {
        &self.text
    }

    /// The file or directory it was opened from, or the name of a random model.
    pub fn path(&self) -> &Path {
        self.text.path()
    }

    /// A display name: the one stored in the file, else the name of the file or directory.
    pub fn name(&self) -> &str {
        self.text.name()
    }

    /// What the decoder needs to know.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.text.tokenizer()
    }

    /// The chat template; base models have none.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.text.chat_template()
    }

    /// The same on every host for the same files; different for different weights or configurations.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// One line that is another as soon as any weight may be: it names this host's files, with the times of their last change. None of a
    /// random model.
    pub fn identity(&self) -> Option<String> {
        match &self.weights {
            Weights::Files { store, .. } => Some(format!("model {:016x}, {}", self.fingerprint, store.identity())),
            Weights::Random(_) => None,
        }
    }

    /// A tensor that the configuration requires. It is an error if the model has no tensor of this name.
    pub fn tensor(&self, name: TensorName) -> Result<TensorRef<'_>, ModelFileError> {
        self.find(name).ok_or_else(|| {
            let problem = "is not part of this model's configuration";
            ModelFileError::tensor(self.path(), &format!("{name:?}"), problem)
        })
    }

    /// A tensor, if this model has it.
    pub fn find(&self, name: TensorName) -> Option<TensorRef<'_>> {
        match &self.weights {
            Weights::Files { store, tensors } => store.view(tensors.get(&name)?),
            Weights::Random(weights) => weights.tensor(name),
        }
    }

    /// Every tensor that the decoder uses, without its elements.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        match &self.weights {
            Weights::Files { tensors, .. } => {
                let facts = |(name, entry): (&TensorName, &Entry)| match entry.dtype {
                    StoredDtype::Supported(dtype) => {
                        Some(TensorInfo { name: *name, dtype, shape: entry.shape.clone() })
                    }
                    StoredDtype::Unsupported(_) => None,
                };
                tensors.iter().filter_map(facts).collect()
            }
            Weights::Random(weights) => weights.facts().collect(),
        }
    }
}

fn open_gguf(path: &Path) -> Result<Model, ModelFileError> {
    let (mut header, store) = gguf::open(path)?;
    let family = Family::of_gguf(&header)?;
    let config = ModelConfig::of_gguf(&family, gguf::tensor_facts(path, &header, &store)?)?;
    let text = TextModel::of_gguf(path, &mut header, &family)?;
    assemble(text, config, store, Naming::Gguf)
}

fn open_directory(dir: &Path) -> Result<Model, ModelFileError> {
    let family = Family::of_directory(dir)?;
    let config = ModelConfig::of_family(&family)?;
    let text = TextModel::of_directory(dir, &family)?;
    let store = safetensors::open(dir)?;
    let naming = Naming::hugging_face(&store, config.post_norms);
    assemble(text, config, store, naming)
}

fn assemble(text: TextModel, config: ModelConfig, store: TensorStore, naming: Naming) -> Result<Model, ModelFileError> {
    let tensors = names::bind(&config, &store, &naming)?;
    let fingerprint = fingerprint(&config, &store, &tensors, &naming);
    Ok(Model { text, config, fingerprint, weights: Weights::Files { store, tensors } })
}
