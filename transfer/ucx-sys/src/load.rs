//! Finds libucp, checks its version, and keeps it: UCX cannot be unloaded, nor loaded twice.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::api::Api;

/// The oldest version this crate works with. From it on, the API matches the declarations, and puts over TCP are sound.
pub const LEAST: Version = Version { major: 1, minor: 15, release: 0 };

/// File names, in the order in which they are opened: with a directory given, each library finds those opened before it. The first
/// library calls the second, so symbols are bound when they are called.
const NAMES: [&str; 4] = ["libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"];

/// A version of UCX.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

impl Version {
    /// Whether the declarations of this crate hold for it.
    fn is_known(self) -> bool {
        self >= LEAST && self.major == LEAST.major
    }
}

/// Why UCX cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoadError {
    /// The libraries are not where they were looked for, or cannot be opened.
    #[error(
        "UCX could not be opened: {tried}: {cause}; install UCX {LEAST} or later (Debian: libucx0, PyPI: libucx-cu12), or name the directory that has libucp.so.0"
    )]
    Open {
        /// The name or path.
        tried: String,
        /// The dynamic linker's message.
        cause: String,
    },
    /// It is too old, or of a later major version than is known.
    #[error("UCX {found} ({path}) cannot be used: {LEAST} up to the end of {major}.x is needed", major = LEAST.major)]
    Version {
        /// What was found.
        found: Version,
        /// What was opened.
        path: String,
    },
    /// A function is missing.
    #[error("{path} is no libucp that can be used: it has no {symbol}")]
    Symbol {
        /// What was opened.
        path: String,
        /// The function.
        symbol: &'static str,
    },
    /// UCX is loaded already, from another directory.
    #[error("UCX is loaded from {before} already and cannot be loaded again from {asked}")]
    Twice {
        /// What is loaded.
        before: String,
        /// What was asked for.
        asked: String,
    },
}

/// What this process has loaded: the directory, the functions and the version.
type Loaded = (Option<PathBuf>, &'static Api, Version);

/// Loads libucp from `directory`, or from where the dynamic linker looks. Once loaded, it stays.
pub fn load(directory: Option<&Path>) -> Result<(&'static Api, Version), LoadError> {
    static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let name = |directory: Option<&Path>| directory.map_or("the system".into(), |d| d.display().to_string());
    match &*loaded {
        Some((before, api, version)) if before.as_deref() == directory => Ok((api, *version)),
        Some((before, ..)) => Err(LoadError::Twice { before: name(before.as_deref()), asked: name(directory) }),
        None => {
            let (api, version) = open(directory)?;
            let api: &'static Api = Box::leak(Box::new(api));
            *loaded = Some((directory.map(Path::to_owned), api, version));
            Ok((api, version))
        }
    }
}

fn open(directory: Option<&Path>) -> Result<(Api, Version), LoadError> {
    let path = |name: &str| directory.map_or(PathBuf::from(name), |directory| directory.join(name));
    let libraries = NAMES.map(|name| {
        let path = path(name);
        // SAFETY: runs the constructors of a library that the operator installed for this very purpose.
        let opened = unsafe { Library::open(Some(&path), RTLD_LAZY | RTLD_LOCAL) };
        opened.map_err(|e| LoadError::Open { tried: path.display().to_string(), cause: cause(&e) })
    });
    let [ucm, ucs, uct, ucp] = libraries;
    let (ucs, ucp) = (ucs?, ucp?);
    // UCX's threads and hooks may run code of these libraries until the process ends.
    std::mem::forget((ucm?, uct?));
    let path = path(NAMES[3]).display().to_string();
    // SAFETY: the libraries have UCX's names; the version is asked before any function whose signature could differ is called.
    let api = unsafe { Api::resolve(&ucp, &ucs) };
    std::mem::forget((ucs, ucp));
    let api = api.map_err(|symbol| LoadError::Symbol { path: path.clone(), symbol })?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three places to write to; the signature never changed.
    unsafe { (api.get_version)(&mut major, &mut minor, &mut release) };
    let found = Version { major, minor, release };
    if found.is_known() { Ok((api, found)) } else { Err(LoadError::Version { found, path }) }
}

/// The linker's message, without what `libloading` puts around it.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let error = open(Some(Path::new("/nonexistent/ucx"))).err().map(|e| e.to_string()).unwrap_or_default();
        for part in ["/nonexistent/ucx/libucs.so.0", "No such file", "1.15.0 or later", "libucx0", "name the directory"]
        {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn versions_before_the_least_and_other_generations_are_refused() {
        let version = |major, minor, release| Version { major, minor, release };
        for good in [LEAST, version(1, 15, 3), version(1, 22, 0)] {
            assert!(good.is_known(), "{good}");
        }
        for bad in [version(1, 14, 9), version(0, 99, 0), version(2, 0, 0)] {
            assert!(!bad.is_known(), "{bad}");
        }
        let error = LoadError::Version { found: version(1, 13, 1), path: "libucp.so.0".into() }.to_string();
        assert_eq!(error, "UCX 1.13.1 (libucp.so.0) cannot be used: 1.15.0 up to the end of 1.x is needed");
    }
}
