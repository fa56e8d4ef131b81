//! What handoffs ask of their session's thread: a bounded queue, and aborts that overtake it.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use baton_types::{BlockId, Epoch, WorkerId};

use super::{OnDone, TransferStats};
use crate::error::TransferError;
use crate::options::Limits;
use crate::threads::lock;
use crate::wake::Wake;

/// What a handoff and its session both know.
#[derive(Debug)]
pub(crate) struct Core {
    pub epoch: Epoch,
    pub key: u64,
    pub peer: WorkerId,
    pub deadline: Instant,
    /// Blocks of the reservation per group.
    pub counts: Vec<u32>,
    /// Why it failed, once it has.
    pub failure: OnceLock<TransferError>,
}

/// A completion's callback. Called exactly once, if need be by being dropped.
pub(crate) struct Done(Option<OnDone>);

impl Done {
    pub(crate) fn new(callback: OnDone) -> Done {
        Done(Some(callback))
    }

    pub(crate) fn report(mut self, outcome: Result<TransferStats, TransferError>) {
        if let Some(callback) = self.0.take() {
            callback(outcome);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(TransferError::Closed));
        }
    }
}

/// Called once nothing reads a handoff's local blocks any more, if need be by being dropped.
pub(crate) struct Quiet(pub Option<Box<dyn FnOnce() + Send>>);

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback();
        }
    }
}

/// One request of a handoff, in its order.
pub(crate) enum Op {
    Begin(Arc<Core>),
    Write { epoch: Epoch, group: usize, layer: usize, pairs: Vec<(BlockId, u32)> },
    Complete { epoch: Epoch, tail: Vec<u8>, done: Done },
}

impl Op {
    pub(crate) fn epoch(&self) -> Epoch {
        match self {
            Op::Begin(core) => core.epoch,
            Op::Write { epoch, .. } | Op::Complete { epoch, .. } => *epoch,
        }
    }

    fn blocks(&self) -> usize {
        if let Op::Write { pairs, .. } = self { pairs.len() } else { 0 }
    }
}

#[derive(Default)]
struct Inner {
    ops: VecDeque<Op>,
    aborts: Vec<(Epoch, Quiet)>,
    /// Block writes in `ops`.
    blocks: usize,
    /// Handoffs begun and not over.
    live: HashSet<Epoch>,
    /// No more ops, and why.
    closed: Option<TransferError>,
    stopped: bool,
    /// A write has waited in vain and nothing has left since: no other waits too.
    stalled: bool,
}

/// One session's queue.
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    /// Signalled when blocks leave the queue or a handoff fails.
    room: Condvar,
    pub wake: Wake,
    limits: Limits,
}

impl Queue {
    pub(crate) fn new(limits: Limits) -> Result<Queue, TransferError> {
        Ok(Queue { inner: Mutex::default(), room: Condvar::new(), wake: Wake::new()?, limits })
    }

    /// True when no handoff is under way.
    pub(crate) fn idle(&self) -> bool {
        lock(&self.inner).live.is_empty()
    }

    /// Queues a handoff's first op.
    pub(crate) fn begin(&self, core: Arc<Core>) -> Result<(), TransferError> {
        let mut inner = lock(&self.inner);
        if let Some(error) = &inner.closed {
            return Err(error.clone());
        }
        if inner.live.contains(&core.epoch) {
            return Err(TransferError::argument("target", format!("{} is being written already", core.epoch)));
        }
        if inner.live.len() >= self.limits.handoffs {
            let (limit, asked) = (self.limits.handoffs as u64, inner.live.len() as u64 + 1);
            return Err(TransferError::Limit { what: "handoffs to one worker", limit, asked });
        }
        inner.live.insert(core.epoch);
        inner.ops.push_back(Op::Begin(core));
        drop(inner);
        self.wake.ring();
        Ok(())
    }

    /// Queues a write. Waits for room for a short while, and while the peer does not move only once for all handoffs
    /// (I5): the caller has others to serve.
    pub(crate) fn write(&self, core: &Core, op: Op) -> Result<(), TransferError> {
        let (blocks, patience) = (op.blocks(), Instant::now() + self.limits.room);
        let mut inner = lock(&self.inner);
        loop {
            if let Some(error) = core.failure.get().or(inner.closed.as_ref()) {
                return Err(error.clone());
            }
            // A write larger than the whole queue goes alone.
            if inner.blocks == 0 || inner.blocks + blocks <= self.limits.queued_blocks {
                break;
            }
            let (epoch, peer, doing, now) = (core.epoch, core.peer, "waiting for room in the queue", Instant::now());
            if core.deadline <= now {
                return Err(TransferError::Deadline { epoch, peer, doing });
            }
            inner.stalled |= patience <= now;
            if inner.stalled {
                return Err(TransferError::Stalled { epoch, peer, doing, waited: self.limits.room });
            }
            let left = patience.min(core.deadline) - now;
            inner = self.room.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.blocks += blocks;
        inner.ops.push_back(op);
        drop(inner);
        self.wake.ring();
        Ok(())
    }

    /// Queues a handoff's last op. The number of handoffs bounds these.
    pub(crate) fn complete(&self, epoch: Epoch, tail: Vec<u8>, done: Done) {
        let mut inner = lock(&self.inner);
        if let Some(error) = inner.closed.clone() {
            drop(inner);
            return done.report(Err(error));
        }
        inner.ops.push_back(Op::Complete { epoch, tail, done });
        drop(inner);
        self.wake.ring();
    }

    /// Ends a handoff before its turn. What it queued is forgotten.
    pub(crate) fn abort(&self, epoch: Epoch, quiet: Quiet) {
        let mut inner = lock(&self.inner);
        if inner.closed.is_some() {
            drop(inner);
            return drop(quiet);
        }
        inner.aborts.push((epoch, quiet));
        drop(inner);
        self.forget(epoch);
        self.wake.ring();
    }

    /// Removes what a handoff queued; answers its completion's callback.
    pub(crate) fn forget(&self, epoch: Epoch) -> Option<Done> {
        let mut done = None;
        let mut inner = lock(&self.inner);
        for op in std::mem::take(&mut inner.ops) {
            match op {
                Op::Complete { done: callback, epoch: of, .. } if of == epoch => done = Some(callback),
                op if op.epoch() == epoch => inner.blocks -= op.blocks(),
                op => inner.ops.push_back(op),
            }
        }
        drop(inner);
        self.room.notify_all();
        done
    }

    /// Handoffs to end, oldest first.
    pub(crate) fn take_aborts(&self) -> Vec<(Epoch, Quiet)> {
        std::mem::take(&mut lock(&self.inner).aborts)
    }

    /// The oldest op, if `ready` says that its time has come.
    pub(crate) fn next_if(&self, ready: impl FnOnce(&Op) -> bool) -> Option<Op> {
        let mut inner = lock(&self.inner);
        if !inner.ops.front().is_some_and(ready) {
            return None;
        }
        let op = inner.ops.pop_front()?;
        inner.blocks -= op.blocks();
        inner.stalled = false;
        drop(inner);
        self.room.notify_all();
        Some(op)
    }

    /// A handoff is over.
    pub(crate) fn retire(&self, epoch: Epoch) {
        lock(&self.inner).live.remove(&epoch);
    }

    /// Asks the session to end.
    pub(crate) fn stop(&self) {
        lock(&self.inner).stopped = true;
        self.wake.ring();
    }

    pub(crate) fn stopped(&self) -> bool {
        lock(&self.inner).stopped
    }

    /// The session has ended: everything queued fails, and so does everything asked from now on.
    pub(crate) fn close(&self, error: TransferError) {
        let (ops, aborts) = {
            let mut inner = lock(&self.inner);
            inner.closed = Some(error.clone());
            inner.blocks = 0;
            inner.live.clear();
            (std::mem::take(&mut inner.ops), std::mem::take(&mut inner.aborts))
        };
        self.room.notify_all();
        for op in ops {
            if let Op::Complete { done, .. } = op {
                done.report(Err(error.clone()));
            }
        }
        drop(aborts);
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.inner).closed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn core(epoch: u64, deadline: Instant) -> Arc<Core> {
        let (epoch, failure) = (Epoch(epoch), OnceLock::new());
        Arc::new(Core { epoch, key: 0, peer: WorkerId(1), deadline, counts: vec![4], failure })
    }

    fn write(epoch: u64, blocks: u32) -> Op {
        let pairs = (0..blocks).map(|i| (BlockId(i), i)).collect();
        Op::Write { epoch: Epoch(epoch), group: 0, layer: 0, pairs }
    }

    fn queue() -> Queue {
        Queue::new(Limits { queued_blocks: 4, handoffs: 2, ..Limits::default() }).unwrap()
    }

    #[test]
    fn a_full_queue_blocks_until_the_deadline_or_room() {
        let queue = queue();
        let past = core(1, Instant::now());
        queue.begin(past.clone()).unwrap();
        queue.write(&past, write(1, 3)).unwrap();
        let error = queue.write(&past, write(1, 2)).unwrap_err();
        assert!(matches!(error, TransferError::Deadline { epoch: Epoch(1), .. }), "{error}");
        // I5: room made by another thread lets a waiting writer go on.
        let later = core(2, Instant::now() + Duration::from_secs(60));
        queue.begin(later.clone()).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| queue.write(&later, write(2, 2)));
            assert!(queue.forget(Epoch(1)).is_none());
            assert_eq!(writer.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_stalled_peer_is_waited_for_once() {
        let limits = Limits { queued_blocks: 4, room: Duration::from_millis(20), ..Limits::default() };
        let queue = Queue::new(limits).unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        let cores = [core(1, far), core(2, far)];
        cores.iter().for_each(|core| queue.begin(core.clone()).unwrap());
        queue.write(&cores[0], write(1, 4)).unwrap();
        let error = queue.write(&cores[0], write(1, 1)).unwrap_err();
        assert!(matches!(error, TransferError::Stalled { epoch: Epoch(1), .. }), "{error}");
        assert!(lock(&queue.inner).stalled);
        let error = queue.write(&cores[1], write(2, 1)).unwrap_err();
        assert!(matches!(error, TransferError::Stalled { epoch: Epoch(2), .. }), "{error}");
        // What was queued is as it was, and room made by an abort is room, though not yet a sign of life.
        drop(queue.forget(Epoch(1)));
        queue.write(&cores[1], write(2, 4)).unwrap();
        assert!(queue.write(&cores[1], write(2, 1)).is_err());
        while queue.next_if(|_| true).is_some() {}
        assert!(!lock(&queue.inner).stalled);
        queue.write(&cores[1], write(2, 4)).unwrap();
    }

    #[test]
    fn handoffs_are_bounded_and_opened_once() {
        let queue = queue();
        let now = Instant::now();
        queue.begin(core(1, now)).unwrap();
        assert!(queue.begin(core(1, now)).unwrap_err().to_string().contains("written already"));
        queue.begin(core(2, now)).unwrap();
        assert!(matches!(queue.begin(core(3, now)), Err(TransferError::Limit { limit: 2, .. })));
        queue.retire(Epoch(1));
        queue.begin(core(3, now)).unwrap();
    }

    #[test]
    fn every_completion_is_reported_once_whatever_ends_it() {
        let (tell, told) = mpsc::channel();
        let done = |n: u32| {
            let tell = tell.clone();
            Done::new(Box::new(move |outcome| tell.send((n, outcome.unwrap_err())).unwrap()))
        };
        let queue = queue();
        drop(done(0));
        queue.complete(Epoch(1), vec![], done(1));
        queue.complete(Epoch(2), vec![], done(2));
        drop(queue.forget(Epoch(1)));
        let lost = TransferError::PeerLost { peer: WorkerId(1), cause: "test".into() };
        queue.close(lost.clone());
        queue.complete(Epoch(3), vec![], done(3));
        drop(queue);
        drop(tell);
        let closed = TransferError::Closed;
        let want = [(0, closed.clone()), (1, closed), (2, lost.clone()), (3, lost)];
        assert_eq!(told.into_iter().collect::<Vec<_>>(), want);
    }
}
