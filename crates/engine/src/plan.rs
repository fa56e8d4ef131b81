//! Planning a step: who expires, who keeps or loses its blocks, who starts, and which tokens are computed.
//!
//! Why this always ends. A sequence takes blocks for all its tokens when it starts, so it can always compute the next one;
//! after that it takes a block at a time. When there is none, the youngest preemptible sequence gives up its own and waits
//! in its old place in the queue. So the oldest that can be preempted always advances, or is alone and waits for blocks that
//! are lent, held or in quarantine: those need no further block to be given back.

use baton_kv_cache::KvError;
use baton_types::SeqId;

use crate::sequence::{Doom, Phase};
use crate::{Engine, Event, SequenceError, Start, Step, StepRow, Time};

impl Engine {
    /// The next step, or `None` when there is nothing to compute now. Also ends sequences whose deadline has passed and lends
    /// blocks to those that wait for a peer; `events` says which.
    ///
    /// While a step is in flight there is no other.
    pub fn plan(&mut self, now: Time, events: &mut Vec<Event>) -> Option<Step> {
        if self.in_flight {
            debug_assert!(false, "the last step was neither applied nor failed");
            return None;
        }
        self.expire(now, events);
        let mut rows = std::mem::take(&mut self.spare_steps);
        rows.clear();
        self.plan_decodes(&mut rows);
        self.admit(events);
        self.plan_chunks(&mut rows);
        self.in_flight = !rows.is_empty();
        debug_assert_eq!(self.check(), Ok(()), "I6");
        if rows.is_empty() {
            self.spare_steps = rows;
            return None;
        }
        self.steps += 1;
        Some(Step { rows, number: self.steps })
    }

    fn expire(&mut self, now: Time, events: &mut Vec<Event>) {
        if self.earliest_deadline.is_none_or(|earliest| now < earliest) {
            return;
        }
        let due = |deadline: Option<Time>| deadline.is_some_and(|at| at <= now);
        let expired: Vec<SeqId> = self.sequences.iter().filter(|(_, s)| due(s.deadline)).map(|(id, _)| *id).collect();
        for seq in expired {
            let state = self.sequences.get(&seq).map_or("gone", |s| s.phase.name());
            self.end_failed(seq, SequenceError::Deadline { state }, events);
        }
        self.earliest_deadline = self.sequences.values().filter_map(|s| s.deadline).min();
    }

    /// Ends a sequence with an error. Blocks that others may reach are quarantined, since nobody has fenced them yet (I3).
    pub(crate) fn end_failed(&mut self, seq: SeqId, error: SequenceError, events: &mut Vec<Event>) {
        if let Some(gone) = self.remove(seq, Doom::Quarantine) {
            let quarantined = self.quarantine.contains_key(&seq);
            events.push(Event::Failed { seq, request: gone.request, error, quarantined });
        }
    }

    /// One row for each running sequence that lacks one token, oldest first.
    fn plan_decodes(&mut self, rows: &mut Vec<StepRow>) {
        let mut at = 0;
        while let Some(&seq) = self.running.get(at) {
            let decodes = self.sequences.get(&seq).is_some_and(|s| s.remaining() == 1);
            if decodes && self.grow(seq) {
                self.push_row(seq, 1, rows);
            }
            // Preempting others only shortens the list behind `at`. When it was itself preempted, the next is here now.
            if self.running.get(at) == Some(&seq) {
                at += 1;
            }
        }
    }

    /// Chunks of running sequences that lack more, oldest first, as far as the budget goes.
    fn plan_chunks(&mut self, rows: &mut Vec<StepRow>) {
        let mut budget = self.config.token_budget.saturating_sub(rows.iter().map(|row| row.len).sum());
        for at in 0..self.running.len() {
            let seq = self.running[at];
            let Some(sequence) = self.sequences.get(&seq) else { continue };
            let len = sequence.remaining().min(self.config.chunk).min(budget);
            let covered = sequence.tables().first().map_or(0, |table| table.tokens());
            // A decoding sequence for which there is no block now waits.
            if len == 0 || sequence.in_step || covered < sequence.computed + len {
                continue;
            }
            self.push_row(seq, len, rows);
            budget -= len;
        }
    }

    fn push_row(&mut self, seq: SeqId, len: u32, rows: &mut Vec<StepRow>) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.in_step = true;
            let (samples, held) = (len == s.remaining(), s.start == Start::ComputeAndHold);
            rows.push(StepRow { seq, start: s.computed, len, samples, held });
        }
    }

    /// Makes the sequence's tables cover all its tokens, taking blocks from the youngest where there are none. False when
    /// the sequence must wait, or has itself been preempted.
    fn grow(&mut self, seq: SeqId) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&seq) else { return false };
            let tokens = sequence.len();
            let Phase::Running(tables) = &mut sequence.phase else { return false };
            match self.pools.grow(tables, tokens) {
                Ok(()) => return true,
                Err(KvError::OutOfBlocks { .. }) => {}
                Err(error) => {
                    self.defect.get_or_insert(error);
                    return false;
                }
            }
            let mut candidates =
                self.running.iter().rev().filter(|id| self.sequences.get(id).is_some_and(|s| s.preemptible()));
            let (youngest, other) = (candidates.next().copied(), candidates.next());
            match youngest {
                Some(victim) if victim != seq || other.is_some() => self.preempt(victim),
                _ => return false,
            }
        }
    }

    /// Takes a sequence's blocks; it keeps its tokens, waits in its place in the queue and is computed again (I1).
    fn preempt(&mut self, seq: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        if let Phase::Running(tables) = std::mem::replace(&mut sequence.phase, Phase::Waiting)
            && let Err(error) = self.pools.free(tables)
        {
            self.defect.get_or_insert(error);
        }
        sequence.computed = 0;
        self.running.retain(|id| *id != seq);
        let at = self.waiting.partition_point(|id| *id < seq);
        self.waiting.insert(at, seq);
        self.preemptions += 1;
    }

    /// Starts waiting sequences in order while there is a place and room for all their tokens. The first that does not fit
    /// blocks those behind it, so that nobody starves.
    fn admit(&mut self, events: &mut Vec<Event>) {
        while self.running() + self.receiving < self.config.max_running {
            let Some(&seq) = self.waiting.front() else { return };
            let Some(sequence) = self.sequences.get_mut(&seq) else { return };
            // A block beyond for each running sequence, so that it is not taken back at once.
            if !self.pools.has_room(sequence.len(), self.running.len() as u32) {
                return;
            }
            let taken = if sequence.start == Start::Receive {
                self.pools.lend(sequence.len()).map(Phase::Receiving)
            } else {
                self.pools.allocate(sequence.len()).map(Phase::Running)
            };
            match taken {
                Ok(phase) => sequence.phase = phase,
                Err(error) => {
                    self.defect.get_or_insert(error);
                    return;
                }
            }
            self.waiting.pop_front();
            if sequence.start == Start::Receive {
                self.receiving += 1;
                events.push(Event::Reserved { seq, request: sequence.request.clone() });
            } else {
                let at = self.running.partition_point(|id| *id < seq);
                self.running.insert(at, seq);
            }
        }
    }
}
