//! Finds libnccl and keeps it: it is opened once, and never closed.

use std::error::Error;
use std::sync::OnceLock;

use libloading::Library;

use crate::api::Api;

/// Where it is looked for; distributions have the first, development packages the second too.
pub const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Why there is no NCCL to use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoadError {
    /// None of [`NAMES`] is where the dynamic linker looks, or none can be opened.
    #[error("NCCL could not be opened: {cause}; install it (Debian: libnccl2)")]
    Open {
        /// What the dynamic linker says of the first.
        cause: String,
    },
    /// A function is missing.
    #[error("this host's NCCL is too old: it has no {symbol}; 2.7 or later is needed")]
    Symbol {
        /// The function.
        symbol: &'static str,
    },
}

/// libnccl, from where the dynamic linker looks. Looked for once; the answer stays.
///
/// # Errors
/// [`LoadError`], the same at every call.
pub fn load() -> Result<&'static Api, LoadError> {
    static OPENED: OnceLock<Result<Api, LoadError>> = OnceLock::new();
    OPENED.get_or_init(|| open(&NAMES)).as_ref().map_err(Clone::clone)
}

fn open(names: &[&str]) -> Result<Api, LoadError> {
    let mut cause = String::new();
    for name in names {
        // SAFETY: the library's initialisers only set up its own state.
        match unsafe { Library::new(*name) } {
            Ok(library) => {
                // SAFETY: it has NCCL's name and version, and is never closed.
                let api = unsafe { Api::resolve(&library) };
                std::mem::forget(library);
                return api.map_err(|symbol| LoadError::Symbol { symbol });
            }
            // The linker's words, without the library's own framing of them.
            Err(error) if cause.is_empty() => {
                cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            }
            Err(_) => {}
        }
    }
    Err(LoadError::Open { cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let said = |names: &[&str]| open(names).err().map(|error| error.to_string()).unwrap_or_default();
        let absent = said(&["libnone-of-it.so.2", "libnone-of-it.so"]);
        assert!(absent.contains("libnone-of-it.so.2") && absent.contains("install"), "{absent}");
        // A library that is there and is another one.
        let other = said(&["libc.so.6"]);
        assert!(other.contains("ncclCommInitAll") && other.contains("too old"), "{other}");
    }
}
