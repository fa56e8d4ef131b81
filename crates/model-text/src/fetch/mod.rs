//! Turns what a user typed into a model's place: a path, a name of the catalogue, a repository of the hub, or none (a random model).
//!
//! What is fetched stays in a cache directory. A model appears there only when it is complete and checked; several processes
//! may ask for the same one at once, and one of them fetches it.

mod catalogue;
mod header;
mod hub;
mod peers;
mod pick;
mod progress;
mod registry;
mod spec;
mod store;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::{ModelFileError, RandomShape, TextModel};

pub use catalogue::{Recipe, catalogue};
pub use hub::HubOptions;
pub use peers::shared;
pub use pick::{INDEX, SINGLE};
pub use progress::{NoProgress, Progress, ProgressBar};
use store::Extent;
pub use store::{CachedModel, default_cache, list};

/// Reads the names of the weight files from an index.
pub type ShardNames = fn(&Path) -> Result<BTreeSet<String>, ModelFileError>;

/// How much of a model to fetch.
#[derive(Clone, Copy, Debug)]
pub enum Parts {
    /// Tokenizer, chat template and configuration. Of a GGUF file that is the beginning.
    Text,
    /// The weights too, with a function that reads their index.
    Whole(ShardNames),
}

impl Parts {
    fn extent(self) -> Extent {
        match self {
            Parts::Text => Extent::Text,
            Parts::Whole(_) => Extent::Whole,
        }
    }
}

/// Where models are kept, and the hub they are fetched from.
#[derive(Clone, Debug)]
pub struct Source {
    cache: PathBuf,
    hub: HubOptions,
}

impl Source {
    /// Settings as a user gives them: the cache folder (None: the user's own), the hub's base URL (None: the public one),
    /// and the file that holds an access token.
    ///
    /// # Errors
    /// No cache folder can be found, the URL is not valid, or the token cannot be read; each error names the setting.
    pub fn new(
        cache: Option<PathBuf>,
        hub_endpoint: Option<String>,
        hub_token_file: Option<&Path>,
    ) -> Result<Source, ModelFileError> {
        let setting = |name, problem| Err(ModelFileError::Setting { name, problem });
        if let Some(url) = hub_endpoint.as_ref().filter(|u| !u.starts_with("http://") && !u.starts_with("https://")) {
            return setting("hub_endpoint", format!("{url:?} does not begin with http:// or https://"));
        }
        let token = match hub_token_file.map(|path| (path, std::fs::read_to_string(path))) {
            None => None,
            Some((path, Err(e))) => {
                return setting("hub_token_file", format!("{} cannot be read: {e}", path.display()));
            }
            Some((path, Ok(text))) => match text.trim() {
                token if !token.is_empty() && token.chars().all(|c| c.is_ascii_graphic()) => Some(token.to_owned()),
                // Never the text itself: it may be another secret.
                _ => return setting("hub_token_file", format!("{} does not hold one token", path.display())),
            },
        };
        let cache = cache.map_or_else(default_cache, Ok)?;
        Ok(Source { cache, hub: HubOptions { endpoint: hub_endpoint, token, ..HubOptions::default() } })
    }

    /// The same, with workers that have large files of a hub's models: `http://HOST:PORT`, with commas.
    ///
    /// # Errors
    /// One of them is no such address; the error names the setting.
    pub fn with_peers(mut self, peers: Option<&str>) -> Result<Source, ModelFileError> {
        for peer in peers.unwrap_or_default().split(',').map(str::trim).filter(|peer| !peer.is_empty()) {
            let address = peer.strip_prefix("http://").map(|address| address.trim_end_matches('/'));
            let address = address.filter(|address| {
                address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
            });
            let Some(address) = address else {
                let problem = format!("{peer:?} is not http://HOST:PORT");
                return Err(ModelFileError::Setting { name: "model_peers", problem });
            };
            self.hub.peers.push(address.to_owned());
        }
        Ok(self)
    }

    /// The cache folder.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Opens the text part of a model. Separate weight files are not fetched.
    pub fn open_text(&self, spec: &str, progress: &dyn Progress) -> Result<TextModel, ModelFileError> {
        match RandomShape::parse(spec)? {
            Some(shape) => shape.open(),
            None => {
                let model = TextModel::open(&self.locate(spec, Parts::Text, progress)?)?;
                // A path of that name comes first.
                let recipe = catalogue().iter().find(|recipe| recipe.name == spec && !Path::new(spec).exists());
                Ok(match recipe {
                    Some(recipe) => model.with_sampling(recipe.sampling),
                    None => model,
                })
            }
        }
    }

    /// The path of a model; fetches `parts` of it if needed ([`locate`]).
    pub fn locate(&self, spec: &str, parts: Parts, progress: &dyn Progress) -> Result<PathBuf, ModelFileError> {
        locate(spec, &self.cache, &self.hub, parts, progress)
    }
}

/// The path of a model; fetches `parts` of it if needed. `spec` is `PATH`, a name of the [`catalogue`], or `org/name` of a hub, where
/// `org/name:file.gguf` or `org/name:Q4_K_M` picks one of several files, and `org/name@revision` a branch, tag or commit.
pub fn locate(
    spec: &str,
    cache: &Path,
    hub: &HubOptions,
    parts: Parts,
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
        Some(repository) => hub::fetch(&repository, cache, hub, parts, progress),
        None => Err(ModelFileError::UnknownModel { spec: spec.to_owned(), hint: hint() }),
    }
}

fn hint() -> String {
    let names: Vec<&str> = catalogue().iter().map(|recipe| recipe.name).collect();
    format!("neither a path that exists, nor org/name of a hub, nor random:NAME, nor one of {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{BatonError, ErrorKind};

    #[test]
    fn a_wrong_setting_is_named_and_a_token_never_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let path = dir.path().join("token");
            std::fs::write(&path, text).unwrap();
            path
        };
        let source = |url: Option<&str>, token: Option<&Path>| {
            Source::new(Some(dir.path().into()), url.map(str::to_owned), token).map_err(|e| e.to_string())
        };
        let good = source(Some("https://mirror"), Some(&file("hf_secret\n"))).unwrap();
        assert_eq!(good.hub.token.as_deref(), Some("hf_secret"));
        assert!(!format!("{good:?}").contains("secret"));
        assert!(source(Some("mirror"), None).unwrap_err().contains("hub_endpoint"));
        assert!(source(None, Some(Path::new("/no/such"))).unwrap_err().contains("hub_token_file"));
        for bad in ["", " \n", "two tokens", "secret\u{1}"] {
            let error = source(None, Some(&file(bad))).unwrap_err();
            assert!(error.contains("hub_token_file") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn peers_are_addresses_with_a_port() {
        let source = || Source::new(Some("/x".into()), None, None).unwrap();
        let two = source().with_peers(Some("http://a:1, http://[::1]:9000/,")).unwrap();
        assert_eq!(two.hub.peers, ["a:1", "[::1]:9000"]);
        assert!(source().with_peers(None).unwrap().hub.peers.is_empty());
        for bad in ["a:1", "https://a:1", "http://a", "http://:1", "http://a:70000", "http://a:1/x"] {
            let error = source().with_peers(Some(bad)).unwrap_err().to_string();
            assert!(error.contains("model_peers") && error.contains(bad), "{error}");
        }
    }

    #[test]
    fn paths_win_and_nonsense_is_told_what_works() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("smollm2");
        std::fs::write(&file, b"x").unwrap();
        let spec = file.to_str().unwrap();
        let resolve = |spec: &str| locate(spec, dir.path(), &HubOptions::default(), Parts::Text, &NoProgress);
        assert_eq!(resolve(spec).unwrap(), file);
        for spec in ["", "no-such-name", "./no/such/file.gguf", "/no/such", "a/b/c", "a/../b", "../x", "a/b:"] {
            let error = resolve(spec).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{spec}");
            let told = error.to_string();
            assert!(told.contains("smollm2, gemma, qwen") && told.contains("random:NAME"), "{error}");
        }
    }
}
