//! One prefill worker's session at the decode end, without its sockets: what each frame means, where payload goes, what a fence stops.
//!
//! Pure: the caller feeds it frames and payload, and sends the frames that [`Inbound::next_answer`] returns.
//!
//! A session may have several connections. Each keeps its own order, but there is no order between them:
//! - A completion that overtakes writes on other connections waits for them.
//! - The end of a handoff also ends its writes under way on every connection.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use baton_types::{Epoch, PoolGeometry, WorkerId};

use super::ReceiverEvent;
use super::incoming::Incoming;
use super::ledger::Ledger;
use super::payload::Payload;
use super::reach::PeerReach;
use super::table::{Holder, SessionId};
use crate::batch::Range;
use crate::codec::Malformed;
use crate::error::TransferError;
use crate::limits::{TransferLimits, TransportKind};
use crate::memory::PoolMemory;
use crate::pulse::Pulse;
use crate::state::Input;
use crate::wire::{Frame, MAX_STREAMS, MAX_WRITE_BLOCKS, Refusal, WriteHead};

/// A payload under way, and the write it belongs to; None if the payload is dropped.
struct Landing {
    payload: Payload,
    head: Option<WriteHead>,
}

/// One connection.
#[derive(Default)]
struct Stream {
    landing: Option<Landing>,
    /// Writes that have arrived in full, applied or dropped.
    writes: u64,
}

/// The session's handoffs, and the writes that are arriving. Connections are numbered; the session's own is 0.
pub struct Inbound {
    id: SessionId,
    peer: WorkerId,
    kind: TransportKind,
    geometry: PoolGeometry,
    /// Whether arriving blocks are compared with their digests (I2). Only a benchmark may turn this off.
    verify: bool,
    /// Handoffs that were granted access and have not ended.
    incoming: BTreeMap<Epoch, Incoming>,
    streams: [Stream; MAX_STREAMS],
    /// Completions that have overtaken writes on other connections.
    early: BTreeMap<Epoch, Frame>,
    answers: VecDeque<Frame>,
    pulse: Pulse,
    /// When leases were last renewed.
    renewed: Option<Instant>,
}

impl Inbound {
    /// A session with nothing under way. `kind` says who writes to the pool of this `geometry`: this end (TCP) or the
    /// peer itself (all others).
    pub fn new(
        id: SessionId,
        peer: WorkerId,
        kind: TransportKind,
        geometry: PoolGeometry,
        limits: &TransferLimits,
    ) -> Inbound {
        Inbound {
            id,
            peer,
            kind,
            geometry,
            verify: true,
            incoming: BTreeMap::new(),
            streams: Default::default(),
            early: BTreeMap::new(),
            answers: VecDeque::new(),
            pulse: Pulse::new(limits.heartbeat),
            renewed: None,
        }
    }

    /// The same session without comparing digests: for a benchmark, and to show in tests what that leads to.
    pub fn unverified(self) -> Inbound {
        Inbound { verify: false, ..self }
    }

    /// Whether some block layers of a handoff have arrived, so that more come any moment and the session's thread should wait awake.
    ///
    /// The grant alone is too early. A thread that waits awake from then on may queue for the core on which the peer copies, even while
    /// another core is idle. A thread that sleeps is woken on the idle core.
    pub fn is_arriving(&self) -> bool {
        self.incoming.values().any(|incoming| incoming.progress().0 > 0)
    }

    /// The prefill worker it serves.
    pub fn peer(&self) -> WorkerId {
        self.peer
    }

    /// Takes the oldest answer that has yet to leave.
    pub fn next_answer(&mut self) -> Option<Frame> {
        let answer = self.answers.pop_front();
        if answer.is_some() {
            self.pulse.speaks();
        }
        answer
    }

    /// Notes that anything at all arrived from the peer. True when its leases must be renewed: at most four times per heartbeat.
    pub fn heard(&mut self, now: Instant) -> bool {
        let due = self.renewed.is_none_or(|at| now.saturating_duration_since(at) >= self.pulse.heartbeat() / 4);
        if due && !self.incoming.is_empty() {
            self.renewed = Some(now);
            return true;
        }
        false
    }

    /// Renews the leases of the reservations that the peer writes to.
    pub fn renew(&self, now: Instant, ledger: &mut Ledger) {
        ledger.renew(self.id, now);
    }

    /// While a handoff is under way, queues a heartbeat if nothing else was sent for that long. `may_say` is false while earlier answers
    /// have yet to leave. Returns when to ask again; None when no handoff is under way.
    pub fn beat(&mut self, now: Instant, may_say: bool) -> Option<Instant> {
        if self.incoming.is_empty() {
            return None;
        }
        let (beats, next) = self.pulse.beat(now, may_say);
        self.answers.extend(beats.then_some(Frame::Beat));
        Some(next)
    }

    /// The payload that must be read before the connection's next frame.
    pub fn payload(&mut self, stream: usize) -> Option<&mut Payload> {
        self.streams.get_mut(stream)?.landing.as_mut().map(|landing| &mut landing.payload)
    }

    /// Whether a further connection has carried nothing yet, so that nothing is lost with it.
    pub fn is_unused(&self, stream: usize) -> bool {
        stream > 0 && self.streams.get(stream).is_none_or(|stream| stream.landing.is_none() && stream.writes == 0)
    }

    /// Takes in a connection's write once its [`Inbound::payload`] is done and in place; does nothing before.
    ///
    /// It digests only block layers that nobody writes to any more. Over TCP only this end writes to the pool. Over the other transports
    /// the peer has said that it is done with these block layers, and it may not write them twice.
    ///
    /// An error comes from this end's device, and ends the session.
    pub fn landed(&mut self, stream: usize, pool: &mut dyn PoolMemory) -> Result<(), TransferError> {
        let Some(stream) = self.streams.get_mut(stream) else { return Ok(()) };
        let Some(landing) = stream.landing.take_if(|l| l.payload.is_done()) else { return Ok(()) };
        stream.writes += 1;
        if let Some(head) = landing.head
            && let Some(incoming) = self.incoming.get_mut(&head.epoch)
        {
            return incoming.landed(&self.geometry, pool, &head);
        }
        Ok(())
    }

    /// Takes a completion that waited and whose writes have all arrived. Handle it as if it came now.
    pub fn next_due(&mut self) -> Option<Frame> {
        let due = |frame: &Frame| matches!(frame, Frame::Complete { after, .. } if self.have_arrived(after));
        let epoch = self.early.iter().find(|(_, frame)| due(frame)).map(|(epoch, _)| *epoch)?;
        self.early.remove(&epoch)
    }

    fn have_arrived(&self, after: &[u64]) -> bool {
        after.iter().zip(&self.streams[1..]).all(|(writes, stream)| stream.writes >= *writes)
    }

    /// Handles a frame from the peer on connection `stream`. An error ends the session.
    pub fn frame(
        &mut self,
        stream: usize,
        frame: Frame,
        now: Instant,
        ledger: &mut Ledger,
    ) -> Result<(), TransferError> {
        match frame {
            Frame::Write(head) => return self.write(stream, head, ledger),
            other if stream > 0 => {
                let problem = format!("{other:?} on a connection that carries blocks only");
                return Err(self.broken(Malformed::new("kind", problem)));
            }
            Frame::Begin { epoch, key } => self.begin(epoch, key, now, ledger),
            Frame::Complete { epoch, ref after, .. } if !self.have_arrived(after) => self.wait(epoch, frame, ledger),
            Frame::Complete { epoch, writes, digests, tail, .. } => {
                self.complete(ledger, epoch, tail, now, |incoming| incoming.verify(writes, &digests));
            }
            Frame::Abort { epoch } => {
                self.forget(epoch);
                self.stopped(epoch, ledger);
            }
            Frame::FenceAck { epoch } => self.stopped(epoch, ledger),
            Frame::Beat => {}
            other => return Err(self.broken(Malformed::new("kind", format!("{other:?} is not for a decode worker")))),
        }
        Ok(())
    }

    /// Stops a handoff whose blocks are taken back. Over TCP only this end writes, so it has stopped at once. Over the other transports the
    /// peer must say that it has stopped (I3).
    pub fn fence(&mut self, epoch: Epoch, ledger: &mut Ledger) {
        self.forget(epoch);
        self.answers.push_back(Frame::Fence { epoch });
        if !self.kind.is_one_sided() {
            self.stopped(epoch, ledger);
        }
    }

    /// The connection has ended, or the peer broke the protocol: fails every handoff under way. This does not prove that the peer cannot
    /// write any more.
    pub fn lost(&mut self, ledger: &mut Ledger, error: &TransferError) {
        std::mem::take(&mut self.incoming).iter().for_each(|(epoch, incoming)| self.note_cut(*epoch, incoming));
        self.streams.iter_mut().for_each(|stream| stream.landing = None);
        self.early.clear();
        if error.is_corruption() {
            ledger.corrupted();
        }
        self.end_all(ledger, Input::Lost, error);
    }

    /// After [`Inbound::lost`]: frees what this session still holds once the peer provably cannot write any more (I3). True when nothing is
    /// left; otherwise ask again when something changes.
    pub fn let_go(&mut self, reach: PeerReach, ledger: &mut Ledger, error: &TransferError) -> bool {
        if !reach.may_write() {
            self.severed(ledger, error);
        }
        !reach.may_write() || !self.holds_any(ledger)
    }

    /// The peer provably cannot write any more.
    pub fn severed(&mut self, ledger: &mut Ledger, error: &TransferError) {
        self.end_all(ledger, Input::Severed, error);
    }

    /// Whether any reservation that this session was granted access to is not over.
    pub fn holds_any(&self, ledger: &Ledger) -> bool {
        !ledger.held_by(self.id).is_empty()
    }

    fn end_all(&self, ledger: &mut Ledger, input: Input, error: &TransferError) {
        for epoch in ledger.held_by(self.id) {
            ledger.step_as(self.id, epoch, input, || error.clone());
        }
    }

    /// The peer has stopped: it said so, or only this end writes.
    fn stopped(&self, epoch: Epoch, ledger: &mut Ledger) {
        ledger.step_as(self.id, epoch, Input::Fenced, || TransferError::Aborted { epoch });
    }

    /// Closes a handoff before its completion.
    fn forget(&mut self, epoch: Epoch) {
        if let Some(incoming) = self.close(epoch) {
            self.note_cut(epoch, &incoming);
        }
    }

    /// Closes a handoff: from now on nothing that arrives under its epoch, on any connection, reaches the pool (I2, I3).
    fn close(&mut self, epoch: Epoch) -> Option<Incoming> {
        for landing in self.streams.iter_mut().filter_map(|stream| stream.landing.as_mut()) {
            if landing.head.take_if(|head| head.epoch == epoch).is_some() {
                landing.payload.turn_to_discard();
            }
        }
        self.early.remove(&epoch);
        self.incoming.remove(&epoch)
    }

    /// Logs how far a handoff came that ends before its completion.
    fn note_cut(&self, epoch: Epoch, incoming: &Incoming) {
        let (arrived, of) = incoming.progress();
        tracing::debug!(peer = %self.peer, %epoch, arrived, of, "handoff cut short");
    }

    fn begin(&mut self, epoch: Epoch, key: u64, now: Instant, ledger: &mut Ledger) {
        let holder = Holder { session: self.id, peer: self.peer, transport: self.kind };
        match ledger.grant(epoch, key, holder, now) {
            Ok(blocks) => {
                self.answers.push_back(Frame::Granted { epoch, blocks: blocks.to_vec() });
                self.incoming.insert(epoch, Incoming::new(&self.geometry, blocks, self.verify, now));
            }
            Err(reason) => self.refuse(epoch, Refusal::NoReservation(reason)),
        }
    }

    fn refuse(&mut self, epoch: Epoch, refusal: Refusal) {
        self.answers.push_back(Frame::Failed { epoch, refusal });
    }

    fn write(&mut self, stream: usize, head: WriteHead, ledger: &mut Ledger) -> Result<(), TransferError> {
        let (epoch, bytes) = (head.epoch, head.payload as usize);
        let layout = &self.geometry.layout;
        let largest = (0..layout.groups.len()).map(|g| layout.block_bytes(g)).max().unwrap_or(0);
        if bytes > largest * MAX_WRITE_BLOCKS {
            return Err(self.broken(Malformed::new("payload", format!("{bytes} bytes in one write"))));
        }
        let landing = match self.accept(&head, ledger) {
            Ok(ranges) => Landing { payload: Payload::apply(ranges), head: Some(head) },
            Err(refusal) => {
                refusal.into_iter().for_each(|refusal| self.fail(epoch, refusal, ledger));
                Landing { payload: Payload::discard(bytes), head: None }
            }
        };
        match self.streams.get_mut(stream) {
            Some(stream) => stream.landing = Some(landing),
            None => return Err(self.broken(Malformed::new("stream", format!("{stream} of {MAX_STREAMS}")))),
        }
        Ok(())
    }

    /// Where a write's payload goes; one-sided transports have none. `Err(None)` when the owner has taken the blocks back: the payload is
    /// dropped without an answer, since the fence is on its way to the peer.
    fn accept(&mut self, head: &WriteHead, ledger: &mut Ledger) -> Result<VecDeque<Range>, Option<Refusal>> {
        let epoch = head.epoch;
        let Some(incoming) = self.incoming.get_mut(&epoch) else {
            return Err(Some(Refusal::NoReservation("nothing may be written under it".into())));
        };
        if !ledger.step_as(self.id, epoch, Input::Write, || TransferError::Aborted { epoch }) {
            return Err(None);
        }
        let bad = |problem| Some(Refusal::BadWrite(problem));
        let ranges = incoming.accept(&self.geometry, head).map_err(bad)?;
        let expected = match self.kind.is_one_sided() {
            false => ranges.iter().map(|r| r.1).sum(),
            true => 0,
        };
        if head.payload as usize != expected {
            return Err(bad(format!("{} bytes instead of {expected}", head.payload)));
        }
        Ok(if expected == 0 { VecDeque::new() } else { ranges })
    }

    /// Keeps a completion until the writes before it have arrived. There is one per handoff, with as many digests as the handoff has blocks
    /// (I5).
    fn wait(&mut self, epoch: Epoch, frame: Frame, ledger: &mut Ledger) {
        let checked = match (self.incoming.get(&epoch), &frame) {
            (Some(_), _) if self.early.contains_key(&epoch) => Err(Refusal::BadWrite("completed twice".into())),
            (Some(incoming), Frame::Complete { digests, .. }) => incoming.check_shape(digests),
            _ => Err(Refusal::NoReservation("nothing may be completed under it".into())),
        };
        match checked {
            Ok(()) => drop(self.early.insert(epoch, frame)),
            Err(refusal) => self.fail(epoch, refusal, ledger),
        }
    }

    fn complete(
        &mut self,
        ledger: &mut Ledger,
        epoch: Epoch,
        tail: Vec<u8>,
        now: Instant,
        verify: impl FnOnce(&Incoming) -> Result<(), Refusal>,
    ) {
        let Some(incoming) = self.close(epoch) else {
            return self.refuse(epoch, Refusal::NoReservation("nothing may be completed under it".into()));
        };
        // I2
        if let Err(refusal) = verify(&incoming) {
            return self.fail(epoch, refusal, ledger);
        }
        let bytes = incoming.bytes(&self.geometry);
        let seconds = now.saturating_duration_since(incoming.began).as_secs_f64();
        let digests = incoming.into_digests();
        let event = ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport: self.kind, digests };
        if ledger.verified(self.id, event) {
            self.answers.push_back(Frame::Verified { epoch });
        }
    }

    /// Ends a handoff that cannot be verified, and says so to both sides.
    fn fail(&mut self, epoch: Epoch, refusal: Refusal, ledger: &mut Ledger) {
        self.close(epoch);
        let error = self.error_of(epoch, &refusal);
        let input = match (&refusal, self.kind.is_one_sided()) {
            // I3: a peer that made a mistake may go on copying until it says that it has stopped.
            (Refusal::BadWrite(_) | Refusal::Incomplete { .. }, true) => Input::Lost,
            _ => Input::Refute,
        };
        ledger.step_as(self.id, epoch, input, || error);
        self.refuse(epoch, refusal);
    }

    fn error_of(&self, epoch: Epoch, refusal: &Refusal) -> TransferError {
        let peer = self.peer;
        match refusal {
            Refusal::NoReservation(reason) => TransferError::Refused { epoch, peer, reason: reason.clone() },
            Refusal::BadWrite(problem) => TransferError::Protocol { peer, field: "write", problem: problem.clone() },
            Refusal::Incomplete { written, expected } => {
                TransferError::Incomplete { epoch, peer, written: *written, expected: *expected }
            }
            Refusal::Verify { group, index, block, want, got } => {
                let (group, index, block, want, got) = (*group, *index, *block, *want, *got);
                TransferError::Verify { epoch, peer, group, index, block, want, got }
            }
        }
    }

    /// The error for a peer that does not keep to the protocol.
    pub fn broken(&self, malformed: Malformed) -> TransferError {
        TransferError::broken(self.peer, malformed)
    }
}

#[cfg(test)]
mod tests;
