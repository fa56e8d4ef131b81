//! The session to one decode worker, without its sockets: asks for access, digests what is copied, completes, stops at once when fenced,
//! and reports.
//!
//! Pure: the caller feeds it frames and hands its batches to a transport. After every call, [`Outbound::take_effects`] says what to do, in
//! order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use baton_types::{BlockId, Epoch};

use super::active::{Active, Writing};
use super::done::{Done, Quiet, TransferStats};
use super::line::Line;
use super::op::Op;
use super::terms::{Parties, Pools, SessionTimeouts};
use crate::batch::WriteBatch;
use crate::codec::Malformed;
use crate::error::TransferError;
use crate::limits::{TransferLimits, TransportKind};
use crate::memory::PoolMemory;
use crate::pulse::Pulse;
use crate::state::{Action, Input, State};
use crate::wire::{Frame, Refusal};

/// Most answers that a peer may owe for handoffs that were given up. Once it owes so many, no access is asked for (I5).
const MOST_OWED: usize = 1024;

/// What the caller must do for a session's handoffs.
pub enum Effect {
    /// Cancel this handoff's batches that the transport has. From then on the local pool is not read for it.
    Cancel(Epoch),
    /// Send this frame.
    Send(Frame),
    /// Report a handoff's outcome.
    Report(Done, Result<TransferStats, TransferError>),
    /// Report that nothing reads a handoff's local blocks any more.
    Hush(Quiet),
}

/// The session's handoffs and the write under way.
pub struct Outbound {
    parties: Parties,
    timeouts: SessionTimeouts,
    pools: Pools,
    active: BTreeMap<Epoch, Active>,
    /// The write being copied.
    writing: Option<Writing>,
    /// Batches that the transport has not flushed, oldest first: (epoch, layer group).
    in_flight: VecDeque<(Epoch, usize)>,
    effects: Vec<Effect>,
    /// Handoffs given up whose answer to [`Frame::Begin`] is still to come. That answer must not be taken for one to a later handoff under
    /// the same epoch.
    owed: BTreeSet<Epoch>,
    /// When the peer was last heard from.
    heard: Option<Instant>,
    pulse: Pulse,
}

impl Outbound {
    /// A session with nothing under way.
    pub fn new(parties: Parties, pools: Pools, limits: &TransferLimits) -> Outbound {
        let TransferLimits { handshake: grant, silence, heartbeat, .. } = *limits;
        Outbound {
            parties,
            timeouts: SessionTimeouts { grant, silence },
            pools,
            active: BTreeMap::new(),
            writing: None,
            in_flight: VecDeque::new(),
            effects: Vec::new(),
            owed: BTreeSet::new(),
            heard: None,
            pulse: Pulse::new(heartbeat),
        }
    }

    /// The session is open: from now on handoffs are written between these pools. Before, they only [wait](Outbound::wait_for_session).
    pub fn reaches(&mut self, pools: Pools) {
        self.pools = pools;
    }

    /// To be called while there is no session. Ends the handoffs that are late or given up, of which the peer knows nothing. Returns the
    /// next handoff's deadline.
    pub fn wait_for_session(&mut self, now: Instant, line: &mut Line) -> Option<Instant> {
        line.take_aborts().into_iter().for_each(|(epoch, quiet)| self.abort(epoch, quiet, now, line));
        for core in line.take_late(now) {
            let (epoch, peer, doing) = (core.epoch, core.peer, "waiting for a session with it");
            self.active.insert(epoch, Active::new(core, now));
            self.end(epoch, Input::Refute, TransferError::Deadline { epoch, peer, doing }, now, line);
        }
        // Ops that their owners queue before they learn of the end.
        while let Some(op) = line.next_if(|op| self.active.contains_key(&op.epoch())) {
            if let Op::Complete { epoch, tail, done } = op {
                self.complete(epoch, tail, done, (now, line));
            }
        }
        line.first_deadline()
    }

    /// Notes that anything at all arrived from the peer.
    pub fn heard(&mut self, now: Instant) {
        self.heard = Some(now);
    }

    /// While a handoff is under way, sends a heartbeat if nothing else was sent for that long. `may_say` is false while something has yet
    /// to leave. Returns when to ask again; None when no handoff is under way.
    pub fn beat(&mut self, now: Instant, may_say: bool) -> Option<Instant> {
        if !self.active.values().any(Active::is_running) {
            return None;
        }
        let (beats, next) = self.pulse.beat(now, may_say);
        self.effects.extend(beats.then_some(Effect::Send(Frame::Beat)));
        Some(next)
    }

    /// Takes what is to be done since the last call, in order.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        let effects = std::mem::take(&mut self.effects);
        if effects.iter().any(|effect| matches!(effect, Effect::Send(_))) {
            self.pulse.speaks();
        }
        effects
    }

    /// Batches handed to the transport that are neither flushed nor cancelled.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The oldest batch is flushed. A transport that digests passes (block's position, digest) for each run; others pass nothing.
    pub fn flushed(&mut self, digests: Vec<(u32, u64)>) {
        if let Some((epoch, group)) = self.in_flight.pop_front()
            && let Some(active) = self.active.get_mut(&epoch)
        {
            digests.into_iter().for_each(|(index, digest)| active.add_digest(group, index, digest));
        }
    }

    /// Whether the peer owes an answer that a healthy peer gives at once: access or an outcome.
    pub fn awaits_answer(&self) -> bool {
        self.active.values().any(|active| active.state == State::Reserved || active.done.is_some())
    }

    /// Whether the peer owes an outcome.
    pub fn awaits_outcome(&self) -> bool {
        self.active.values().any(|active| active.done.is_some())
    }

    /// Handles a frame from the peer. `kind` is the transport that carries blocks. An error ends the session.
    pub fn frame(
        &mut self,
        frame: Frame,
        kind: TransportKind,
        now: Instant,
        line: &mut Line,
    ) -> Result<(), TransferError> {
        if let Frame::Granted { epoch, .. } | Frame::Failed { epoch, .. } = &frame
            && self.owed.remove(epoch)
        {
            return Ok(());
        }
        match frame {
            Frame::Granted { epoch, blocks } => self.granted(epoch, blocks, kind, now),
            Frame::Verified { epoch } => self.verified(epoch, kind, now, line),
            Frame::Failed { epoch, refusal } => {
                let error = self.refused(epoch, refusal);
                self.end(epoch, Input::Refute, error, now, line);
                Ok(())
            }
            Frame::Fence { epoch } => {
                let peer = self.parties.peer;
                self.end(epoch, Input::Fenced, TransferError::Fenced { epoch, peer }, now, line);
                // I3: from here on nothing is copied under this epoch, whether this end knows it or not.
                self.say(Frame::FenceAck { epoch });
                Ok(())
            }
            Frame::Beat => Ok(()),
            other => Err(self.broken("kind", format!("{other:?} is not for a prefill worker"))),
        }
    }

    /// Ends a handoff that its owner has given up.
    pub fn abort(&mut self, epoch: Epoch, quiet: Quiet, now: Instant, line: &mut Line) {
        self.end(epoch, Input::Abort, TransferError::Aborted { epoch }, now, line);
        self.bury(epoch, line);
        self.effects.push(Effect::Hush(quiet));
    }

    /// Asks for access for handoffs that begin, whatever is being copied, so that each one's deadline is watched.
    fn take_up(&mut self, now: Instant, line: &mut Line) {
        while let Some(core) = line.next_begin() {
            let (epoch, key) = (core.epoch, core.key);
            let begun = !self.owed.contains(&epoch) && self.owed.len() < MOST_OWED;
            let mut active = Active::new(core, now);
            active.begun = begun;
            self.active.insert(epoch, active);
            match begun {
                true => self.say(Frame::Begin { epoch, key }),
                // I3: the answer owed to a handoff that was given up may grant blocks that are free again; it must not be taken for this
                // one's.
                false => {
                    let reason = "it has yet to answer what was asked for before and given up".to_owned();
                    let error = TransferError::Refused { epoch, peer: self.parties.peer, reason };
                    self.end(epoch, Input::Refute, error, now, line);
                }
            }
        }
    }

    /// Takes up handoffs that begin and ends those that are late. Returns when the next one will be late.
    pub fn expire(&mut self, now: Instant, line: &mut Line) -> Option<Instant> {
        self.take_up(now, line);
        let (timeouts, heard) = (self.timeouts, self.heard);
        let late = self.active.values().filter(|a| a.is_running() && a.due(&timeouts, heard) <= now);
        for (epoch, error) in late.map(|a| (a.core.epoch, a.late(now, &timeouts))).collect::<Vec<_>>() {
            self.end(epoch, Input::Expire, error, now, line);
        }
        self.active.values().filter(|a| a.is_running()).map(|a| a.due(&timeouts, heard)).min()
    }

    /// The next batch of the write under way, to be handed to the transport. None when no write is under way.
    ///
    /// `memory` is the local pool, to be digested here. Without it the transport digests what it reads and passes the digests to
    /// [`Outbound::flushed`]. A handoff's blocks do not change before its outcome is reported.
    pub fn next_batch(
        &mut self,
        memory: Option<&mut dyn PoolMemory>,
        now: Instant,
    ) -> Result<Option<WriteBatch>, TransferError> {
        let Some(mut writing) = self.writing.take_if(|w| !w.is_done()) else {
            self.writing = None;
            return Ok(None);
        };
        let Some(active) = self.active.get_mut(&writing.epoch) else { return Ok(None) };
        if active.step(Input::Write, now) != Action::Apply {
            return Ok(None);
        }
        let verify = self.pools.verify;
        let batch = writing.next_batch(&self.pools, active);
        let mut batch = batch.ok_or_else(|| TransferError::argument("index", "it was not reserved"))?;
        batch.digest = verify && memory.is_none();
        if let Some(memory) = memory.filter(|_| verify) {
            let parts: Vec<_> = batch.runs().map(|run| (run.source, run.lane)).collect();
            for (write, digest) in batch.writes.iter().zip(memory.digests(&parts, batch.len)?) {
                active.add_digest(batch.group, write.index, digest);
            }
        }
        active.bytes += batch.bytes() as u64;
        active.writes += batch.writes.len() as u64;
        active.slices += 1;
        self.in_flight.push_back((writing.epoch, writing.group));
        self.writing = Some(writing);
        self.pulse.speaks();
        Ok(Some(batch))
    }

    /// Takes up the next op. Skips ops of handoffs that wait for access, and completions of handoffs with batches not flushed yet. False
    /// when there is none to take up now.
    pub fn next_op(&mut self, now: Instant, line: &mut Line) -> bool {
        // Handoffs that begin may have ops in the line already.
        self.take_up(now, line);
        let ready = |op: &Op| match op {
            Op::Complete { epoch, .. } if self.is_in_flight(*epoch) => false,
            op => self.active.get(&op.epoch()).is_none_or(|active| active.state != State::Reserved),
        };
        let Some(op) = line.next_if(ready) else { return false };
        match op {
            Op::Write { epoch, group, layer, pairs, after } => {
                // A failed handoff's writes are dropped; its owner learns of the failure by its next call.
                if self.active.get(&epoch).is_some_and(|active| active.state == State::Transferring) {
                    self.writing = Some(Writing { epoch, group, layer, pairs, after, next: 0 });
                }
            }
            Op::Complete { epoch, tail, done } => self.complete(epoch, tail, done, (now, line)),
        }
        true
    }

    /// Ends every handoff and tells the peer.
    pub fn end_all(&mut self, error: &TransferError, now: Instant, line: &mut Line) {
        for epoch in self.active.keys().copied().collect::<Vec<_>>() {
            self.end(epoch, Input::Abort, error.clone(), now, line);
        }
    }

    fn complete(&mut self, epoch: Epoch, tail: Vec<u8>, done: Done, (now, line): (Instant, &mut Line)) {
        let Some(active) = self.active.get_mut(&epoch) else {
            return self.effects.push(Effect::Report(done, Err(TransferError::Closed)));
        };
        if let Some(error) = active.core.failure.get().cloned() {
            self.bury(epoch, line);
            return self.effects.push(Effect::Report(done, Err(error)));
        }
        active.complete(done, now);
        // I2: what left is not what came here.
        if let Some(error) = active.core.changed(&active.sums).filter(|_| self.pools.verify) {
            return self.end(epoch, Input::Abort, error, now, line);
        }
        let (writes, digests) = (active.writes, active.sums.clone());
        // The sender fills in `after`.
        self.say(Frame::Complete { epoch, after: Vec::new(), writes, digests, tail });
    }

    fn granted(
        &mut self,
        epoch: Epoch,
        blocks: Vec<Vec<BlockId>>,
        kind: TransportKind,
        now: Instant,
    ) -> Result<(), TransferError> {
        // The handoff was given up meanwhile, and the peer was told.
        let Some(active) = self.active.get_mut(&epoch) else { return Ok(()) };
        if !blocks.iter().map(Vec::len).eq(active.core.counts.iter().map(|n| *n as usize)) {
            return Err(self.broken("blocks", "not as many as the target descriptor says".into()));
        }
        let inside = |(list, blocks): (&Vec<BlockId>, &u32)| list.iter().all(|block| block.0 < *blocks);
        if !blocks.iter().zip(&self.pools.remote.blocks).all(inside) {
            return Err(self.broken("blocks", "some lie outside its own pool".into()));
        }
        if active.step(Input::Grant, now) == Action::Begin {
            active.targets = blocks;
            // Set once for each handoff; a session has one transport.
            let _ = active.core.transport.set(kind);
        }
        Ok(())
    }

    fn verified(
        &mut self,
        epoch: Epoch,
        kind: TransportKind,
        now: Instant,
        line: &mut Line,
    ) -> Result<(), TransferError> {
        let Some(active) = self.active.get_mut(&epoch) else { return Ok(()) };
        let Some(done) = active.done.take() else {
            return match active.state {
                State::Transferring => Err(self.broken("epoch", "verified before it was completed".into())),
                // It verifies an earlier handoff under the same epoch, which this end gave up meanwhile.
                _ => Ok(()),
            };
        };
        let announced = active.step(Input::Verify, now) == Action::Announce;
        let stats = active.stats(kind, now);
        active.step(Input::Release, now);
        self.bury(epoch, line);
        if announced {
            self.effects.push(Effect::Report(done, Ok(stats)));
        }
        Ok(())
    }

    /// Ends a handoff that will not be verified: stops copying, tells the peer if it does not know, and reports.
    fn end(&mut self, epoch: Epoch, input: Input, error: TransferError, now: Instant, line: &mut Line) {
        let in_flight = self.is_in_flight(epoch);
        let Some(active) = self.active.get_mut(&epoch) else { return };
        let before = active.state;
        active.step(input, now);
        if before == State::Released {
            return;
        }
        if before == State::Reserved && active.begun && input != Input::Refute {
            self.owed.insert(epoch);
        }
        self.writing.take_if(|writing| writing.epoch == epoch);
        if in_flight {
            self.in_flight.retain(|(of, _)| *of != epoch);
            self.effects.push(Effect::Cancel(epoch));
        }
        if matches!(input, Input::Abort | Input::Expire) {
            self.effects.push(Effect::Send(Frame::Abort { epoch }));
        }
        // This end has stopped and says so.
        active.step(Input::Fenced, now);
        let queued = line.forget(epoch);
        // The owner learns of it at its next call, or now if the completion was its last call.
        let _ = active.core.failure.set(error.clone());
        if let Some(done) = active.done.take().or(queued) {
            self.bury(epoch, line);
            self.effects.push(Effect::Report(done, Err(error)));
        }
    }

    fn is_in_flight(&self, epoch: Epoch) -> bool {
        self.in_flight.iter().any(|(of, _)| *of == epoch)
    }

    fn bury(&mut self, epoch: Epoch, line: &mut Line) {
        self.active.remove(&epoch);
        line.ended(epoch);
    }

    fn say(&mut self, frame: Frame) {
        self.effects.push(Effect::Send(frame));
    }

    fn refused(&self, epoch: Epoch, refusal: Refusal) -> TransferError {
        let Parties { me, peer } = self.parties;
        let refused = |reason| TransferError::Refused { epoch, peer, reason };
        match refusal {
            Refusal::NoReservation(reason) => refused(reason),
            Refusal::BadWrite(problem) => refused(format!("bad write: {problem}")),
            Refusal::Incomplete { written, expected } => {
                TransferError::Incomplete { epoch, peer: me, written, expected }
            }
            Refusal::Verify { group, index, block, want, got } => {
                TransferError::Verify { epoch, peer: me, group, index, block, want, got }
            }
        }
    }

    /// The error for a peer that does not keep to the protocol.
    fn broken(&self, field: &'static str, problem: String) -> TransferError {
        TransferError::broken(self.parties.peer, Malformed { field, problem })
    }
}

#[cfg(test)]
mod tests;
