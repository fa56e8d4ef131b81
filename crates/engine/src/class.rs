//! Classes of sequences: batch ones are served with what interactive ones leave, and give way to them.
//!
//! - Batch sequences come after all interactive ones in every order ([`crate::Order`]), and never age past them.
//! - An interactive sequence that finds no place or no blocks takes those of batch sequences, the last in turn first. What
//!   these had computed stays cached as long as nobody needs the room, as after any preemption.
//! - Batch sequences do not fill the queue for interactive ones.

use baton_types::{Class, SeqId};

use crate::Engine;
use crate::engine::MOST_ENDED;
use crate::sequence::{Sequence, Turn};

impl Engine {
    /// Preempts batch sequences until the interactive ones that wait have places and blocks to start. While a step is in
    /// flight none is preempted: returns false if one should be.
    pub(crate) fn make_way(&mut self) -> bool {
        if !self.running.last().is_some_and(Turn::is_batch) {
            return true;
        }
        let starts = |turn: &&Turn| self.sequences.get(&turn.seq).is_some_and(|s| s.parked.is_none());
        let interactive = self.waiting.iter().take_while(|turn| !turn.is_batch()).filter(starts);
        let waiting: Vec<SeqId> = interactive.take(self.config.max_running as usize).map(|turn| turn.seq).collect();
        // Those before it that start now, and the blocks that they take.
        let (mut before, mut blocks) = (0, 0);
        for seq in waiting {
            let Some(seating) = self.sequences.get(&seq).and_then(|s| self.seating(s).ok()) else { continue };
            loop {
                let place = self.running() + self.receiving() + before < self.config.max_running;
                // One spare block for each running sequence, as when it starts.
                let spare = self.running() + before + blocks;
                if place && self.pools.fits(&seating.hit, seating.need, spare).is_ok() {
                    break;
                }
                match self.last_batch() {
                    None => return true,
                    Some(_) if self.in_flight > 0 => return false,
                    Some(victim) => self.preempt(victim),
                }
            }
            before += 1;
            blocks += self.sequences.get(&seq).map_or(0, |s| self.pools.blocks_for(s.len() - seating.hit.tokens()));
        }
        true
    }

    /// Has the prompt of batch work kept as soon as it is computed: when the sequence gives way, its blocks are another's at once.
    pub(crate) fn keep_early(&mut self, seq: SeqId) {
        let Some(sequence) = self.sequences.get(&seq).filter(|sequence| sequence.turn.is_batch()) else { return };
        if let (Some(ended), Some(left)) = (&mut self.ended, sequence.leaves(sequence.computed)) {
            ended.extend((ended.len() < MOST_ENDED).then_some(left));
        }
    }

    /// The batch sequence that is preempted next.
    fn last_batch(&self) -> Option<SeqId> {
        let batch = self.running.iter().rev().take_while(|turn| turn.is_batch()).map(|turn| turn.seq);
        batch.into_iter().find(|seq| self.sequences.get(seq).is_some_and(Sequence::preemptible))
    }

    /// Waiting sequences that count when one of this class comes: batch ones count for batch ones alone.
    pub(crate) fn waiting_before(&self, class: Class) -> u32 {
        match class {
            Class::Batch => self.waiting(),
            Class::Interactive => self.waiting.iter().take_while(|turn| !turn.is_batch()).count() as u32,
        }
    }

    /// Blocks that interactive sequences may take from batch ones: those of the running ones, and those that waiting ones will
    /// take ([`Engine::room`] counts neither as room). Blocks that others share count too.
    pub fn batch_blocks(&self) -> i64 {
        let of = |turn: &Turn| self.sequences.get(&turn.seq);
        let running = self.running.iter().rev().take_while(|turn| turn.is_batch()).filter_map(of);
        let owned =
            running.filter(|s| s.preemptible()).flat_map(Sequence::tables).map(|table| table.blocks().len() as i64);
        let waiting = self.waiting.iter().rev().take_while(|turn| turn.is_batch()).filter_map(of);
        owned.sum::<i64>() + waiting.map(|s| self.wanted(s)).sum::<i64>()
    }
}
