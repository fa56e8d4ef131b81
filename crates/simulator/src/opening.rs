//! How a worker opens handoffs, and what must hold of their ends (I5, delivery).

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::{Core, Descriptor, FAREWELL, TransferError, Writes};
use baton_roles::prefill::{Target, check_target};
use baton_types::{BatonError, Epoch, ErrorKind, SeqId, WorkerId};

use crate::Violation;
use crate::ends::Told;
use crate::events::{Event, Process, Serial};
use crate::stream::Micros;
use crate::world::World;

/// How much later than its bound a handoff may end: the layers of a running step may wait for room at very slow peers.
const SLACK: Micros = 1_500_000;

/// Longest time from a completion to its outcome without faults: more than twice what it takes.
const ANSWER: Micros = 600_000;

/// One handoff.
pub(crate) struct Handoff {
    pub writes: Writes,
    pub peer: WorkerId,
    pub to: Process,
    /// The session it was begun at.
    pub session: Serial,
    pub seq: Option<SeqId>,
    /// The sequence is a prefix that is served, not a request.
    pub prefix: bool,
    /// Its completion or abort has been requested; so its owner is told of one end only.
    pub ended: bool,
    /// Its blocks are in quarantine until it ends.
    pub quarantined: bool,
    /// When it was completed.
    pub completed: Option<Micros>,
    /// Earliest world time at which its deadline may pass, whatever the clocks show.
    pub due: Micros,
}

impl Handoff {
    pub(crate) fn epoch(&self) -> Epoch {
        self.writes.core().epoch
    }

    /// Why it failed, if it has.
    pub(crate) fn failed(&self) -> Option<TransferError> {
        self.writes.core().failure().cloned()
    }
}

/// What is needed to open a request's handoff once its target is known.
#[derive(Clone, Copy)]
pub(crate) struct Aim {
    /// Tokens of the sequence.
    tokens: usize,
    pub deadline: Instant,
    /// Earliest world time at which the deadline may pass, whatever the clocks show, and when the handoff must have ended.
    due: Micros,
    pub ends: Micros,
}

impl World {
    /// For a handoff of so many tokens that has so much time.
    pub(crate) fn aim(&self, here: Process, time: Duration, tokens: usize) -> Aim {
        let left = time.as_micros() as Micros;
        Aim {
            tokens,
            deadline: self.clock_now(here) + time,
            due: self.now + left.saturating_sub(self.by_any_clock(left) - left),
            ends: self.now + self.by_any_clock(left + self.bound()),
        }
    }

    /// Opens the handoff into a target. Returns its number.
    pub(crate) fn open_handoff(
        &mut self,
        here: Process,
        aim: Aim,
        target: &[u8],
    ) -> Result<(u64, Target), (ErrorKind, String)> {
        let refused = |error: &dyn BatonError| (error.kind(), error.to_string());
        let Aim { tokens, deadline, due, ends } = aim;
        let layout = self.geometry.layout.clone();
        let target = Descriptor::parse(target, &layout, false).map_err(|e| refused(&e))?;
        let to = self.process_at(&target.address).filter(|to| self.receivers.has(*to));
        let to = to.ok_or_else(|| (ErrorKind::InvalidArgument, "nobody takes KV there".to_owned()))?;
        let sender = &self.senders[here];
        let writes = Writes::new(&target, sender.id, &sender.memory.geometry, &self.limits, deadline);
        let writes = writes.map_err(|e| refused(&e))?;
        let session = self.begin(here, to, target.worker, writes.core()).map_err(|e| refused(&e))?;
        let sender = &mut self.senders[here];
        sender.next += 1;
        let (id, life) = (sender.next, sender.life);
        let (seq, prefix, ended, quarantined) = (None, false, false, false);
        sender.handoffs.insert(
            id,
            Handoff { writes, peer: target.worker, to, session, seq, prefix, ended, quarantined, completed: None, due },
        );
        let ends = ends.max(self.now + self.bound());
        self.events.plan(ends, Event::MustHaveEnded { process: here, life, handoff: id });
        if let Err(error) = check_target(&layout, target.tokens, &target.first, &target.counts, tokens) {
            self.abort_handoff(here, id, false);
            return Err(refused(&error));
        }
        self.wake_sender(here, session);
        Ok((id, Target { tokens: target.tokens, first: target.first }))
    }

    /// Longest time from a handoff's deadline to its end, whatever its session is doing: connecting, ending, or telling the peer so.
    fn bound(&self) -> Micros {
        self.handshake() + FAREWELL.as_micros() as Micros + SLACK
    }

    /// I5: a handoff's end must have been reported by now. For a frozen worker the bound counts from the end of the freeze.
    pub(crate) fn must_have_ended(&mut self, here: Process, handoff: u64) -> Result<(), Violation> {
        let sender = &self.senders[here];
        let Some(late) = sender.handoffs.get(&handoff) else { return Ok(()) };
        let again = self.thawed_at(here) + self.bound();
        if self.now >= again {
            let what = format!("{here}: {} has not ended in time, failed {:?}", late.epoch(), late.failed());
            return Err(self.violation("I5", what));
        }
        self.events.plan(again, Event::MustHaveEnded { process: here, life: sender.life, handoff });
        Ok(())
    }

    /// I5: a handoff that fails because of its deadline must have reached it.
    pub(crate) fn check_due(&self, handoff: &Handoff, told: &Told) -> Result<(), Violation> {
        let early = matches!(told, Told::Done(Err(TransferError::Deadline { .. }))) && self.now < handoff.due;
        match early {
            true => Err(self
                .violation("I5", format!("{} is given up {} µs too early", handoff.epoch(), handoff.due - self.now))),
            false => Ok(()),
        }
    }

    /// Without faults, a completed handoff is soon verified.
    pub(crate) fn check_delivery(&self, handoff: &Handoff, told: &Told) -> Result<(), Violation> {
        let Some(completed) = handoff.completed.filter(|_| self.options.calm) else { return Ok(()) };
        let failed = match told {
            Told::Done(Err(error)) => !matches!(error.cause(), "withdrawn" | "deadline" | "refused"),
            _ => false,
        };
        if failed || self.now > completed + ANSWER {
            let waited = self.now - completed;
            let what = format!("{} is told {told:?} {waited} µs after it is complete", handoff.epoch());
            return Err(self.violation("delivery", what));
        }
        Ok(())
    }

    /// Begins a handoff at the session to a worker.
    fn begin(&mut self, here: Process, to: Process, peer: WorkerId, core: &Arc<Core>) -> Result<Serial, TransferError> {
        let serial = self.session_to(here, to, peer);
        match self.senders[here].sessions.get_mut(&serial) {
            Some(session) => session.line.begin(core.clone()).map(|()| serial),
            None => Err(TransferError::Closed),
        }
    }
}
