//! Turns what a user typed into a whole model: a path, a name of the catalogue, a repository of the hub, or a random model.

use std::path::{Path, PathBuf};

use baton_model_text::fetch::{self, Parts};

pub use baton_model_text::fetch::{
    CachedModel, HubOptions, NoProgress, Progress, ProgressBar, Recipe, Source, catalogue, default_cache, list, shared,
};

use crate::safetensors::shard_names;
use crate::{Model, ModelFileError, RandomModel};

/// Fetch everything, weights included.
const WHOLE: Parts = Parts::Whole(shard_names);

/// Finds a model: a random one by its name, any other from this source as [`resolve`] does.
pub fn find(source: &Source, spec: &str, progress: &dyn Progress) -> Result<ModelSource, ModelFileError> {
    match RandomModel::parse(spec)? {
        Some(random) => Ok(ModelSource::Random(Box::new(random))),
        None => source.locate(spec, WHOLE, progress).map(ModelSource::Files),
    }
}

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A file or a directory.
    Files(PathBuf),
    /// A random model, which is made, not read.
    Random(Box<RandomModel>),
}

impl ModelSource {
    /// The model, open.
    pub fn open(&self) -> Result<Model, ModelFileError> {
        match self {
            ModelSource::Files(path) => Model::open(path),
            ModelSource::Random(random) => random.open(),
        }
    }
}

/// The path of a model; fetches it if needed. `spec` is `PATH`, a name of the [`catalogue`], or `org/name` of the public hub, where
/// `org/name:file.gguf` or `org/name:Q4_K_M` picks one of several files, and `org/name@revision` a branch, tag or commit.
pub fn resolve(spec: &str, cache: &Path, progress: &dyn Progress) -> Result<PathBuf, ModelFileError> {
    resolve_with(spec, cache, &HubOptions::default(), progress)
}

/// Like [`resolve`], with a hub of your choice.
pub fn resolve_with(
    spec: &str,
    cache: &Path,
    hub: &HubOptions,
    progress: &dyn Progress,
) -> Result<PathBuf, ModelFileError> {
    fetch::locate(spec, cache, hub, WHOLE, progress)
}
