//! The thread of a worker that writes the prefixes which it serves, one after the other. A write waits for room while its session is
//! slow.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Instant;

use baton_handoff::{Known, Op, TransferError};
use baton_types::{BlockId, SeqId};

use crate::Violation;
use crate::ends::Told;
use crate::events::{Event, Process};
use crate::stream::Micros;
use crate::world::World;

/// How long the thread sleeps while there is no room.
const FULL: Micros = 1_000;

/// A prefix to be written to a peer.
pub(crate) struct Job {
    seq: SeqId,
    /// Per group: pairs of local block and index in the loan.
    pairs: Vec<Vec<(BlockId, u32)>>,
    /// Group and layer of the writes that are not begun.
    rest: VecDeque<(usize, usize)>,
    /// What the write under way has left, and how long it waits for room.
    ops: VecDeque<Op>,
    patience: Instant,
    given_up: bool,
}

/// Result of a part of a job.
enum Part {
    Written,
    /// There is no room now.
    Full,
    /// All is written, or it failed.
    Over(Result<(), TransferError>),
}

impl World {
    /// A handoff belongs to this prefix, which is served.
    pub(crate) fn is_of_prefix(&mut self, here: Process, handoff: u64, seq: SeqId) {
        if let Some(handoff) = self.senders[here].handoffs.get_mut(&handoff) {
            (handoff.seq, handoff.prefix) = (Some(seq), true);
        }
    }

    /// Has the thread write a prefix. From now on the handoff may read its blocks (I3).
    pub(crate) fn send_prefix(
        &mut self,
        here: Process,
        seq: SeqId,
        pairs: Vec<Vec<(BlockId, u32)>>,
        known: Vec<Known>,
    ) {
        let patience = self.clock_now(here);
        let layers = self.geometry.layout.groups.iter().map(|group| group.layers.len());
        let groups = layers.enumerate().filter(|(group, _)| !pairs[*group].is_empty());
        let rest = groups.flat_map(|(group, layers)| (0..layers).map(move |layer| (group, layer))).collect();
        let sender = &mut self.senders[here];
        let Some(id) = sender.of(seq) else { return };
        if let Some(handoff) = sender.handoffs.get(&id) {
            handoff.writes.core().knows(known);
        }
        for (group, pairs) in pairs.iter().enumerate() {
            pairs.iter().for_each(|(block, _)| sender.memory.keep(group, *block, id));
        }
        sender.jobs.push_back(Job { seq, pairs, rest, ops: VecDeque::new(), patience, given_up: false });
        if sender.jobs.len() == 1 {
            self.wake_writer(here, 0);
        }
    }

    /// Has the thread give a prefix up, unless all of it is written.
    pub(crate) fn give_up_prefix(&mut self, here: Process, seq: SeqId) {
        self.senders[here].jobs.iter_mut().filter(|job| job.seq == seq).for_each(|job| job.given_up = true);
    }

    fn wake_writer(&mut self, here: Process, later: Micros) {
        let (at, life) = (self.soon() + later, self.senders[here].life);
        self.events.plan(at, Event::WritePrefix { process: here, life });
    }

    /// The thread goes on.
    pub(crate) fn write_prefix(&mut self, here: Process) -> Result<(), Violation> {
        let Some(mut job) = self.senders[here].jobs.pop_front() else { return Ok(()) };
        let later = match self.write_part(here, &mut job)? {
            Part::Over(outcome) => {
                self.written(here, job.seq, outcome);
                self.reported(here)?;
                0
            }
            part => {
                self.senders[here].jobs.push_front(job);
                if matches!(part, Part::Full) { FULL } else { 0 }
            }
        };
        if !self.senders[here].jobs.is_empty() {
            self.wake_writer(here, later);
        }
        Ok(())
    }

    fn write_part(&mut self, here: Process, job: &mut Job) -> Result<Part, Violation> {
        let now = self.clock_now(here);
        let sender = &mut self.senders[here];
        let Some(handoff) = sender.of(job.seq).and_then(|id| sender.handoffs.get_mut(&id)) else {
            return Ok(Part::Over(Err(TransferError::Closed)));
        };
        let Some(op) = job.ops.pop_front() else {
            let Some((group, layer)) = job.rest.pop_front() else { return Ok(Part::Over(Ok(()))) };
            if job.given_up {
                return Ok(Part::Over(Err(TransferError::Closed)));
            }
            job.patience = now + self.limits.room;
            let ops = handoff.writes.write(group, layer, &job.pairs[group], 0);
            job.ops = ops.map_err(|error| self.violation("I8", format!("{here}: {error}")))?.into_iter().collect();
            return Ok(Part::Written);
        };
        let (serial, blocks) = (handoff.session, op.blocks());
        let Some(session) = sender.sessions.get_mut(&serial) else {
            return Ok(Part::Over(Err(handoff.failed().unwrap_or(TransferError::Closed))));
        };
        match session.line.room(handoff.writes.core(), blocks, job.patience, now) {
            Ok(None) => {
                handoff.writes.queued(blocks);
                session.line.write(op);
            }
            Ok(Some(_)) => {
                job.ops.push_front(op);
                return Ok(Part::Full);
            }
            Err(error) => return Ok(Part::Over(Err(error))),
        }
        self.wake_sender(here, serial);
        Ok(Part::Written)
    }

    /// All of a prefix is written, or it is given up. Its owner hears of the end once nothing reads its blocks.
    fn written(&mut self, here: Process, seq: SeqId, outcome: Result<(), TransferError>) {
        match outcome {
            Ok(()) => self.complete_handoff(here, seq, Vec::new()),
            Err(error) => {
                let sender = &mut self.senders[here];
                let (Some(id), reports) = (sender.of(seq), sender.reports.clone()) else { return };
                let tell = move || {
                    let told = (id, Told::Done(Err(error)));
                    reports.lock().unwrap_or_else(PoisonError::into_inner).push(told);
                };
                self.end_handoff(here, id, false, Box::new(tell));
            }
        }
    }
}
