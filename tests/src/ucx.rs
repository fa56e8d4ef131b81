//! UCX, for tests that need it.

use std::path::Path;
use std::process::Command;

use crate::needs;

/// The directory of its libraries, as `tools/fetch-ucx` finds or fetches them; None, said aloud, where it does not.
///
/// # Panics
/// When there is none and tests may not be left out: see [`needs::left_out`].
pub fn library() -> Option<String> {
    let found = fetched();
    if let Err(why) = &found {
        needs::left_out(format_args!("no UCX: {why}"));
    }
    found.ok()
}

fn fetched() -> anyhow::Result<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fetch-ucx");
    let found = Command::new(script).output()?;
    anyhow::ensure!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr).trim());
    Ok(format!("{}/lib", String::from_utf8(found.stdout)?.trim()))
}

/// The environment of a cluster that uses it, over this host's network stack.
pub fn env(library: String) -> Vec<(String, String)> {
    let pairs = [("BATON_UCX_LIBRARY", library), ("BATON_UCX_OPTIONS", "TLS=tcp".to_owned())];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}
