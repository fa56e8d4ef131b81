//! The text part of a model: everything that turns a conversation into tokens and tokens into text. Weights are not read. Separate
//! weight files need not even exist.

use std::path::{Path, PathBuf};

use crate::family::Family;
use crate::gguf::Header;
use crate::keys::Keys;
use crate::{ChatTemplate, ModelConfig, ModelFileError, SamplingDefaults, TensorFacts, Tokenizer, tokenizer};

/// A model's name, tokenizer, chat template, and the two sizes that text depends on.
#[derive(Debug)]
pub struct TextModel {
    path: PathBuf,
    name: String,
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    vocab_size: u32,
    context_length: u32,
    sampling: SamplingDefaults,
    config: Option<ModelConfig>,
}

impl TextModel {
    /// Reads the header of a `.gguf` file, or `config.json`, `tokenizer.json` and the like of a directory.
    pub fn open(path: &Path) -> Result<TextModel, ModelFileError> {
        let metadata = std::fs::metadata(path).map_err(ModelFileError::io(path))?;
        if metadata.is_dir() {
            return TextModel::of_directory(path, &Family::of_directory(path)?);
        }
        let mut header = Header::open(path)?;
        let family = Family::of_gguf(&header)?;
        TextModel::of_gguf(path, &mut header, &family)
    }

    /// Reads the header of a GGUF file; takes the tokenizer's arrays out of it.
    pub fn of_gguf(path: &Path, header: &mut Header, family: &Family) -> Result<TextModel, ModelFileError> {
        let tokenizer = tokenizer::from_gguf(header)?;
        let chat = header.keys.opt::<String>("tokenizer.chat_template")?;
        let chat = chat.map(|source| compile_chat(path, &source, &tokenizer)).transpose()?;
        let name = header.keys.opt("general.name")?.unwrap_or_else(|| file_name(path));
        let sampling = SamplingDefaults::of_gguf(&header.keys)?;
        let config = ModelConfig::of_gguf(family, TensorFacts::of(header));
        Ok(TextModel::of(path, name, tokenizer, chat, family)?.with_sampling(sampling).with_config(config.ok()))
    }

    /// Reads the text files of a directory.
    pub fn of_directory(dir: &Path, family: &Family) -> Result<TextModel, ModelFileError> {
        let settings = dir.join("tokenizer_config.json");
        let settings = if settings.exists() { Some(Keys::read_json(&settings)?) } else { None };
        let tokenizer = tokenizer::from_directory(dir, settings.as_ref())?;
        let chat = directory_template(dir, settings.as_ref())?
            .map(|(path, source)| compile_chat(&path, &source, &tokenizer))
            .transpose()?;
        let sampling = SamplingDefaults::of_directory(dir)?;
        let model = TextModel::of(dir, directory_name(dir), tokenizer, chat, family)?;
        Ok(model.with_sampling(sampling).with_config(ModelConfig::of_family(family).ok()))
    }

    /// Builds it from its parts; `path` is the file that errors name.
    pub(crate) fn of(
        path: &Path,
        name: String,
        tokenizer: Tokenizer,
        chat: Option<ChatTemplate>,
        family: &Family,
    ) -> Result<TextModel, ModelFileError> {
        let Family { vocab_size, context_length, .. } = *family;
        if tokenizer.vocab_size() > vocab_size as usize {
            let problem = format!("{} tokens, but the embedding has {vocab_size} rows", tokenizer.vocab_size());
            return Err(ModelFileError::config(path, "tokenizer", problem));
        }
        let sampling = SamplingDefaults::default();
        Ok(TextModel {
            path: path.to_owned(),
            name,
            tokenizer,
            chat,
            vocab_size,
            context_length,
            sampling,
            config: None,
        })
    }

    /// The same model, sampled like this where a request does not say.
    pub fn with_sampling(self, sampling: SamplingDefaults) -> TextModel {
        TextModel { sampling, ..self }
    }

    pub(crate) fn with_config(self, config: Option<ModelConfig>) -> TextModel {
        TextModel { config, ..self }
    }

    /// The configuration; `None` if it is not one that the decoder can run.
    pub fn config(&self) -> Option<&ModelConfig> {
        self.config.as_ref()
    }

    /// How to sample where a request does not say.
    pub fn sampling(&self) -> SamplingDefaults {
        self.sampling
    }

    /// The file or directory it was opened from, or the name of a random model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A display name: the one stored in the file, else the name of the file or directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name that clients ask for: `name` if given; else, if `spec` is a path, the file's name without its extension or the
    /// directory's name; else `spec`.
    pub fn served_name(&self, spec: &str, name: Option<&str>) -> String {
        let path = Path::new(spec);
        let stem = if path.is_file() { path.file_stem() } else { path.file_name() };
        match (name, stem) {
            (Some(name), _) => name.to_owned(),
            (None, Some(stem)) if path.exists() => stem.to_string_lossy().into_owned(),
            _ => spec.to_owned(),
        }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; base models have none.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }

    /// Rows of the embedding: token ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Longest sequence, tokens.
    pub fn context_length(&self) -> u32 {
        self.context_length
    }
}

fn compile_chat(path: &Path, source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ModelFileError> {
    let text = |id: Option<&u32>| id.map_or(Ok(String::new()), |id| tokenizer.token_text(*id));
    ChatTemplate::compile(path, source, text(tokenizer.bos_id().as_ref())?, text(tokenizer.eos_ids().first())?)
}

/// A directory's chat template and the file that holds it: a separate file, else `tokenizer_config.json`.
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

/// The directory's name; inside a hub cache (`models--org--name/snapshots/commit`) the repository's name.
fn directory_name(dir: &Path) -> String {
    let repository = dir.ancestors().nth(2).and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let in_hub =
        repository.as_deref().and_then(|name| name.strip_prefix("models--")).map(|name| name.replace("--", "/"));
    in_hub.unwrap_or_else(|| dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned())
}
