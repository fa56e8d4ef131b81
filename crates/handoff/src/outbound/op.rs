//! The requests of a handoff to its session.

use baton_types::{BlockId, Epoch};

use super::done::Done;

/// One request of a handoff.
pub enum Op {
    /// Write one layer of some blocks.
    Write {
        /// The handoff.
        epoch: Epoch,
        /// Layer group.
        group: usize,
        /// Layer in the group.
        layer: usize,
        /// Pairs of (block of the local pool, index in the reservation's list of the group).
        pairs: Vec<(BlockId, u32)>,
        /// The local pool's mark: the blocks may be read once everything stored up to it is there. 0 in host memory.
        after: u64,
    },
    /// Ask for verification, once all writes are applied.
    Complete {
        /// The handoff.
        epoch: Epoch,
        /// Bytes that travel with the completion.
        tail: Vec<u8>,
        /// Callback for the outcome.
        done: Done,
    },
}

impl Op {
    /// The handoff's epoch.
    pub fn epoch(&self) -> Epoch {
        match self {
            Op::Write { epoch, .. } | Op::Complete { epoch, .. } => *epoch,
        }
    }

    /// Block writes it asks for; 0 for a completion.
    pub fn blocks(&self) -> usize {
        if let Op::Write { pairs, .. } = self { pairs.len() } else { 0 }
    }
}
