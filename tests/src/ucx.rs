//! UCX, for tests that need it.

use std::path::Path;
use std::process::Command;

/// The directory of its libraries, as `tools/fetch-ucx` finds or fetches them; None, said aloud, where it does not.
pub fn library() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fetch-ucx");
    let found = Command::new(script).output().ok()?;
    if !found.status.success() {
        println!("not over ucx: {}", String::from_utf8_lossy(&found.stderr));
        return None;
    }
    Some(format!("{}/lib", String::from_utf8(found.stdout).ok()?.trim()))
}

/// The environment of a cluster that uses it, over this host's network stack.
pub fn env(library: String) -> Vec<(String, String)> {
    let pairs = [("BATON_UCX_LIBRARY", library), ("BATON_UCX_OPTIONS", "TLS=tcp".to_owned())];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}
