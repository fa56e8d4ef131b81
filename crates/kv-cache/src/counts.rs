//! How many blocks are in each state. Workers report these counts, and I6 is checked on them.

use std::ops::{Add, AddAssign};

/// Blocks by state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockCounts {
    /// All blocks.
    pub total: u32,
    /// Free to allocate or lend.
    pub free: u32,
    /// Owned by a sequence.
    pub used: u32,
    /// Owned by no sequence, kept for their prefix.
    pub cached: u32,
    /// Reserved for a peer to write to.
    pub lent: u32,
    /// Taken back, while a peer or a transfer may still reach them.
    pub quarantined: u32,
}

impl BlockCounts {
    /// True when every block is in exactly one state (I6).
    pub fn conserved(&self) -> bool {
        let sum = [self.free, self.used, self.cached, self.lent, self.quarantined].map(u64::from).iter().sum::<u64>();
        sum == u64::from(self.total)
    }

    /// True when no block has an owner. A drained worker must report this.
    pub fn idle(&self) -> bool {
        self.conserved() && self.free + self.cached == self.total
    }
}

impl Add for BlockCounts {
    type Output = BlockCounts;
    fn add(self, other: BlockCounts) -> BlockCounts {
        BlockCounts {
            total: self.total + other.total,
            free: self.free + other.free,
            used: self.used + other.used,
            cached: self.cached + other.cached,
            lent: self.lent + other.lent,
            quarantined: self.quarantined + other.quarantined,
        }
    }
}

impl AddAssign for BlockCounts {
    fn add_assign(&mut self, other: BlockCounts) {
        *self = *self + other;
    }
}
