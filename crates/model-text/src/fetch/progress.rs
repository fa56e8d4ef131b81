//! Reports how far a download is, to whoever wants to show it.

use std::io::IsTerminal;
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

/// A bar on standard error, one line a file. Where standard error is no terminal, a line for each tenth.
#[derive(Debug, Default)]
pub struct ProgressBar {
    current: Mutex<Option<(String, Shown)>>,
}

/// How the current file is shown.
#[derive(Debug)]
enum Shown {
    Bar(Bar),
    /// In lines; the last one was about so many tenths.
    Lines(Option<u64>),
}

/// Bytes of a GB.
const GB: f64 = 1e9;

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
        let goes_on = current
            .as_ref()
            .is_some_and(|(name, shown)| name == what && !matches!(shown, Shown::Bar(bar) if bar.length() != total));
        if !goes_on {
            let bar = std::io::stderr().is_terminal().then(|| Self::bar(what, total));
            *current = Some((what.to_owned(), bar.map_or(Shown::Lines(None), Shown::Bar)));
        }
        match current.as_mut() {
            Some((_, Shown::Bar(bar))) => bar.set_position(done),
            Some((_, Shown::Lines(last))) => {
                let tenths = total.filter(|total| *total > 0).map_or(0, |total| done * 10 / total);
                if last.replace(tenths) != Some(tenths) {
                    let of = total.map(|total| format!(" of {:.2}", total as f64 / GB)).unwrap_or_default();
                    eprintln!("fetching {what}: {:.2}{of} GB", done as f64 / GB);
                }
            }
            None => {}
        }
    }

    fn finish(&self, what: &str) {
        let Ok(mut current) = self.current.lock() else { return };
        match current.take_if(|(name, _)| name == what) {
            Some((_, Shown::Bar(bar))) => bar.finish(),
            Some((_, Shown::Lines(_))) => eprintln!("fetched {what}"),
            None => {}
        }
    }
}
