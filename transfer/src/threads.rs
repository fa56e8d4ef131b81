//! The crate's own threads. They are named, pinned to CPUs, and marked, so that none of them waits for itself.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::cpus::Cpus;
use baton_handoff::TransferError;

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of this crate on these CPUs.
pub(crate) fn spawn(
    name: String,
    cpus: &Cpus,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, TransferError> {
    let cpus = cpus.clone();
    let body = move || {
        cpus.pin();
        OURS.set(true);
        run();
    };
    std::thread::Builder::new().name(name).spawn(body).map_err(|e| TransferError::os("start a thread", e))
}

/// A thread that several others wait for.
pub(crate) struct Thread(Mutex<Option<JoinHandle<()>>>);

impl Thread {
    /// A thread that runs.
    pub fn new(handle: JoinHandle<()>) -> Thread {
        Thread(Mutex::new(Some(handle)))
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        // Who holds the lock waits for it.
        self.0.try_lock().is_ok_and(|handle| handle.as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// Waits until it has ended.
    pub fn wait(&self) {
        // The lock is held meanwhile, so that nobody else takes the thread for ended.
        let mut handle = lock(&self.0);
        if handle.take().is_some_and(|handle| handle.join().is_err()) {
            tracing::error!("a transfer thread panicked");
        }
    }

    /// As [`Thread::wait`], unless called on a thread of this crate, as from a callback: that may be the very thread to wait for.
    pub fn join(&self) {
        if !OURS.get() {
            self.wait();
        }
    }
}

/// Waits for a thread to end, with the exception of [`Thread::join`].
pub(crate) fn join(handle: JoinHandle<()>) {
    Thread::new(handle).join();
}

/// Locks, even after a panic elsewhere: every update under these locks is complete before anything can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
