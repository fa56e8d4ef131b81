//! Fetches a model from a hub that speaks the Hugging Face protocol. hf-hub asks, downloads and keeps its usual cache tree.
//!
//! This module adds what hf-hub lacks: a bound on silence, resuming after a cut with the bytes already there, checks of what arrived,
//! and a marker for complete models.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::pick::{Choice, INDEX, choose};
use super::progress::Progress;
use super::registry::sha256_of;
use super::spec::{RepositorySpec, is_file_name};
use super::store;
use super::{Parts, ShardNames};
use crate::ModelFileError;

/// Where the hub is, who asks, and how patient to be.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// Base URL, `http` or `https`, without a slash at the end; None: the public hub.
    pub endpoint: Option<String>,
    /// Access token for repositories that need one.
    pub token: Option<String>,
    /// `HOST:PORT` of workers that give large files to others.
    pub peers: Vec<String>,
    /// Longest silence before giving up.
    pub silence: Duration,
    /// Attempts for each file; each resumes where the last one broke off.
    pub attempts: u32,
}

impl Default for HubOptions {
    fn default() -> Self {
        HubOptions { endpoint: None, token: None, peers: Vec::new(), silence: Duration::from_secs(60), attempts: 5 }
    }
}

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret; logs learn only whether there is one.
        let HubOptions { endpoint, token, peers, silence, attempts } = self;
        let token = token.as_ref().map(|_| "…");
        write!(f, "HubOptions {{ endpoint: {endpoint:?}, token: {token:?}, peers: {peers:?}, ")?;
        write!(f, "silence: {silence:?}, attempts: {attempts} }}")
    }
}

/// Fetches a model and returns its path: a GGUF file, or a directory; of either only the text part unless the whole is wanted. Files
/// that were fetched before are not requested again.
pub(super) fn fetch(
    spec: &RepositorySpec,
    cache: &Path,
    options: &HubOptions,
    parts: Parts,
    progress: &dyn Progress,
) -> Result<PathBuf, ModelFileError> {
    let name = spec.text();
    let wanted = parts.extent();
    if let Some(path) = store::find_ready(cache, &name, wanted) {
        return Ok(path);
    }
    // The lock is held until the model is marked as fetched.
    let (path, _lock) = match parts {
        Parts::Text => {
            let fetch = Fetch::start(spec, cache, options, progress)?;
            match fetch.choose()? {
                Choice::Gguf(file) => {
                    let lock = store::lock(cache, &format!("{}#header", spec.id))?;
                    (fetch.header(cache, &file)?, Some(lock))
                }
                Choice::Directory { text, .. } => {
                    // Another process may be fetching the weights for an hour. The text comes first.
                    let lock = store::lock_unless(cache, &spec.id, || text.iter().all(|file| fetch.has(file)))?;
                    (fetch.text(&text)?, lock)
                }
            }
        }
        Parts::Whole(shard_names) => {
            let lock = store::lock(cache, &spec.id)?;
            if let Some(path) = store::find_ready(cache, &name, wanted) {
                return Ok(path);
            }
            let fetch = Fetch::start(spec, cache, options, progress)?;
            let path = match fetch.choose()? {
                Choice::Gguf(file) => fetch.file(&file)?,
                Choice::Directory { text, weights } => {
                    let path = fetch.text(&text)?;
                    fetch.weights(weights, shard_names)?;
                    path
                }
            };
            (path, Some(lock))
        }
    };
    store::mark_ready(cache, &name, wanted, &path)?;
    Ok(path)
}

pub(super) struct Fetch<'a> {
    pub spec: &'a RepositorySpec,
    pub options: &'a HubOptions,
    pub progress: &'a dyn Progress,
    pub api: Api,
    pub cache: Cache,
    /// The commit that all files are taken from.
    pub commit: String,
    siblings: Vec<String>,
}

impl<'a> Fetch<'a> {
    /// Asks the hub for the repository's list of files.
    fn start(
        spec: &'a RepositorySpec,
        cache: &Path,
        options: &'a HubOptions,
        progress: &'a dyn Progress,
    ) -> Result<Fetch<'a>, ModelFileError> {
        let cache = Cache::new(store::hub_dir(cache));
        let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_retries(0);
        builder = builder.with_token(options.token.clone());
        if let Some(endpoint) = &options.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let api = builder.build().map_err(|e| ModelFileError::fetch(&spec.id, e))?;
        let mut fetch = Fetch { spec, options, progress, api, cache, commit: String::new(), siblings: Vec::new() };
        let revision = spec.revision.clone().unwrap_or_else(|| "main".to_owned());
        let repository = fetch.api.repo(Repo::with_revision(spec.id.clone(), RepoType::Model, revision));
        let info = fetch.supervise(&spec.id, move |_| repository.info())?.map_err(|e| fetch.error(&spec.id, &e))?;
        if info.sha.is_empty() || !info.sha.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(ModelFileError::fetch(&spec.id, format!("the hub names no commit but {:?}", info.sha)));
        }
        fetch.commit = info.sha;
        fetch.siblings = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(fetch)
    }

    /// The files that make up the model.
    fn choose(&self) -> Result<Choice, ModelFileError> {
        if let Some(bad) = self.siblings.iter().find(|name| !is_file_name(name)) {
            return Err(ModelFileError::fetch(&self.spec.id, format!("the hub names a file {bad:?}")));
        }
        let choice = choose(&self.siblings, self.spec.wanted.as_deref());
        choice.map_err(|hint| ModelFileError::UnknownModel { spec: self.spec.text(), hint })
    }

    pub fn repo(&self) -> Repo {
        Repo::with_revision(self.spec.id.clone(), RepoType::Model, self.commit.clone())
    }

    /// Fetches the files of a directory that are no weights; the directory.
    fn text(&self, files: &[String]) -> Result<PathBuf, ModelFileError> {
        for file in files {
            self.file(file)?;
        }
        Ok(self.cache.repo(self.repo()).pointer_path(&self.commit))
    }

    fn weights(&self, weights: &str, shard_names: ShardNames) -> Result<(), ModelFileError> {
        let first = self.file(weights)?;
        let shards = if weights == INDEX { shard_names(&first)? } else { BTreeSet::new() };
        for shard in shards {
            self.file(&shard)?;
        }
        Ok(())
    }

    fn has(&self, file: &str) -> bool {
        self.cache.repo(self.repo()).get(file).is_some()
    }

    /// Fetches one file, resuming after cuts, and checks it.
    fn file(&self, file: &str) -> Result<PathBuf, ModelFileError> {
        if let Some(path) = self.cache.repo(self.repo()).get(file) {
            return Ok(path);
        }
        match self.peers_give(file) {
            Some(path) => Ok(path),
            None => self.retrying(file, || self.download(file)),
        }
    }

    /// Tries what is worth another try, up to the configured number of attempts.
    pub fn retrying<T>(&self, file: &str, mut once: impl FnMut() -> Result<T, Failure>) -> Result<T, ModelFileError> {
        let mut attempt = 1;
        loop {
            match once() {
                Err(Failure { retry: true, error }) if attempt < self.options.attempts => {
                    tracing::info!("{file}: {error}; going on (attempt {attempt} of {})", self.options.attempts);
                    attempt += 1;
                }
                other => return other.map_err(|failure| failure.error),
            }
        }
    }

    fn download(&self, file: &str) -> Result<PathBuf, Failure> {
        let what = format!("{}/{file}", self.spec.id);
        let repository = self.api.repo(self.repo());
        let name = file.to_owned();
        let result = self
            .supervise(&what, move |events| {
                let relay = Relay { events, size: 0, done: 0 };
                download_sized(&repository, &name, relay)
            })
            .map_err(Failure::last)?;
        match result {
            Ok((path, size)) => {
                self.check(&what, &path, size)?;
                self.progress.finish(&what);
                Ok(path)
            }
            Err(e) => {
                if leftover_is_useless(&e) {
                    self.discard_partial();
                }
                Err(self.failure(&what, &e))
            }
        }
    }

    /// Checks the length and, for large files, the digest that names the blob; hf-hub checks neither.
    fn check(&self, what: &str, path: &Path, size: Option<u64>) -> Result<(), Failure> {
        let blob = path.canonicalize().map_err(ModelFileError::io(path)).map_err(Failure::last)?;
        let length = blob.metadata().map_err(ModelFileError::io(&blob)).map_err(Failure::last)?.len();
        let mut wrong =
            size.filter(|size| *size != length).map(|size| ("its length", size.to_string(), length.to_string()));
        let etag = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_sha256 = etag.len() == 64 && etag.chars().all(|c| c.is_ascii_hexdigit());
        if wrong.is_none() && is_sha256 {
            let actual = sha256_of(&blob).map_err(Failure::last)?;
            wrong = (actual != etag).then(|| ("the SHA-256", etag.to_owned(), actual));
        }
        let Some((property, expected, actual)) = wrong else { return Ok(()) };
        // The link goes first: a reader sees the file or nothing.
        let removed = std::fs::remove_file(path).and_then(|()| std::fs::remove_file(&blob));
        removed.map_err(ModelFileError::io(path)).map_err(Failure::last)?;
        let error = ModelFileError::Digest { what: what.to_owned(), property, expected, actual };
        Err(Failure { retry: true, error })
    }

    /// Removes partial downloads that cannot be resumed. Nobody else writes here, because the repository is locked.
    fn discard_partial(&self) {
        let blobs = self.cache.repo(self.repo()).blob_path("");
        for entry in std::fs::read_dir(blobs).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "part") {
                // If it stays, the next attempt fails in the same way and says so.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Runs a request on a thread of its own, because hf-hub sets no timeouts. After too long a silence the thread is abandoned.
    pub fn supervise<T: Send + 'static>(
        &self,
        what: &str,
        request: impl FnOnce(SyncSender<Event>) -> T + Send + 'static,
    ) -> Result<T, ModelFileError> {
        let (sender, receiver) = sync_channel(64);
        let thread = std::thread::spawn(move || request(sender));
        loop {
            match receiver.recv_timeout(self.options.silence) {
                Ok(Event { done, size }) => self.progress.update(what, done, size),
                Err(RecvTimeoutError::Timeout) => {
                    let silence = self.options.silence;
                    return Err(ModelFileError::fetch(what, format!("the hub was silent for {silence:?}; try again")));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        thread.join().map_err(|_| ModelFileError::fetch(what, "the hub's answer could not be understood"))
    }

    pub fn failure(&self, what: &str, error: &ApiError) -> Failure {
        Failure { retry: worth_retrying(error), error: self.error(what, error) }
    }

    fn error(&self, what: &str, error: &ApiError) -> ModelFileError {
        match (status(error), &self.spec.revision) {
            (Some(404), Some(_)) if what == self.spec.id => ModelFileError::UnknownModel {
                spec: self.spec.text(),
                hint: "the hub has no such repository, or it has no such revision".to_owned(),
            },
            (Some(404), None) if what == self.spec.id => ModelFileError::UnknownModel {
                spec: what.to_owned(),
                hint: "the hub has no such repository".to_owned(),
            },
            (Some(401 | 403), _) => ModelFileError::fetch(
                what,
                "the hub refuses access; the repository may need an access token (--hub-token-file), or not exist",
            ),
            _ => ModelFileError::fetch(what, error),
        }
    }
}

/// A failed attempt.
pub(super) struct Failure {
    retry: bool,
    error: ModelFileError,
}

impl Failure {
    pub fn last(error: ModelFileError) -> Failure {
        Failure { retry: false, error }
    }
}

fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(e) => match **e {
            ureq::Error::StatusCode(code) => Some(code),
            _ => None,
        },
        _ => None,
    }
}

/// Whether the partial file cannot be resumed: it is longer than the file, or complete but not yet renamed.
fn leftover_is_useless(error: &ApiError) -> bool {
    matches!(error, ApiError::InvalidResume) || status(error) == Some(416)
}

fn worth_retrying(error: &ApiError) -> bool {
    match error {
        ApiError::IoError(_) | ApiError::InvalidResume => true,
        ApiError::RequestError(_) => status(error).is_none_or(|code| code >= 500 || matches!(code, 408 | 416 | 429)),
        _ => false,
    }
}

/// Progress of a download, in bytes.
pub(super) struct Event {
    pub done: u64,
    pub size: Option<u64>,
}

/// Passes hf-hub's progress on. Events that nobody waits for any more are dropped.
struct Relay {
    events: SyncSender<Event>,
    size: u64,
    done: u64,
}

impl hf_hub::api::Progress for &mut Relay {
    fn init(&mut self, size: usize, _filename: &str) {
        self.size = size as u64;
        self.done = 0;
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        // The download goes on even if the listener has given up: what arrives is kept for the next attempt.
        let _ = self.events.send(Event { done: self.done, size: Some(self.size) });
    }

    fn finish(&mut self) {}
}

fn download_sized(repository: &ApiRepo, file: &str, mut relay: Relay) -> Result<(PathBuf, Option<u64>), ApiError> {
    let path = repository.download_with_progress(file, &mut relay)?;
    Ok((path, Some(relay.size)))
}
