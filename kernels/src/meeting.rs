//! [`Meeting`]: where threads of one process that compute one step together wait for each other.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A barrier that a rank can leave for good, for a reason `E`, which ends the wait of all others.
pub struct Meeting<E> {
    ranks: usize,
    state: Mutex<State<E>>,
    changed: Condvar,
}

struct State<E> {
    arrived: usize,
    /// Meetings so far.
    count: u64,
    failed: Option<E>,
}

impl<E: Clone> Meeting<E> {
    /// Of so many ranks.
    pub fn new(ranks: usize) -> Self {
        let state = Mutex::new(State { arrived: 0, count: 0, failed: None });
        Meeting { ranks, state, changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there were. All ranks that ask before they arrive at the next one are told the same.
    pub fn count(&self) -> u64 {
        self.lock().count
    }

    /// Returns when every rank has called it; at once with an error when one does not come any more (I5).
    ///
    /// # Errors
    /// Why another has left.
    pub fn meet(&self) -> Result<(), E> {
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.arrived += 1;
        if state.arrived == self.ranks {
            state.arrived = 0;
            state.count += 1;
            self.changed.notify_all();
            return Ok(());
        }
        let count = state.count;
        loop {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            match &state.failed {
                _ if state.count != count => return Ok(()),
                Some(error) => return Err(error.clone()),
                None => {}
            }
        }
    }

    /// A rank leaves. The first reason is kept: those that were told of it may give it again.
    pub fn abort(&self, why: &E) {
        self.lock().failed.get_or_insert_with(|| why.clone());
        self.changed.notify_all();
    }

    /// Ready for all ranks again, when none is here.
    pub fn reset(&self) {
        let mut state = self.lock();
        (state.arrived, state.failed) = (0, None);
    }
}
