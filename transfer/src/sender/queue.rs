//! A session's queue: how handoffs on any thread reach their session. It is the [`Line`] under a lock, with waiting for room.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use baton_handoff::{Core, Done, Line, Op, Quiet, TransferError, TransferLimits};
use baton_types::{Epoch, WorkerId};

use crate::threads::lock;
use crate::wake::Wake;

/// One session's queue.
pub(crate) struct Queue {
    line: Mutex<Line>,
    /// Signalled when blocks leave the queue or a handoff fails.
    room: Condvar,
    pub wake: Wake,
}

impl Queue {
    pub(crate) fn new(limits: TransferLimits) -> Result<Queue, TransferError> {
        Ok(Queue { line: Mutex::new(Line::new(limits)), room: Condvar::new(), wake: Wake::new()? })
    }

    /// Runs `act` on the line, then wakes writers that wait for room. `act` must hand out, not drop, whatever holds a callback: the lock
    /// is held.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Line) -> T) -> T {
        let answer = act(&mut lock(&self.line));
        self.room.notify_all();
        answer
    }

    /// Queues a handoff's first op.
    pub(crate) fn begin(&self, core: Arc<Core>) -> Result<(), TransferError> {
        lock(&self.line).begin(core)?;
        self.wake.ring();
        Ok(())
    }

    /// Queues a write. Waits for room, at most until `patience`. A stalled peer is waited for only once over all handoffs (I5), since the
    /// caller has other peers to serve.
    pub(crate) fn write(&self, core: &Core, op: Op, patience: Instant) -> Result<(), TransferError> {
        let blocks = op.blocks();
        let mut line = lock(&self.line);
        loop {
            let now = Instant::now();
            let Some(until) = line.room(core, blocks, patience, now)? else { break };
            line = self.room.wait_timeout(line, until - now).unwrap_or_else(PoisonError::into_inner).0;
        }
        line.write(op);
        drop(line);
        self.wake.ring();
        Ok(())
    }

    /// Queues a handoff's last op.
    pub(crate) fn complete(&self, epoch: Epoch, tail: Vec<u8>, done: Done) {
        match self.with(|line| line.complete(epoch, tail, done)) {
            Ok(()) => self.wake.ring(),
            Err((done, error)) => done.report(Err(error)),
        }
    }

    /// Ends a handoff ahead of everything queued. Its queued ops are dropped.
    pub(crate) fn abort(&self, epoch: Epoch, quiet: Quiet) {
        drop(self.with(|line| line.abort(epoch, quiet)));
        self.wake.ring();
    }

    /// Asks the session to end.
    pub(crate) fn stop(&self) {
        lock(&self.line).stop();
        self.wake.ring();
    }

    /// See [`Line::goes_on`]. If the session does not, it is woken, since it may end now.
    pub(crate) fn goes_on(&self, changes: bool, waits: bool) -> bool {
        let goes_on = lock(&self.line).goes_on(changes, waits);
        if !goes_on {
            self.wake.ring();
        }
        goes_on
    }

    pub(crate) fn is_stopped(&self) -> bool {
        lock(&self.line).is_stopped()
    }

    /// See [`Line::close_if_idle`]. The session is woken, to end.
    pub(crate) fn close_if_idle(&self, peer: WorkerId) -> bool {
        let closes = lock(&self.line).close_if_idle(peer);
        if closes {
            self.wake.ring();
        }
        closes
    }

    /// Why the session is to end now.
    pub(crate) fn is_over(&self) -> Option<TransferError> {
        lock(&self.line).is_over()
    }

    /// The session has ended: everything queued fails, and so does everything asked from now on.
    pub(crate) fn close(&self, error: TransferError) {
        let (ops, aborts) = self.with(|line| line.close(error.clone()));
        for op in ops {
            if let Op::Complete { done, .. } = op {
                done.report(Err(error.clone()));
            }
        }
        drop(aborts);
    }

    /// Whether the session has ended.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.line).closed().is_some()
    }

    /// Whether handoffs may begin.
    pub(crate) fn is_open(&self) -> bool {
        lock(&self.line).is_open()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use baton_handoff::{Descriptor, testing};
    use baton_types::{BlockId, WorkerId};

    use super::*;

    fn core(epoch: u64, deadline: Instant) -> Arc<Core> {
        Arc::new(Core::new(&Descriptor { epoch: Epoch(epoch), ..testing::target(4) }, deadline))
    }

    fn write(epoch: u64, blocks: u32) -> Op {
        let pairs = (0..blocks).map(|i| (BlockId(i), i)).collect();
        Op::Write { epoch: Epoch(epoch), group: 0, layer: 0, pairs, after: 0 }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn queue() -> Queue {
        Queue::new(TransferLimits { queued_blocks: 4, handoffs: 2, ..TransferLimits::default() }).unwrap()
    }

    #[test]
    fn a_full_queue_blocks_until_the_deadline_or_room() {
        let queue = queue();
        let past = core(1, Instant::now());
        queue.begin(past.clone()).unwrap();
        queue.write(&past, write(1, 3), soon()).unwrap();
        let error = queue.write(&past, write(1, 2), far()).unwrap_err();
        assert!(matches!(error, TransferError::Deadline { epoch: Epoch(1), .. }), "{error}");
        // I5: room made by another thread lets a waiting writer go on.
        let later = core(2, far());
        queue.begin(later.clone()).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| queue.write(&later, write(2, 2), far()));
            assert!(queue.with(|line| line.forget(Epoch(1))).is_none());
            assert_eq!(writer.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_stalled_peer_is_waited_for_once() {
        let limits = TransferLimits { queued_blocks: 4, ..TransferLimits::default() };
        let queue = Queue::new(limits).unwrap();
        let cores = [core(1, far()), core(2, far())];
        cores.iter().for_each(|core| queue.begin(core.clone()).unwrap());
        queue.write(&cores[0], write(1, 4), soon()).unwrap();
        let error = queue.write(&cores[0], write(1, 1), soon()).unwrap_err();
        assert!(matches!(error, TransferError::Stalled { epoch: Epoch(1), .. }), "{error}");
        assert!(lock(&queue.line).stalled);
        let error = queue.write(&cores[1], write(2, 1), soon()).unwrap_err();
        assert!(matches!(error, TransferError::Stalled { epoch: Epoch(2), .. }), "{error}");
        // The queue is unchanged. An abort makes room, but is no sign of life from the peer.
        drop(queue.with(|line| line.forget(Epoch(1))));
        queue.write(&cores[1], write(2, 4), soon()).unwrap();
        assert!(queue.write(&cores[1], write(2, 1), soon()).is_err());
        while queue.with(|line| line.next_if(|_| true)).is_some() {}
        assert!(!lock(&queue.line).stalled);
        queue.write(&cores[1], write(2, 4), soon()).unwrap();
    }

    #[test]
    fn handoffs_are_bounded_and_opened_once() {
        let queue = queue();
        let now = Instant::now();
        queue.begin(core(1, now)).unwrap();
        assert!(queue.begin(core(1, now)).unwrap_err().to_string().contains("written already"));
        queue.begin(core(2, now)).unwrap();
        assert!(matches!(queue.begin(core(3, now)), Err(TransferError::Limit { limit: 2, .. })));
        queue.with(|line| line.ended(Epoch(1)));
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
        drop(queue.with(|line| line.forget(Epoch(1))));
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
