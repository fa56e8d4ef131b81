//! What examples that measure a model's accuracy share: a text, and how well logits foresee it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

/// Prints chapters of the language reference that are prose rather than grammar.
const PYTHON_DOCUMENTATION: &str = "
from pydoc_data.topics import topics
print('\\n'.join(topics[t] for t in ('objects', 'naming', 'exceptions', 'import', 'typesseq') if t in topics))";

/// A file's text, or Python's documentation.
pub fn text(file: Option<&Path>) -> anyhow::Result<String> {
    match file {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display())),
        None => python_documentation(),
    }
}

/// Python's own language reference, as the installed Python carries it.
fn python_documentation() -> anyhow::Result<String> {
    let output = Command::new("python3")
        .args(["-c", PYTHON_DOCUMENTATION])
        .output()
        .context("running python3 for its documentation; or give a file with --text")?;
    ensure!(output.status.success(), "python3: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Natural logarithm of the probability that logits give a token.
pub fn log_probability(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
    let total = logits.iter().map(|&x| (x as f64 - max).exp()).sum::<f64>().ln() + max;
    logits[id as usize] as f64 - total
}
