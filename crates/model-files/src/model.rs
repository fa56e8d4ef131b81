//! An open model: the one thing others hold. Opening checks everything that can be checked without reading the weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::config::{self, Keys};
use crate::fingerprint::fingerprint;
use crate::gguf::{self, GgufFile};
use crate::names::{self, Naming};
use crate::random::RandomWeights;
use crate::store::{Entry, StoredDtype, TensorStore};
use crate::tokenizer;
use crate::{ChatTemplate, ModelConfig, ModelFileError, TensorInfo, TensorName, TensorRef, Tokenizer, safetensors};

/// A memory-mapped model, or one that is made: configuration, tokenizer, chat template and tensors. All shapes and extents are checked.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    name: String,
    config: ModelConfig,
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
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

    /// Of a configuration and a seed alone; `path` is what it is called.
    pub(crate) fn random(
        path: PathBuf,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        fingerprint: u64,
        weights: RandomWeights,
    ) -> Model {
        let (name, chat) = (path.to_string_lossy().into_owned(), Some(chat));
        Model { path, name, config, tokenizer, chat, fingerprint, weights: Weights::Random(weights) }
    }

    /// The file or directory it was opened from, or what it was made of.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name for people: the file's own, else the file's or directory's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name clients ask for: `name` if given, else what the user typed, else, when that was a path, the file's name
    /// without its ending.
    pub fn served_name(&self, spec: &str, name: Option<&str>) -> String {
        let path = Path::new(spec);
        let stem = if path.is_file() { path.file_stem() } else { path.file_name() };
        match (name, stem) {
            (Some(name), _) => name.to_owned(),
            (None, Some(stem)) if path.exists() => stem.to_string_lossy().into_owned(),
            _ => spec.to_owned(),
        }
    }

    /// What the decoder needs to know.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; base models have none.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }

    /// Equal on every host for equal files, different for different weights or configurations.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// A tensor that the configuration says is there; an error names it as the file would.
    pub fn tensor(&self, name: TensorName) -> Result<TensorRef<'_>, ModelFileError> {
        self.find(name).ok_or_else(|| {
            let problem = "is not part of this model's configuration";
            ModelFileError::tensor(&self.path, &format!("{name:?}"), problem)
        })
    }

    /// A tensor, where this model has it.
    pub fn find(&self, name: TensorName) -> Option<TensorRef<'_>> {
        match &self.weights {
            Weights::Files { store, tensors } => store.view(tensors.get(&name)?),
            Weights::Random(weights) => weights.tensor(name),
        }
    }

    /// Every tensor the decoder uses, without its elements.
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
    let GgufFile { keys, mut metadata, tensors: store } = gguf::open(path)?;
    let config = config::gguf::read(&keys, gguf::tensor_facts(path, &store)?)?;
    let tokenizer = tokenizer::from_gguf(&keys, &mut metadata)?;
    let chat = keys
        .opt::<String>("tokenizer.chat_template")?
        .map(|source| compile_chat(path, &source, &tokenizer))
        .transpose()?;
    let name = keys.opt("general.name")?.unwrap_or_else(|| file_name(path));
    assemble(path, name, config, tokenizer, chat, store, Naming::Gguf)
}

fn open_directory(dir: &Path) -> Result<Model, ModelFileError> {
    let config = config::hf::read(Keys::read_json(&dir.join("config.json"))?)?;
    let settings = dir.join("tokenizer_config.json");
    let settings = if settings.exists() { Some(Keys::read_json(&settings)?) } else { None };
    let tokenizer = tokenizer::from_directory(dir, settings.as_ref())?;
    let chat = directory_template(dir, settings.as_ref())?
        .map(|(path, source)| compile_chat(&path, &source, &tokenizer))
        .transpose()?;
    let store = safetensors::open(dir)?;
    let naming = Naming::hugging_face(&store, config.post_norms);
    assemble(dir, directory_name(dir), config, tokenizer, chat, store, naming)
}

fn assemble(
    path: &Path,
    name: String,
    config: ModelConfig,
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    store: TensorStore,
    naming: Naming,
) -> Result<Model, ModelFileError> {
    if tokenizer.vocab_size() > config.vocab_size as usize {
        let problem = format!("{} tokens, but the embedding has {} rows", tokenizer.vocab_size(), config.vocab_size);
        return Err(ModelFileError::config(path, "tokenizer", problem));
    }
    let tensors = names::bind(&config, &store, &naming)?;
    let fingerprint = fingerprint(&config, &store, &tensors, &naming);
    let weights = Weights::Files { store, tensors };
    Ok(Model { path: path.to_owned(), name, config, tokenizer, chat, fingerprint, weights })
}

fn compile_chat(path: &Path, source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ModelFileError> {
    let text = |id: Option<&u32>| id.map_or(Ok(String::new()), |id| tokenizer.token_text(*id));
    ChatTemplate::compile(path, source, text(tokenizer.bos_id().as_ref())?, text(tokenizer.eos_ids().first())?)
}

/// A directory's template and the file it is in: a file of its own, else a key of `tokenizer_config.json`.
fn directory_template(dir: &Path, settings: Option<&Keys>) -> Result<Option<(PathBuf, String)>, ModelFileError> {
    let own = dir.join("chat_template.jinja");
    if own.exists() {
        let source = std::fs::read_to_string(&own).map_err(ModelFileError::io(&own))?;
        return Ok(Some((own, source)));
    }
    let older = dir.join("chat_template.json");
    let key = "chat_template";
    let found = match settings.map(|s| s.opt::<ChatSource>(key)).transpose()?.flatten() {
        Some(source) => Some((dir.join("tokenizer_config.json"), source)),
        None if older.exists() => Keys::read_json(&older)?.opt(key)?.map(|source| (older, source)),
        None => None,
    };
    Ok(found.and_then(|(path, source)| Some((path, source.into_default()?))))
}

/// One template, or several by name.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum ChatSource {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(serde::Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatSource {
    fn into_default(self) -> Option<String> {
        match self {
            ChatSource::One(source) => Some(source),
            ChatSource::Named(all) => all.into_iter().find(|t| t.name == "default").map(|t| t.template),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The directory's name; inside a hub cache (`models--org--name/snapshots/commit`) the repository's.
fn directory_name(dir: &Path) -> String {
    let repository = dir.ancestors().nth(2).and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let in_hub =
        repository.as_deref().and_then(|name| name.strip_prefix("models--")).map(|name| name.replace("--", "/"));
    in_hub.unwrap_or_else(|| dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned())
}
