//! What the engine thread and the thread that loads tell each other of one load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A load under way.
#[derive(Debug, Default)]
pub(crate) struct Loading {
    /// Seconds that it is expected to take once it has begun.
    pub(super) seconds: f64,
    /// All of it is in host memory.
    pub(super) near: bool,
    given_up: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Leading layers that are in the pool and verified.
    layers: u32,
    /// It is over: whether all was loaded.
    over: Option<bool>,
}

impl Loading {
    /// A load that is expected to take so long. `near`: all of it is in host memory.
    pub fn of(seconds: f64, near: bool) -> Loading {
        Loading { seconds, near, ..Loading::default() }
    }

    /// A load that is over and has brought nothing.
    pub fn none() -> Arc<Loading> {
        let loading = Loading::default();
        loading.end(false);
        Arc::new(loading)
    }

    /// The load is of no use any more.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// So many leading layers are in the pool and verified (I2).
    pub fn reach(&self, layers: u32) {
        self.progress().layers = layers;
        self.changed.notify_all();
    }

    /// Nothing writes to the blocks any more (I3). `whole`: all is loaded and verified.
    pub fn end(&self, whole: bool) {
        self.progress().over = Some(whole);
        self.changed.notify_all();
    }

    /// Leading layers that are loaded.
    #[cfg(test)]
    pub fn layers(&self) -> u32 {
        self.progress().layers
    }

    /// Waits until a layer is loaded. False: it will not be.
    pub fn wait_for(&self, layer: u32) -> bool {
        let waited = self.changed.wait_while(self.progress(), |now| now.layers <= layer && now.over.is_none());
        let now = *waited.unwrap_or_else(PoisonError::into_inner);
        now.layers > layer || now.over == Some(true)
    }

    /// Waits for the end. Whether all was loaded.
    pub fn wait(&self) -> bool {
        let waited = self.changed.wait_while(self.progress(), |now| now.over.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).over == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_layer_is_waited_for_until_it_comes_or_will_not_come() {
        let loading = Loading::default();
        loading.reach(2);
        assert!(loading.wait_for(0) && loading.wait_for(1));
        std::thread::scope(|scope| {
            let [third, fourth, end] = [2, 3, 9].map(|layer| {
                let loading = &loading;
                scope.spawn(move || if layer < 9 { loading.wait_for(layer) } else { loading.wait() })
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!third.is_finished() && !fourth.is_finished() && !end.is_finished());
            loading.reach(3);
            assert!(third.join().unwrap());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!fourth.is_finished() && !end.is_finished());
            loading.end(false);
            assert!(!fourth.join().unwrap() && !end.join().unwrap());
        });
        assert!(loading.wait_for(2), "what came stays there");
        let whole = Loading::default();
        whole.end(true);
        assert!(whole.wait_for(30) && whole.wait());
    }
}
