//! What the disk has to do, reads first.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use baton_kv_store::{Buffer, Expect, Job, Place};

/// While reads wait, every so many reads one write has its turn, so that host memory does not fill up for ever.
const READS_PER_WRITE: u32 = 16;

/// Something for the disk to do.
#[derive(Debug)]
pub(crate) enum Work {
    Scan(u32),
    Read { job: Job, place: Place, into: Buffer, expect: Expect },
    Write { job: Job, place: Place, from: Buffer, head: Vec<u8> },
    Sync,
}

impl Work {
    fn writes(&self) -> bool {
        matches!(self, Work::Write { .. } | Work::Sync)
    }
}

#[derive(Debug, Default)]
struct State {
    reads: VecDeque<Work>,
    writes: VecDeque<Work>,
    /// Reads and writes that are carried out now.
    reading: usize,
    writing: usize,
    /// Reads carried out since the last write, while a write waited.
    passed: u32,
    stopped: bool,
    threads: usize,
}

/// Two queues, bounded by the core's limits of what is in flight.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    threads: usize,
}

impl Queue {
    pub fn new(threads: usize) -> Queue {
        let state = State { threads, ..State::default() };
        Queue { state: Mutex::new(state), changed: Condvar::new(), threads }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, work: Work) {
        let mut state = self.state();
        match work.writes() {
            true => state.writes.push_back(work),
            false => state.reads.push_back(work),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// The next work; waits for it. None: the queue is stopped.
    pub fn next(&self) -> Option<Work> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(work) = self.take(&mut state) {
                return Some(work);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn take(&self, state: &mut State) -> Option<Work> {
        // One thread is always there for reads, if there are two; while there are reads, half of them are.
        let reads = state.reading > 0 || !state.reads.is_empty();
        let most = if reads { self.threads / 2 } else { self.threads.saturating_sub(1) };
        let may_write = !state.writes.is_empty() && state.writing < most.max(1);
        let due = state.passed >= READS_PER_WRITE;
        if may_write && (state.reads.is_empty() || due) {
            (state.passed, state.writing) = (0, state.writing + 1);
            return state.writes.pop_front();
        }
        let work = state.reads.pop_front()?;
        state.reading += 1;
        state.passed = if state.writes.is_empty() { 0 } else { state.passed.saturating_add(1) };
        Some(work)
    }

    /// Work that was taken is done.
    pub fn done(&self, wrote: bool) {
        let mut state = self.state();
        match wrote {
            true => state.writing -= 1,
            false => state.reading -= 1,
        }
        let more = !state.writes.is_empty();
        drop(state);
        if more {
            self.changed.notify_one();
        }
    }

    /// Ends all threads, each after what it is doing now. What waits is dropped.
    pub fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.reads.clear();
        state.writes.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// A thread has ended.
    pub fn left(&self) {
        self.state().threads -= 1;
        self.changed.notify_all();
    }

    /// Waits until all threads have ended. False: some have not within `limit`.
    pub fn wait_all_left(&self, limit: std::time::Duration) -> bool {
        let state = self.state();
        let waited = self.changed.wait_timeout_while(state, limit, |state| state.threads > 0);
        waited.map_or_else(|error| error.into_inner().0.threads == 0, |(state, _)| state.threads == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write() -> Work {
        let place = Place { segment: 0, index: 0, generation: 1 };
        Work::Write { job: 1, place, from: Buffer(0), head: Vec::new() }
    }

    fn order(queue: &Queue, count: usize) -> String {
        let next = || match queue.take(&mut queue.state()) {
            Some(work) if work.writes() => 'w',
            Some(_) => 'r',
            None => '-',
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn reads_go_first_and_writes_are_never_forgotten() {
        let queue = Queue::new(8);
        (0..2).for_each(|_| queue.push(write()));
        (0..40).for_each(|at| queue.push(Work::Scan(at)));
        let reads = "r".repeat(16);
        assert_eq!(order(&queue, 35), format!("{reads}w{reads}wr"));
        assert_eq!(order(&queue, 8), "rrrrrrr-");
    }

    #[test]
    fn writes_leave_threads_to_reads() {
        let queue = Queue::new(4);
        (0..5).for_each(|_| queue.push(write()));
        assert_eq!(order(&queue, 4), "www-");
        queue.push(Work::Scan(0));
        assert_eq!(order(&queue, 2), "r-");
        queue.done(true);
        assert_eq!(order(&queue, 1), "-", "two threads are for reads while there are any");
        queue.done(true);
        assert_eq!(order(&queue, 2), "w-");
        queue.done(false);
        assert_eq!(order(&queue, 2), "w-");
    }
}
