//! Loads that are copied layer by layer: one at a time, and none for a while after one has failed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Such a load can fail a request where another one would only have had it computed. So after a failure, nothing is copied that way for this long.
const CAUTIOUS: Duration = Duration::from_secs(60);

/// What the threads that load agree on.
#[derive(Debug, Default)]
pub(super) struct Layered(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// All blocks of such a load are in use in host memory at a time, so that there is one at most.
    busy: bool,
    /// When the last one failed.
    failed: Option<Instant>,
}

impl Layered {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A load may be copied layer by layer until its turn is dropped. None: it has to be copied block by block.
    pub fn begin(self: &Arc<Self>) -> Option<Turn> {
        let mut state = self.state();
        let free = !state.busy && state.failed.is_none_or(|failed| failed.elapsed() >= CAUTIOUS);
        state.busy |= free;
        free.then(|| Turn { layered: Arc::clone(self), fails: false })
    }

    /// As if the last failure were long ago.
    #[cfg(test)]
    pub fn forget(&self) -> bool {
        self.state().failed.take().is_some()
    }
}

/// The right to copy a load layer by layer.
#[derive(Debug)]
pub(super) struct Turn {
    layered: Arc<Layered>,
    /// It has failed if it ends now.
    pub fails: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.layered.state();
        state.busy = false;
        if self.fails {
            state.failed = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_at_a_time_and_none_after_a_failure() {
        let layered = Arc::<Layered>::default();
        let turn = layered.begin().unwrap();
        assert!(layered.begin().is_none());
        drop(turn);
        let mut turn = layered.begin().unwrap();
        turn.fails = true;
        drop(turn);
        assert!(layered.begin().is_none());
        assert!(layered.forget() && layered.begin().is_some());
    }
}
