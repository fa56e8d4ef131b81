//! From what a user typed to a path.
use crate::ModelFileError;
use std::path::{Path, PathBuf};
/// Told how far a download is.
pub trait Progress: Send + Sync {
    /// `done` of `total` bytes of `what` are here; `total` is None while unknown.
    fn update(&self, what: &str, done: u64, total: Option<u64>);
    /// `what` is complete.
    fn finish(&self, what: &str);
}
/// Where the hub is and who asks.
#[derive(Clone, Default)]
pub struct HubOptions {
    /// Base URL; None: the public hub.
    pub endpoint: Option<String>,
    /// Access token.
    pub token: Option<String>,
}
/// The user's cache directory for models.
pub fn default_cache() -> Result<PathBuf, ModelFileError> {
    Err(ModelFileError::fetch("", "not there yet"))
}
/// [`resolve_with`] the public hub.
pub fn resolve(spec: &str, cache: &Path, progress: &dyn Progress) -> Result<PathBuf, ModelFileError> {
    resolve_with(spec, cache, &HubOptions::default(), progress)
}
/// The path of a model: PATH | NAME | org/name[:file or quantisation].
pub fn resolve_with(
    spec: &str,
    _cache: &Path,
    _hub: &HubOptions,
    _progress: &dyn Progress,
) -> Result<PathBuf, ModelFileError> {
    Err(ModelFileError::fetch(spec, "not there yet"))
}
/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CachedModel {
    /// What to pass as `--model`.
    pub spec: String,
    /// File or directory.
    pub path: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
}
/// Complete models in the cache, sorted by name.
pub fn list(_cache: &Path) -> Result<Vec<CachedModel>, ModelFileError> {
    Ok(Vec::new())
}
