//! A prompt that is computed while its prefix is copied into the pool, layer by layer.
//!
//! A fetch streams when all that it brings is at hand, so that it takes about as long as a step. If there is nothing else to compute, a prompt that
//! waits for all of it takes over its blocks and is computed in a step of its own ([`Step::behind`](crate::Step::behind)). Whoever launches that step has it
//! wait in each layer for that layer. So the shorter of the two, copying and computing, takes no time; and nobody else waits for it.
//!
//! Other prompts wait for the sequence from then on, as for any that computes a prefix. Nobody else shares the blocks before the step has
//! succeeded (I2), and no other step is planned meanwhile.

use baton_types::SeqId;

use crate::sequence::{Phase, Sequence, Turn};
use crate::{Engine, Start, StepRow};

/// Fewest tokens of a prompt behind its prefix: a single one is computed as part of an answer, and there is nothing to gain.
const LEAST: u32 = 2;

impl Engine {
    /// All that a fetch brings is at hand, and its blocks fill layer by layer from now on. A prompt that waits for it may take them over
    /// ([`crate::Step::behind`]): the fetch is over then, and [`Engine::fetched`] does not know it.
    pub fn streams(&mut self, fetch: SeqId) {
        self.streams = Some(fetch);
    }

    /// A fetch is to be waited for to its end after all, if it has not been taken over.
    pub fn streams_no_more(&mut self, fetch: SeqId) {
        self.streams = self.streams.filter(|streams| *streams != fetch);
    }

    /// Starts the first prompt that waits for all of the fetch that streams, and adds its row. Called when there is nothing else to compute. `full`: the
    /// first one that found no room; those behind it do not start. Returns the fetch.
    pub(crate) fn join(&mut self, full: Option<Turn>, rows: &mut Vec<StepRow>) -> Option<SeqId> {
        let fetch = self.streams.filter(|_| self.in_flight == 0 && self.running.is_empty())?;
        if self.config.chunk.min(self.config.token_budget) < LEAST {
            return None;
        }
        let Some(Sequence { phase: Phase::Receiving(lent), exchange: true, .. }) = self.sequences.get(&fetch) else {
            // It has ended.
            self.streams = None;
            return None;
        };
        let moves = lent.as_slice().iter().map(|table| table.tokens()).max().unwrap_or(0);
        let mut waiting = self.waiting.iter().take_while(|turn| full.is_none_or(|full| **turn < full));
        let seq = waiting.find(|turn| self.joins(turn, fetch, moves))?.seq;
        let (start, len, prefix) =
            self.sequences.get(&seq).map(|s| (s.start, s.len(), s.prefix.unwrap_or_default()))?;
        let need = self.need(start, len);
        if !self.pools.fits_behind(lent, need) {
            return None;
        }
        self.streams = None;
        let gone = self.sequences.remove(&fetch)?;
        self.receiving.remove(&gone.turn);
        let Phase::Receiving(lent) = gone.phase else { return None };
        let tables =
            self.pools.take_over(lent, prefix, need).map_err(|error| self.defect.get_or_insert(error).clone()).ok()?;
        let first = self.found(seq, moves);
        self.leave_queue(seq, Phase::Running(tables));
        if first {
            self.overtake(seq);
        }
        let sequence = self.sequences.get_mut(&seq)?;
        (sequence.computed, sequence.unverified) = (moves, true);
        let sequence = self.sequences.get(&seq)?;
        let len = sequence.lacks().min(self.chunk_of(sequence).max(LEAST)).min(self.config.token_budget);
        self.push_row(seq, len, rows);
        Some(fetch)
    }

    /// Whether a waiting sequence can be computed behind all of a fetch.
    fn joins(&self, turn: &Turn, fetch: SeqId, moves: u32) -> bool {
        let waits = |s: &&Sequence| s.leader.is_some_and(|leader| leader.seq == fetch && leader.shared == moves);
        let computes = |s: &&Sequence| s.start != Start::Receive && s.parked.is_none() && s.len() >= moves + LEAST;
        self.sequences.get(&turn.seq).filter(waits).filter(computes).is_some()
    }
}
