//! The cache directory: its layout, locks between processes, and writes that never show a half-done file.
//!
//! - `catalogue/NAME/FILE`: the models with short names.
//! - `hub/`: the hub client's own tree.
//! - `hub-headers/`: beginnings of the hub's GGUF files, without their weights.
//! - `hub-ready/`: markers of the hub's models that are complete.
//! - `hub-text-ready/`: markers of those that are complete except for their weights.
//! - `staging/` and `locks/`: files of fetches in progress.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_types::random_u64;
use serde::{Deserialize, Serialize};

use super::{Recipe, catalogue};
use crate::ModelFileError;

/// The user's cache directory for models, as the XDG base directories say: `$XDG_CACHE_HOME/baton/models`, else under
/// `$HOME/.cache`.
pub fn default_cache() -> Result<PathBuf, ModelFileError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("baton").join("models")).ok_or_else(|| {
        ModelFileError::fetch("a model", "neither XDG_CACHE_HOME nor HOME is an absolute path; name a cache directory")
    })
}

/// A complete model in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedModel {
    /// What to pass as `--model`.
    pub spec: String,
    /// File or directory.
    pub path: PathBuf,
    /// Bytes of the file, or of all files of the directory.
    pub bytes: u64,
}

/// The complete models in the cache, sorted by name. An empty or absent cache has none.
pub fn list(cache: &Path) -> Result<Vec<CachedModel>, ModelFileError> {
    let mut models: Vec<CachedModel> = Vec::new();
    for recipe in catalogue() {
        let path = recipe_path(cache, recipe);
        if is_complete(&path, recipe.bytes) {
            models.push(CachedModel { spec: recipe.name.to_owned(), path, bytes: recipe.bytes });
        }
    }
    let ready = cache.join(READY);
    if ready.exists() {
        for entry in std::fs::read_dir(&ready).map_err(ModelFileError::io(&ready))? {
            let entry = entry.map_err(ModelFileError::io(&ready))?;
            let path = entry.path();
            // Not one that is being written.
            let marker = path.extension().is_some_and(|extension| extension == "json");
            models.extend(marker.then(|| read_ready(cache, &path)).flatten().and_then(|model| model.sized()));
        }
    }
    models.sort_by(|a, b| a.spec.cmp(&b.spec));
    Ok(models)
}

impl CachedModel {
    fn sized(mut self) -> Option<CachedModel> {
        let metadata = std::fs::metadata(&self.path).ok()?;
        self.bytes = if metadata.is_dir() { bytes_below(&self.path) } else { metadata.len() };
        Some(self)
    }
}

pub(super) fn recipe_path(cache: &Path, recipe: &Recipe) -> PathBuf {
    cache.join("catalogue").join(recipe.name).join(recipe.file)
}

pub(super) fn hub_dir(cache: &Path) -> PathBuf {
    cache.join("hub")
}

/// Where the header of a GGUF file of a repository is kept.
pub(super) fn header_path(cache: &Path, repository: &str, commit: &str, file: &str) -> PathBuf {
    cache.join("hub-headers").join(file_safe(repository)).join(commit).join(file)
}

pub(super) fn staging_dir(cache: &Path, name: &str) -> PathBuf {
    cache.join("staging").join(name)
}

/// Whether the file exists with its full length. Its digest was checked before it got its name.
pub(super) fn is_complete(path: &Path, bytes: u64) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == bytes)
}

const READY: &str = "hub-ready";
const TEXT_READY: &str = "hub-text-ready";

/// How much of a hub's model has been fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extent {
    /// All but the weights.
    Text,
    /// All.
    Whole,
}

/// Content of a marker: the spec, and the path relative to the cache, so that the cache can be moved.
#[derive(Serialize, Deserialize)]
struct Ready {
    spec: String,
    path: PathBuf,
}

fn ready_path(cache: &Path, spec: &str, extent: Extent) -> PathBuf {
    let folder = match extent {
        Extent::Text => TEXT_READY,
        Extent::Whole => READY,
    };
    cache.join(folder).join(format!("{}.json", file_safe(spec)))
}

/// The path of a hub model that has been fetched at least to this extent.
pub(super) fn find_ready(cache: &Path, spec: &str, extent: Extent) -> Option<PathBuf> {
    let marked = |extent| read_ready(cache, &ready_path(cache, spec, extent)).filter(|model| model.spec == spec);
    let found = marked(Extent::Whole).or_else(|| (extent == Extent::Text).then(|| marked(Extent::Text)).flatten());
    found.map(|model| model.path)
}

fn read_ready(cache: &Path, marker: &Path) -> Option<CachedModel> {
    let ready: Ready = serde_json::from_slice(&std::fs::read(marker).ok()?).ok()?;
    let path = cache.join(ready.path);
    path.exists().then_some(CachedModel { spec: ready.spec, path, bytes: 0 })
}

/// Marks a hub model as fetched to that extent.
pub(super) fn mark_ready(cache: &Path, spec: &str, extent: Extent, path: &Path) -> Result<(), ModelFileError> {
    let marker = ready_path(cache, spec, extent);
    let relative = path.strip_prefix(cache).unwrap_or(path).to_owned();
    let ready = Ready { spec: spec.to_owned(), path: relative };
    let json = serde_json::to_vec(&ready).map_err(|e| ModelFileError::malformed(&marker, "JSON", e))?;
    // Two processes may mark the same.
    let temporary = marker.with_extension(format!("tmp-{:x}", random_u64()));
    create_dir(parent(&marker))?;
    let mut file = File::create(&temporary).map_err(ModelFileError::io(&temporary))?;
    file.write_all(&json).map_err(ModelFileError::io(&temporary))?;
    publish(&file, &temporary, &marker)
}

/// Gives a finished file its name, after its content has reached the disk.
pub(super) fn publish(file: &File, temporary: &Path, path: &Path) -> Result<(), ModelFileError> {
    file.sync_all().map_err(ModelFileError::io(temporary))?;
    create_dir(parent(path))?;
    std::fs::rename(temporary, path).map_err(ModelFileError::io(path))
}

pub(super) fn create_dir(path: &Path) -> Result<(), ModelFileError> {
    std::fs::create_dir_all(path).map_err(ModelFileError::io(path))
}

/// Removes a directory; it need not exist.
pub(super) fn remove_dir(path: &Path) -> Result<(), ModelFileError> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(ModelFileError::io(path)(e)),
        _ => Ok(()),
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Held while a model is being fetched. The system releases it when the process ends, however it ends.
pub(super) struct FetchLock {
    _file: File,
}

/// Waits until no other process fetches `name`.
pub(super) fn lock(cache: &Path, name: &str) -> Result<FetchLock, ModelFileError> {
    if let Some(lock) = try_lock(cache, name)? {
        return Ok(lock);
    }
    tracing::info!("another process is fetching {name}; waiting for it");
    let (file, path) = lock_file(cache, name)?;
    file.lock().map_err(ModelFileError::io(&path))?;
    Ok(FetchLock { _file: file })
}

/// None: another process fetches `name`.
fn try_lock(cache: &Path, name: &str) -> Result<Option<FetchLock>, ModelFileError> {
    let (file, path) = lock_file(cache, name)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(FetchLock { _file: file })),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(ModelFileError::io(&path)(e)),
    }
}

fn lock_file(cache: &Path, name: &str) -> Result<(File, PathBuf), ModelFileError> {
    let dir = cache.join("locks");
    create_dir(&dir)?;
    let path = dir.join(file_safe(name));
    let file = File::create(&path).map_err(ModelFileError::io(&path))?;
    Ok((file, path))
}

/// Waits until no other process fetches `name`, or what is needed of it is there: then there is no lock.
pub(super) fn lock_unless(
    cache: &Path,
    name: &str,
    there: impl Fn() -> bool,
) -> Result<Option<FetchLock>, ModelFileError> {
    loop {
        if there() {
            return Ok(None);
        }
        if let Some(lock) = try_lock(cache, name)? {
            return Ok(Some(lock));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A spec as one file name.
fn file_safe(name: &str) -> String {
    name.replace('@', "+").replace(':', "@").replace('/', "--")
}

/// Bytes of all files below a directory, following links. Files that vanish meanwhile count as 0.
pub(super) fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let size = |path: PathBuf| match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => bytes_below(&path),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.flatten().map(|entry| size(entry.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_shows_complete_models_only() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(list(&cache.path().join("absent")).unwrap(), []);
        let half = recipe_path(cache.path(), &catalogue()[0]);
        create_dir(parent(&half)).unwrap();
        std::fs::write(&half, b"half").unwrap();
        let model = hub_dir(cache.path()).join("m.gguf");
        create_dir(parent(&model)).unwrap();
        std::fs::write(&model, b"12345").unwrap();
        mark_ready(cache.path(), "org/name:q", Extent::Whole, &model).unwrap();
        mark_ready(cache.path(), "org/gone", Extent::Whole, &cache.path().join("gone")).unwrap();
        mark_ready(cache.path(), "org/text", Extent::Text, cache.path()).unwrap();
        let all = list(cache.path()).unwrap();
        assert_eq!(all, [CachedModel { spec: "org/name:q".to_owned(), path: model.clone(), bytes: 5 }]);
        let find = |spec: &str, extent| find_ready(cache.path(), spec, extent);
        assert_eq!(find("org/name:q", Extent::Whole), Some(model.clone()));
        assert_eq!(find("org/name:q", Extent::Text), Some(model), "the whole has the text");
        assert_eq!(find("org/gone", Extent::Whole), None);
        assert_eq!(find("org/text", Extent::Text), Some(cache.path().to_owned()));
        assert_eq!(find("org/text", Extent::Whole), None);
    }
}
