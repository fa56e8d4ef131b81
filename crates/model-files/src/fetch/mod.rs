//! From what a user typed to a path: a path, a name of the catalogue, or a repository of the hub.
//!
//! What is fetched stays in a cache directory. A model appears there only when it is complete and checked; several processes
//! may ask for the same one at once, and one of them fetches it.

mod catalogue;
mod hub;
mod pick;
mod progress;
mod registry;
mod spec;
mod store;

use std::path::{Path, PathBuf};

use crate::ModelFileError;

pub use catalogue::{Recipe, catalogue};
pub use hub::HubOptions;
pub use progress::{Progress, ProgressBar, Quiet};
pub use store::{CachedModel, default_cache, list};

/// The path of a model, fetched if need be: `PATH`, a name of the [`catalogue`], or `org/name` of the public hub, where
/// `org/name:file.gguf` or `org/name:Q4_K_M` picks one of several files.
pub fn resolve(spec: &str, cache: &Path, progress: &dyn Progress) -> Result<PathBuf, ModelFileError> {
    resolve_with(spec, cache, &HubOptions::default(), progress)
}

/// As [`resolve`], with a hub of your choice.
pub fn resolve_with(
    spec: &str,
    cache: &Path,
    hub: &HubOptions,
    progress: &dyn Progress,
) -> Result<PathBuf, ModelFileError> {
    let path = Path::new(spec);
    if path.exists() {
        return Ok(path.to_owned());
    }
    if let Some(recipe) = catalogue().iter().find(|recipe| recipe.name == spec) {
        return registry::fetch(recipe, cache, registry::PYTHON.as_ref(), progress);
    }
    match spec::RepositorySpec::parse(spec) {
        Some(repository) => hub::fetch(&repository, cache, hub, progress),
        None => Err(ModelFileError::UnknownModel { spec: spec.to_owned(), hint: hint() }),
    }
}

fn hint() -> String {
    let names: Vec<&str> = catalogue().iter().map(|recipe| recipe.name).collect();
    format!("neither a path that exists, nor org/name of a hub, nor one of {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{BatonError, ErrorKind};

    #[test]
    fn paths_win_and_nonsense_is_told_what_works() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("smollm2");
        std::fs::write(&file, b"x").unwrap();
        let spec = file.to_str().unwrap();
        assert_eq!(resolve(spec, dir.path(), &Quiet).unwrap(), file);
        for spec in ["", "no-such-name", "./no/such/file.gguf", "/no/such", "a/b/c", "a/../b", "../x", "a/b:"] {
            let error = resolve(spec, dir.path(), &Quiet).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{spec}");
            assert!(error.to_string().contains("smollm2, gemma, qwen"), "{error}");
        }
    }
}
