//! How a session at the worker that gives KV moves blocks: run by run over shared memory, or batch by batch over any of its TCP connections.

use std::time::Instant;

use baton_engine::fake::KvMemory;
use baton_handoff::TransportKind;
use baton_handoff::{BlockRun, Frame, TCP_BATCHES, WriteBatch};
use baton_types::Epoch;

use crate::events::{Life, Process};
use crate::pool::Bytes;
use crate::sender_session::{SenderSession, Stop};
use crate::world::World;
use crate::{Sabotage, Violation};

/// Most batches in flight over shared memory, as many as any transport takes at once.
const DEPTH: usize = 4;

/// A run of a batch, to be copied over shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    from: usize,
    to: usize,
    len: usize,
    epoch: Epoch,
}

/// The pool of the worker that takes KV, mapped at the one that gives it.
pub(crate) struct Mapped {
    bytes: Bytes,
    life: Life,
}

/// The next thing to do for a batch over shared memory.
pub(crate) enum Copying {
    Run(Copy),
    /// All runs of the batch are copied: send this frame, which says so, for this epoch.
    Said(Epoch, Frame),
}

/// A TCP batch that has not left yet: its epoch, its connection's index, and its item in that connection's outbox.
pub(crate) struct Sending {
    epoch: Epoch,
    end: usize,
    item: u64,
}

impl World {
    /// Maps the peer's pool, which came with the first grant.
    pub(crate) fn map(&self, session: &mut SenderSession) -> Result<(), String> {
        let life = self.lines.get(&session.own().line).map_or(0, |connection| connection.to_life);
        let receiver = &self.receivers[session.to];
        if receiver.life != life {
            return Err("its pool is gone".into());
        }
        session.mapped = Some(Mapped { bytes: receiver.memory.bytes.clone(), life });
        Ok(())
    }

    /// Does one thing: copies a run, submits a batch, or carries out an op. False when nothing can be done now.
    pub(crate) fn copy_some(&mut self, here: Process, session: &mut SenderSession) -> Result<bool, Stop> {
        let early = self.broken(Sabotage::CompleteEarly) && self.random.chance(900);
        let deeper = session.outbound.in_flight() < DEPTH && self.random.chance(300);
        if !early && !deeper && self.copy_next(here, session).map_err(Stop::Broken)? {
            return Ok(true);
        }
        let now = self.clock_now(here);
        if !self.send_next(session, now) {
            return Ok(false);
        }
        let mut pool = self.senders[here].memory.bytes.clone();
        let batch = session.outbound.next_batch(Some(&mut pool), now).map_err(Stop::Ended)?;
        if let Some(batch) = batch {
            self.submit_batch(session, &batch, now);
            return Ok(true);
        }
        let more = session.outbound.next_op(now, &mut session.line);
        self.carry_out(here, session);
        Ok(more || !session.copying.is_empty())
    }

    /// Continues the batches in flight over shared memory. False when there are none.
    fn copy_next(&mut self, here: Process, session: &mut SenderSession) -> Result<bool, Violation> {
        match session.copying.pop_front() {
            None => return Ok(false),
            Some(Copying::Run(copy)) => self.copy(here, session, copy)?,
            Some(Copying::Said(_, write)) => {
                session.own().outbox.push(&write);
                session.flushed(self.clock_now(here));
            }
        }
        Ok(true)
    }

    fn submit_batch(&mut self, session: &mut SenderSession, batch: &WriteBatch, now: Instant) {
        session.meter.submitted(batch.epoch, batch.bytes() as u64, now);
        match (&session.mapped, session.kind) {
            (Some(_), TransportKind::Shm) => {
                let (epoch, write) = (batch.epoch, Frame::Write(batch.head(0)));
                let copy = |run: BlockRun| Copying::Run(Copy { from: run.source, to: run.target, len: run.len, epoch });
                session.copying.extend(batch.runs().map(copy));
                if self.broken(Sabotage::CompleteEarly) {
                    session.own().outbox.push(&write);
                    session.flushed(now);
                } else {
                    session.copying.push_back(Copying::Said(epoch, write));
                }
            }
            _ => self.send_batch(session, batch, now),
        }
    }

    /// Sends a batch over any connection, most often the one with the least to send.
    fn send_batch(&mut self, session: &mut SenderSession, batch: &WriteBatch, now: Instant) {
        let ends = session.ends.len();
        let at = match self.random.chance(300) {
            true => self.random.below(ends as u64) as usize,
            false => (0..ends).min_by_key(|at| session.ends[*at].outbox.bytes()).unwrap_or(0),
        };
        let (epoch, head) = (batch.epoch, Frame::Write(batch.head(batch.bytes() as u32)));
        let end = &mut session.ends[at];
        session.written.count(end.stream);
        if self.broken(Sabotage::CountTwice) {
            session.written.count(end.stream);
        }
        let item = end.outbox.push_blocks(&head, epoch, batch.runs().map(|run| (run.source, run.len)));
        if self.broken(Sabotage::FlushEarly) {
            session.flushed(now);
        } else {
            session.sending.push_back(Sending { epoch, end: at, item });
        }
    }

    /// Checks whether the oldest TCP batch has left. False when no further batch may follow yet.
    fn send_next(&mut self, session: &mut SenderSession, now: Instant) -> bool {
        let Some(oldest) = session.sending.front() else { return true };
        if session.ends[oldest.end].outbox.holds(oldest.item) {
            return session.sending.len() < TCP_BATCHES * session.ends.len();
        }
        session.sending.pop_front();
        session.flushed(now);
        true
    }

    /// Drops a handoff's batches: from now on the local pool is not read for it.
    pub(crate) fn cancel_batches(&mut self, session: &mut SenderSession, epoch: Epoch) {
        let ignores = self.broken(Sabotage::IgnoreCancel);
        session.copying.retain(|copying| match copying {
            Copying::Run(copy) => ignores || copy.epoch != epoch,
            Copying::Said(of, _) => *of != epoch,
        });
        session.sending.retain(|sending| sending.epoch != epoch);
        let ends = match self.options.sabotage {
            Some(Sabotage::IgnoreCancel) => 0,
            Some(Sabotage::ForgetOnOne) => 1,
            _ => session.ends.len(),
        };
        session.ends[..ends].iter_mut().for_each(|end| end.outbox.forget_pool(epoch));
    }

    /// Copies one run over shared memory and checks I3. The peer may be doing anything meanwhile.
    fn copy(&mut self, here: Process, session: &SenderSession, copy: Copy) -> Result<(), Violation> {
        let Some(mapped) = &session.mapped else { return Ok(()) };
        let sender = &self.senders[here];
        if sender.memory.owner_at(copy.from).is_none() {
            return Err(self.violation("I3", format!("{} reads local blocks it has given back", copy.epoch)));
        }
        let receiver = &self.receivers[session.to];
        if receiver.life == mapped.life && receiver.memory.owner_at(copy.to) != Some(copy.epoch) {
            let owner = receiver.memory.owner_at(copy.to);
            let what = format!("{} writes to a block that is kept for {owner:?}", copy.epoch);
            return Err(self.violation("I3", what));
        }
        let mut bytes = sender.memory.read((copy.from, copy.len));
        if self.faults.miscopies(&mut self.random) {
            self.random.flip(&mut bytes);
        }
        mapped.bytes.clone().store(copy.to, &bytes);
        Ok(())
    }
}
