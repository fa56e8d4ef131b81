//! Which handoff's op goes next: that of the handoff with the least left to write. So a short handoff does not wait behind a long prefix,
//! and its decode begins sooner. Each handoff's own ops keep their order, and so do its layers: the layer that decode needs first goes
//! first.
//!
//! Shortest remaining first gives the least mean time to completion. A handoff that younger ones have overtaken [`OVERTAKES`] times goes
//! before the others, so none starves (I5). Pure: no clock, no I/O.

use std::collections::VecDeque;

use baton_types::Epoch;

use super::op::Op;

/// How often younger handoffs may overtake one, each time with one op: at most 256 blocks of a layer.
const OVERTAKES: u32 = 256;

/// A handoff and its queued ops.
struct Turn {
    epoch: Epoch,
    /// Block layers not taken up yet.
    left: u64,
    ops: VecDeque<Op>,
    overtaken: u32,
}

/// All handoffs of a session, the oldest first.
#[derive(Default)]
pub(super) struct Turns {
    turns: Vec<Turn>,
}

impl Turns {
    /// Adds a handoff with `left` block layers to write.
    pub(super) fn begin(&mut self, epoch: Epoch, left: u64) {
        self.turns.push(Turn { epoch, left, ops: VecDeque::new(), overtaken: 0 });
    }

    /// Queues an op. A handoff that is not known any more has nothing left, so its op is taken up soon and it learns of its end.
    pub(super) fn push(&mut self, op: Op) {
        let epoch = op.epoch();
        let at = self.turns.iter().position(|turn| turn.epoch == epoch).unwrap_or_else(|| {
            self.begin(epoch, 0);
            self.turns.len() - 1
        });
        self.turns[at].ops.push_back(op);
    }

    /// Takes the next op among those that `ready` accepts.
    pub(super) fn next(&mut self, ready: impl Fn(&Op) -> bool) -> Option<Op> {
        let is_ready = |turn: &&Turn| turn.ops.front().is_some_and(&ready);
        let by_turn = |&(at, turn): &(usize, &Turn)| match turn.overtaken >= OVERTAKES {
            true => (0, 0, at),
            false => (1, turn.left, at),
        };
        let (at, _) = self.turns.iter().enumerate().filter(|(_, turn)| is_ready(turn)).min_by_key(by_turn)?;
        for turn in &mut self.turns[..at] {
            turn.overtaken += u32::from(turn.ops.front().is_some_and(&ready));
        }
        let turn = &mut self.turns[at];
        let op = turn.ops.pop_front()?;
        turn.left = turn.left.saturating_sub(op.blocks() as u64);
        if matches!(op, Op::Complete { .. }) {
            self.turns.remove(at);
        }
        Some(op)
    }

    /// Removes a handoff; returns the ops it had queued.
    pub(super) fn forget(&mut self, epoch: Epoch) -> VecDeque<Op> {
        let at = self.turns.iter().position(|turn| turn.epoch == epoch);
        at.map(|at| self.turns.remove(at).ops).unwrap_or_default()
    }

    /// Takes all queued ops.
    pub(super) fn take(&mut self) -> VecDeque<Op> {
        std::mem::take(&mut self.turns).into_iter().flat_map(|turn| turn.ops).collect()
    }
}

#[cfg(test)]
mod tests {
    use baton_types::BlockId;

    use super::*;
    use crate::outbound::Done;

    fn write(epoch: u64, blocks: u32) -> Op {
        let pairs = (0..blocks).map(|i| (BlockId(i), i)).collect();
        Op::Write { epoch: Epoch(epoch), group: 0, layer: 0, pairs, after: 0 }
    }

    fn complete(epoch: u64) -> Op {
        Op::Complete { epoch: Epoch(epoch), tail: vec![], done: Done::new(Box::new(|_| {})) }
    }

    fn order(turns: &mut Turns) -> Vec<u64> {
        std::iter::from_fn(|| turns.next(|_| true)).map(|op| op.epoch().0).collect()
    }

    #[test]
    fn what_is_nearly_done_goes_first_and_each_keeps_its_order() {
        let mut turns = Turns::default();
        turns.begin(Epoch(1), 100);
        (0..3).for_each(|_| turns.push(write(1, 10)));
        turns.begin(Epoch(2), 20);
        turns.push(write(2, 10));
        turns.push(write(2, 10));
        turns.push(complete(2));
        assert_eq!(order(&mut turns), [2, 2, 2, 1, 1, 1]);
        // Epoch 3 has 30 block layers left, epoch 1 has 70.
        turns.begin(Epoch(3), 30);
        turns.push(write(3, 30));
        turns.push(write(1, 70));
        turns.push(complete(1));
        assert_eq!(order(&mut turns), [3, 1, 1]);
        assert_eq!(turns.turns.len(), 1, "one is not complete");
    }

    #[test]
    fn who_is_not_let_in_yet_holds_up_nobody() {
        let mut turns = Turns::default();
        turns.begin(Epoch(1), 10);
        turns.begin(Epoch(2), 100);
        turns.push(write(1, 10));
        turns.push(write(2, 10));
        let next = turns.next(|op| op.epoch() == Epoch(2)).map(|op| op.epoch());
        assert_eq!(next, Some(Epoch(2)));
        assert!(turns.next(|op| op.epoch() == Epoch(2)).is_none());
        assert_eq!(turns.turns[0].overtaken, 0, "it could not have gone");
        assert_eq!(turns.forget(Epoch(1)).len(), 1);
        assert!(order(&mut turns).is_empty());
    }

    #[test]
    fn the_longest_is_overtaken_only_so_often() {
        let mut turns = Turns::default();
        turns.begin(Epoch(0), u64::MAX);
        turns.push(write(0, 1));
        let mut before = 0;
        for epoch in 1.. {
            turns.begin(Epoch(epoch), 1);
            turns.push(write(epoch, 1));
            match turns.next(|_| true).map(|op| op.epoch().0) {
                Some(0) => break,
                _ => before += 1,
            }
        }
        assert_eq!(before, OVERTAKES);
    }
}
