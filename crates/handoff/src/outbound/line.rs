//! The ops that handoffs queue for their session, and whether the session takes more. Each handoff's ops keep their order; aborts
//! overtake them.
//!
//! Pure: no clock, no I/O, no threads. The sender keeps it under a lock; a simulation calls it directly.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use baton_types::{Epoch, WorkerId};

use super::core::Core;
use super::done::{Done, Quiet};
use super::op::Op;
use super::turns::Turns;
use crate::error::TransferError;
use crate::limits::TransferLimits;

/// The ops queued for one session.
pub struct Line {
    /// Handoffs to ask access for. They go before all ops, so that none waits for another handoff and each one's deadline is watched.
    begins: VecDeque<Arc<Core>>,
    ops: Turns,
    aborts: Vec<(Epoch, Quiet)>,
    /// Block writes in `ops`.
    blocks: usize,
    /// Handoffs begun and not over.
    live: BTreeSet<Epoch>,
    /// Live handoffs whose completion was queued: they will ask for nothing more.
    completed: BTreeSet<Epoch>,
    /// Why no more ops are taken; None while the session is not over.
    closed: Option<TransferError>,
    /// The session is to end now.
    stopped: bool,
    /// The session takes no new handoffs and ends with its last one. Another session waits for that.
    retired: bool,
    /// A write has waited for room in vain and no op has left since. Until one does, no other write waits.
    pub stalled: bool,
    /// Since when no handoff is under way, as far as [`Line::rest`] has seen.
    idle_since: Option<Instant>,
    limits: TransferLimits,
}

impl Line {
    /// An empty line.
    pub fn new(limits: TransferLimits) -> Line {
        Line {
            begins: VecDeque::new(),
            ops: Turns::default(),
            aborts: Vec::new(),
            blocks: 0,
            live: BTreeSet::new(),
            completed: BTreeSet::new(),
            closed: None,
            stopped: false,
            retired: false,
            stalled: false,
            idle_since: None,
            limits,
        }
    }

    /// True when no handoff is under way.
    pub fn idle(&self) -> bool {
        self.live.is_empty()
    }

    /// Why no more ops are taken; None while the session is not over.
    pub fn closed(&self) -> Option<&TransferError> {
        self.closed.as_ref()
    }

    /// Whether handoffs may begin.
    pub fn is_open(&self) -> bool {
        !self.retired && self.closed.is_none()
    }

    /// Whether a new handoff goes over this session. If not, it goes over a new session, which begins when this one has ended.
    ///
    /// `changes`: a new session would take another path. Then this session retires, unless it `waits` for the one before it: sessions are
    /// replaced one at a time.
    pub fn goes_on(&mut self, changes: bool, waits: bool) -> bool {
        if self.is_open() && !(changes && !waits && self.retire()) {
            return true;
        }
        // It may still be telling its peer that it has ended. The new session tells the peer as much.
        self.stopped |= self.closed.is_some();
        false
    }

    /// Lets no new handoff begin, and ends the session with its last one. Returns false, and changes nothing, while a handoff is not
    /// completed yet: that may take long, and the next session would wait for it.
    fn retire(&mut self) -> bool {
        self.retired |= self.live.len() == self.completed.len();
        self.retired
    }

    /// Whether it takes no new handoffs because another session takes its place.
    pub fn is_retired(&self) -> bool {
        self.retired
    }

    /// Takes no more handoffs, if none is under way: the session ends with this error. A new session takes the next handoff.
    pub fn close_if_idle(&mut self, peer: WorkerId) -> bool {
        let closes = self.is_open() && self.idle() && self.aborts.is_empty();
        if closes {
            self.closed = Some(TransferError::Idle { peer });
        }
        closes
    }

    /// Closes the session if it has been idle for as long as one may be. Otherwise returns when it will have been; None: it is in use. Call
    /// each time the session has something to do.
    pub fn rest(&mut self, peer: WorkerId, now: Instant) -> Option<Instant> {
        if !self.idle() {
            self.idle_since = None;
            return None;
        }
        let until = *self.idle_since.get_or_insert(now) + self.limits.idle;
        if until <= now {
            self.close_if_idle(peer);
        }
        Some(until)
    }

    /// Asks the session to end now.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Whether the session was asked to end now.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Why the session is to end now: it was asked to, or it is retired and no handoff is left, or it was idle.
    pub fn is_over(&self) -> Option<TransferError> {
        let over = self.stopped || self.retired && self.idle();
        self.closed.clone().or_else(|| over.then_some(TransferError::Closed))
    }

    /// Adds a handoff that begins.
    pub fn begin(&mut self, core: Arc<Core>) -> Result<(), TransferError> {
        if let Some(error) = &self.closed {
            return Err(error.clone());
        }
        if self.retired {
            return Err(TransferError::Closed);
        }
        if self.live.contains(&core.epoch) {
            return Err(TransferError::argument("target", format!("{} is being written already", core.epoch)));
        }
        if self.live.len() >= self.limits.handoffs {
            let (limit, asked) = (self.limits.handoffs as u64, self.live.len() as u64 + 1);
            return Err(TransferError::Limit { what: "handoffs to one worker", limit, asked });
        }
        self.live.insert(core.epoch);
        self.ops.begin(core.epoch, core.layers);
        self.begins.push_back(core);
        Ok(())
    }

    /// Whether a write of `blocks` blocks has room (I5). A write larger than the whole queue goes alone.
    pub fn has_room(&self, core: &Core, blocks: usize) -> Result<bool, TransferError> {
        match core.failure.get().or(self.closed.as_ref()) {
            Some(error) => Err(error.clone()),
            None => Ok(self.blocks == 0 || self.blocks + blocks <= self.limits.queued_blocks),
        }
    }

    /// Whether a write of `blocks` blocks has room now (None), or until when it waits for room. Ask again when room came free.
    ///
    /// It waits at most until `until` and its deadline. After a wait in vain, writes without room fail at once until an op leaves (I5).
    pub fn room(
        &mut self,
        core: &Core,
        blocks: usize,
        until: Instant,
        now: Instant,
    ) -> Result<Option<Instant>, TransferError> {
        if self.has_room(core, blocks)? {
            return Ok(None);
        }
        let (epoch, peer, doing) = (core.epoch, core.peer, "waiting for room in the queue");
        if core.deadline <= now {
            return Err(TransferError::Deadline { epoch, peer, doing });
        }
        self.stalled |= until <= now;
        if self.stalled {
            return Err(TransferError::Stalled { epoch, peer, doing, waited: self.limits.room });
        }
        Ok(Some(until.min(core.deadline)))
    }

    /// Queues a write for which there is room.
    pub fn write(&mut self, op: Op) {
        self.blocks += op.blocks();
        self.ops.push(op);
    }

    /// Queues a handoff's last op. `done` comes back with the reason when the session is over. The number of handoffs bounds these ops.
    pub fn complete(&mut self, epoch: Epoch, tail: Vec<u8>, done: Done) -> Result<(), (Done, TransferError)> {
        match self.closed.clone() {
            Some(error) => Err((done, error)),
            None => {
                if self.live.contains(&epoch) {
                    self.completed.insert(epoch);
                }
                self.ops.push(Op::Complete { epoch, tail, done });
                Ok(())
            }
        }
    }

    /// Ends a handoff before its turn and forgets what it queued. Returns its completion's callback, and `quiet` when the session is over.
    /// Drop both where no lock is held.
    pub fn abort(&mut self, epoch: Epoch, quiet: Quiet) -> (Option<Done>, Option<Quiet>) {
        if self.closed.is_some() {
            return (None, Some(quiet));
        }
        self.aborts.push((epoch, quiet));
        (self.forget(epoch), None)
    }

    /// Removes what a handoff queued; returns its completion's callback.
    pub fn forget(&mut self, epoch: Epoch) -> Option<Done> {
        let mut done = None;
        self.begins.retain(|core| core.epoch != epoch);
        for op in self.ops.forget(epoch) {
            self.blocks -= op.blocks();
            if let Op::Complete { done: callback, .. } = op {
                done = Some(callback);
            }
        }
        done
    }

    /// Takes the handoffs to end, oldest first.
    pub fn take_aborts(&mut self) -> Vec<(Epoch, Quiet)> {
        std::mem::take(&mut self.aborts)
    }

    /// Takes the handoffs whose deadline passed before access was asked for.
    pub(crate) fn take_late(&mut self, now: Instant) -> Vec<Arc<Core>> {
        let (late, others): (VecDeque<_>, _) =
            std::mem::take(&mut self.begins).into_iter().partition(|core| core.deadline <= now);
        self.begins = others;
        Vec::from(late)
    }

    /// The earliest deadline of the handoffs to ask access for.
    pub(crate) fn first_deadline(&self) -> Option<Instant> {
        self.begins.iter().map(|core| core.deadline).min()
    }

    /// Takes the oldest handoff to ask access for.
    pub fn next_begin(&mut self) -> Option<Arc<Core>> {
        self.begins.pop_front()
    }

    /// Takes the next op among those that `ready` accepts.
    pub fn next_if(&mut self, ready: impl Fn(&Op) -> bool) -> Option<Op> {
        let op = self.ops.next(ready)?;
        self.blocks -= op.blocks();
        self.stalled = false;
        Some(op)
    }

    /// Removes a handoff that is over.
    pub fn ended(&mut self, epoch: Epoch) {
        self.live.remove(&epoch);
        self.completed.remove(&epoch);
    }

    /// The session has ended: no more ops are taken. Returns what was queued, to be ended where no lock is held.
    pub fn close(&mut self, error: TransferError) -> (VecDeque<Op>, Vec<(Epoch, Quiet)>) {
        self.closed = Some(error);
        self.blocks = 0;
        self.live.clear();
        self.completed.clear();
        self.begins.clear();
        (self.ops.take(), std::mem::take(&mut self.aborts))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::core;

    fn line(handoffs: &[u64]) -> Line {
        let mut line = Line::new(TransferLimits::default());
        let deadline = Instant::now() + Duration::from_secs(60);
        handoffs.iter().for_each(|epoch| line.begin(core(Epoch(*epoch), deadline)).unwrap());
        line
    }

    fn complete(line: &mut Line, epoch: u64) {
        assert!(line.complete(Epoch(epoch), vec![], Done::new(Box::new(|_| {}))).is_ok());
    }

    /// A session that is to be replaced ends with its last handoff. It is not replaced while one is still being written.
    #[test]
    fn a_session_retires_when_all_it_carries_is_completed() {
        let mut line = line(&[1]);
        assert!(line.goes_on(false, false), "nothing changes");
        assert!(line.goes_on(true, false), "a handoff is still being written");
        complete(&mut line, 1);
        assert!(line.goes_on(true, true), "it waits for the session before it");
        assert!(!line.goes_on(true, false));
        assert!(line.is_retired() && !line.is_open() && line.is_over().is_none() && !line.is_stopped());
        assert_eq!(line.begin(core(Epoch(2), Instant::now())), Err(TransferError::Closed));
        line.ended(Epoch(1));
        assert_eq!(line.is_over(), Some(TransferError::Closed));
    }

    #[test]
    fn a_session_closes_when_it_has_been_idle_for_long() {
        let (peer, start) = (WorkerId(7), Instant::now());
        let mut line = line(&[1]);
        let idle = line.limits.idle;
        assert_eq!(line.rest(peer, start + 2 * idle), None, "it is in use");
        assert!(!line.close_if_idle(peer));
        line.ended(Epoch(1));
        let later = start + 3 * idle;
        assert_eq!(line.rest(peer, later), Some(later + idle));
        assert!(line.begin(core(Epoch(2), start)).is_ok() && line.rest(peer, later + idle).is_none());
        line.ended(Epoch(2));
        let last = later + 2 * idle;
        assert_eq!(line.rest(peer, last), Some(last + idle), "it was in use meanwhile");
        line.rest(peer, last + idle);
        let error = TransferError::Idle { peer };
        assert_eq!((line.is_over(), line.is_open()), (Some(error.clone()), false));
        assert_eq!(line.begin(core(Epoch(3), start)), Err(error));
        assert!(!line.goes_on(false, false));
    }

    #[test]
    fn a_session_that_has_ended_is_told_to_stop_when_another_takes_its_place() {
        let mut line = line(&[]);
        line.close(TransferError::Closed);
        assert!(!line.is_stopped(), "it tells its peer, however long that takes");
        assert!(!line.goes_on(false, false) && line.is_stopped());
    }
}
