//! What a handoff asks of its session.

use baton_types::{BlockId, Epoch};

use super::done::Done;

/// One request of a handoff, in its order.
pub enum Op {
    /// One layer of some blocks: pairs of (block of the local pool, index in the reservation's list of the group).
    Write {
        /// The handoff.
        epoch: Epoch,
        /// Layer group.
        group: usize,
        /// Layer in the group.
        layer: usize,
        /// What goes where.
        pairs: Vec<(BlockId, u32)>,
        /// The local pool's mark: all of it is stored after that. 0 in host memory.
        after: u64,
    },
    /// To be verified, once all writes are applied.
    Complete {
        /// The handoff.
        epoch: Epoch,
        /// What travels along.
        tail: Vec<u8>,
        /// To be told the outcome.
        done: Done,
    },
}

impl Op {
    /// Whose it is.
    pub fn epoch(&self) -> Epoch {
        match self {
            Op::Write { epoch, .. } | Op::Complete { epoch, .. } => *epoch,
        }
    }

    /// Block writes it asks for.
    pub fn blocks(&self) -> usize {
        if let Op::Write { pairs, .. } = self { pairs.len() } else { 0 }
    }
}
