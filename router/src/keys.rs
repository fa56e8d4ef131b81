//! The API keys of clients: a TOML file with the hash of each key and what its tenant may do. Read again when it changes.

use std::collections::{HashMap, HashSet};
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use baton_policy::{Slo, TenantLimits};
use baton_runtime::Shutdown;
use baton_runtime::config::{nearest_within, parse_duration};
use baton_types::{Class, ErrorKind};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::signal::unix::Signal;

use crate::error::{RequestError, RouterError};
use crate::openai::names;
use crate::tenant::{MAX_NAME, Rights, Tenant};

/// How often the file is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How soon it is looked at again after it changed.
const LOOK_AGAIN: Duration = Duration::from_millis(300);
/// Largest weight of a tenant.
const MAX_WEIGHT: u32 = 1000;
/// Largest file, bytes.
const MAX_FILE: u64 = 16 << 20;

/// A field within this many edits of a known one counts as misspelt.
const MISSPELT: usize = 2;

type Hash = [u8; 32];

/// The keys of a file.
#[derive(Debug)]
pub(crate) struct KeyRing {
    path: PathBuf,
    /// The router predicts whether an SLO will be met.
    predicts: bool,
    keys: RwLock<Arc<Keys>>,
}

/// Which tenant each key belongs to.
#[derive(Debug, Default)]
struct Keys {
    text: String,
    tenants: HashMap<Hash, Arc<Tenant>>,
    /// The tenants of the file, and those that have left it and still owe something.
    known: HashMap<String, Arc<Tenant>>,
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenants: Vec<Entry>,
}

/// One tenant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// For people: logs, errors. Its KV is shared with no other name's.
    name: String,
    /// SHA-256 of each of its keys, in hex. Two while one replaces the other.
    sha256: Vec<String>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
    streams: Option<u32>,
    #[serde(default = "one")]
    weight: u32,
    #[serde(default)]
    highest_priority: i32,
    class: Option<String>,
    #[serde(default = "yes")]
    keep_kv: bool,
    kept_tokens: Option<u32>,
    reject_ttft: Option<String>,
    reject_itl: Option<String>,
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

impl KeyRing {
    /// Reads the file, for a router that `predicts` whether an SLO will be met, or does not.
    ///
    /// # Errors
    /// It cannot be read, or a field of it is wrong.
    pub fn open(path: &Path, predicts: bool) -> Result<KeyRing, RouterError> {
        let keys = read(path).and_then(|text| Keys::default().next(text, predicts));
        let keys = keys.map_err(|problem| RouterError::Keys { path: path.to_owned(), problem })?;
        tracing::info!(path = %path.display(), keys = keys.tenants.len(), "clients need an API key");
        Ok(KeyRing { path: path.to_owned(), predicts, keys: RwLock::new(Arc::new(keys)) })
    }

    /// The tenant of a request, by its Authorization header.
    ///
    /// # Errors
    /// There is no key, or none that is known.
    pub fn tenant(&self, authorization: Option<&[u8]>) -> Result<Arc<Tenant>, RequestError> {
        let Some(key) = authorization.and_then(bearer) else {
            return Err(refused("an API key is needed; send it as the header Authorization: Bearer KEY"));
        };
        let hash: Hash = Sha256::digest(key).into();
        self.keys().tenants.get(&hash).cloned().ok_or_else(|| refused("the API key is not known here"))
    }

    /// Reads the file again whenever it changes, until the drain starts; at once on a signal. A file that cannot be used changes nothing.
    pub async fn watch(self: Arc<KeyRing>, mut signals: Option<Signal>, shutdown: Shutdown) {
        let mut complained = String::new();
        // What the last look found. A file that is being written to is taken once two looks find the same.
        let mut seen = None;
        loop {
            let pause = if seen.is_some() { LOOK_AGAIN } else { LOOK_EVERY };
            let signal = async {
                match &mut signals {
                    Some(signals) => signals.recv().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = signal => tracing::info!("SIGHUP: reading the API keys again"),
                () = shutdown.draining() => return,
            }
            let path = self.path.clone();
            let read = tokio::task::spawn_blocking(move || read(&path)).await;
            let problem = match read.unwrap_or_else(|_| Err("reading it panicked".to_owned())) {
                Ok(text) if text == self.keys().text => {
                    seen = None;
                    None
                }
                Ok(text) if seen.as_ref() != Some(&text) => {
                    seen = Some(text);
                    continue;
                }
                Ok(text) => {
                    seen = None;
                    self.replace(text).err()
                }
                Err(problem) => Some(problem),
            };
            let problem = problem.unwrap_or_default();
            if !problem.is_empty() && problem != complained {
                tracing::warn!(path = %self.path.display(), problem, "the API keys cannot be read again; the old ones stay");
            }
            complained = problem;
        }
    }

    fn keys(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, text: String) -> Result<(), String> {
        let next = self.keys().next(text, self.predicts)?;
        match next.tenants.len() {
            0 => tracing::warn!(path = %self.path.display(), "the file has no API keys any more: nobody is served"),
            keys => tracing::info!(path = %self.path.display(), keys, "API keys read again"),
        }
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
        Ok(())
    }
}

impl Keys {
    /// The keys of a new text of the file. Tenants that stay keep what they have used.
    fn next(&self, text: String, predicts: bool) -> Result<Keys, String> {
        let entries = parse(&text)?;
        let mut known: HashMap<String, Arc<Tenant>> =
            self.known.iter().filter(|(_, tenant)| tenant.owes()).map(|(name, t)| (name.clone(), t.clone())).collect();
        let mut tenants = HashMap::new();
        for (entry, hashes) in entries {
            let rights = entry.rights()?;
            if !predicts && rights.slo != Slo::default() {
                let why =
                    "reject_ttft and reject_itl need the router's placement = predicted: the others predict nothing";
                return Err(format!("{}: {why}", entry.name));
            }
            let tenant = match self.known.get(&entry.name) {
                Some(tenant) => Arc::clone(tenant),
                None => Arc::new(Tenant::new(&entry.name, rights)),
            };
            tenant.set_rights(rights);
            tenants.extend(hashes.into_iter().map(|hash| (hash, Arc::clone(&tenant))));
            known.insert(entry.name, tenant);
        }
        Ok(Keys { text, tenants, known })
    }
}

/// Reads the file's text; says which field is wrong.
fn parse(text: &str) -> Result<Vec<(Entry, Vec<Hash>)>, String> {
    let file: File = toml::from_str(text).map_err(|e| {
        let before = &text[..e.span().map_or(0, |span| span.start)];
        let at = before.matches('\n').count();
        let field = text.lines().nth(at).and_then(|line| line.split_once('=')).map_or("", |(field, _)| field.trim());
        told(at + 1, field, e.message())
    })?;
    let (mut names, mut keys) = (HashSet::new(), HashSet::new());
    let mut entries = Vec::with_capacity(file.tenants.len());
    for (at, entry) in file.tenants.into_iter().enumerate() {
        let name = &entry.name;
        if !is_name(name) {
            // Not the name itself, which may be a key.
            return Err(format!("tenants[{at}].name: it must have 1 to {MAX_NAME} of a-z, A-Z, 0-9, _, . and -"));
        }
        if !names.insert(name.clone()) {
            return Err(format!("name {name:?} is there twice; put all of its keys into one sha256"));
        }
        if !(1..=MAX_WEIGHT).contains(&entry.weight) {
            return Err(format!("{name}: weight is {}; it must be 1 to {MAX_WEIGHT}", entry.weight));
        }
        // Never the text itself: it may be the key.
        let bad =
            |text: &String| format!("{name}: sha256 has a text of {} bytes; it must be 64 hex digits", text.len());
        let hash = |text: &String| hex(text).ok_or_else(|| bad(text));
        let hashes = entry.sha256.iter().map(hash).collect::<Result<Vec<Hash>, String>>()?;
        if !hashes.iter().all(|hash| keys.insert(*hash)) {
            return Err(format!("{name}: sha256 has a key that is there twice"));
        }
        entries.push((entry, hashes));
    }
    Ok(entries)
}

impl Entry {
    /// What it may do; says which field is wrong.
    fn rights(&self) -> Result<Rights, String> {
        let limits = TenantLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            streams: self.streams,
            kept_tokens: self.kept_tokens,
        };
        let Entry { weight, highest_priority, keep_kv, .. } = *self;
        let slo = Slo {
            first_token: self.time("reject_ttft", self.reject_ttft.as_deref())?,
            token: self.time("reject_itl", self.reject_itl.as_deref())?,
            ..Slo::default()
        };
        let (lowest, highest) = Class::PRIORITIES;
        if !(lowest..=highest).contains(&highest_priority) {
            let name = &self.name;
            return Err(format!(
                "{name}: highest_priority: is {highest_priority}; it must be between {lowest} and {highest}"
            ));
        }
        let wrong = |_| format!("{}: class: it must be interactive or batch", self.name);
        let class = self.class.as_deref().map(str::parse).transpose().map_err(wrong)?.unwrap_or_default();
        Ok(Rights { limits, weight, highest_priority, class, keep_kv, slo })
    }

    fn time(&self, field: &str, text: Option<&str>) -> Result<Option<Duration>, String> {
        let wrong = |problem| format!("{}: {field}: {problem}", self.name);
        match text.map(parse_duration).transpose().map_err(|_| wrong("it must be a duration, such as 500ms or 2s"))? {
            Some(Duration::ZERO) => Err(wrong("it is 0; it must be above 0, or be left out")),
            time => Ok(time),
        }
    }
}

/// An error of the parser: where it is, and what is wanted there. Never what was found: it may be a key, wherever it is.
fn told(line: usize, field: &str, message: &str) -> String {
    let known = || names::<Entry>().iter().chain(names::<File>()).copied();
    let at = match known().find(|name| *name == field) {
        Some(name) => format!("line {line}, {name}"),
        None => format!("line {line}"),
    };
    // What is expected is last, and not from the file.
    let expected = message.rsplit_once(", expected ").map(|(_, expected)| format!(", expected {expected}"));
    let expected = expected.unwrap_or_default();
    if message.starts_with("missing field") {
        return format!("{at}: {message}");
    }
    if message.starts_with("unknown field") {
        return match nearest_within(field, known(), MISSPELT) {
            Some(meant) => format!("{at}: unknown field; did you mean {meant}?"),
            None => format!("{at}: unknown field{expected}"),
        };
    }
    let what = ["invalid type", "invalid value"].into_iter().find(|what| message.starts_with(what));
    format!("{at}: {}{expected}", what.unwrap_or("it is no TOML, or says something twice"))
}

fn read(path: &Path) -> Result<String, String> {
    let length = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if length > MAX_FILE {
        return Err(format!("it has {length} bytes; at most {MAX_FILE} are allowed"));
    }
    std::fs::read_to_string(path).map_err(|e| e.to_string())
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

fn hex(text: &str) -> Option<Hash> {
    let mut hash = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// The key in `Bearer KEY`.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = header.split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !key.is_empty()).then_some(key)
}

fn refused(wrong: &str) -> RequestError {
    RequestError::new(ErrorKind::Unauthenticated, wrong).code("invalid_api_key")
}

#[cfg(test)]
mod tests;
