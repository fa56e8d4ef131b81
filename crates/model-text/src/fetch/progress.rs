//! Reports how far a download is, to whoever wants to show it.

use std::sync::Mutex;

use indicatif::{ProgressBar as Bar, ProgressDrawTarget, ProgressStyle};

/// Told how far a download is. Calls come from one thread at a time.
pub trait Progress: Send + Sync {
    /// `done` of `total` bytes of `what` are here; `total` is None while unknown. `done` may fall when a download starts over.
    fn update(&self, what: &str, done: u64, total: Option<u64>);
    /// `what` is complete.
    fn finish(&self, what: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _what: &str, _done: u64, _total: Option<u64>) {}
    fn finish(&self, _what: &str) {}
}

/// A bar on standard error, one line a file; nothing where standard error is no terminal.
#[derive(Debug, Default)]
pub struct ProgressBar {
    current: Mutex<Option<(String, Bar)>>,
}

impl ProgressBar {
    /// A bar that appears with the first byte.
    pub fn new() -> ProgressBar {
        ProgressBar::default()
    }

    fn bar(what: &str, total: Option<u64>) -> Bar {
        let bar = Bar::with_draw_target(total, ProgressDrawTarget::stderr());
        let template = match total {
            Some(_) => "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        bar
    }
}

impl Progress for ProgressBar {
    fn update(&self, what: &str, done: u64, total: Option<u64>) {
        let Ok(mut current) = self.current.lock() else { return };
        if current.as_ref().is_none_or(|(name, bar)| name != what || bar.length() != total) {
            *current = Some((what.to_owned(), Self::bar(what, total)));
        }
        if let Some((_, bar)) = current.as_ref() {
            bar.set_position(done);
        }
    }

    fn finish(&self, what: &str) {
        let Ok(mut current) = self.current.lock() else { return };
        if let Some((_, bar)) = current.take_if(|(name, _)| name == what) {
            bar.finish();
        }
    }
}
