//! How many blocks are in which state; what workers report and what I6 is checked on.

use std::ops::{Add, AddAssign};

/// Blocks by state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockCounts {
    /// All blocks.
    pub total: u32,
    /// Nobody's.
    pub free: u32,
    /// Owned by a sequence.
    pub used: u32,
    /// Kept for their prefix, owned by no sequence.
    pub cached: u32,
    /// Reserved for a peer to write to.
    pub lent: u32,
    /// Taken back, not yet known to be out of a peer's reach.
    pub quarantined: u32,
}

impl BlockCounts {
    /// I6: every block is in exactly one state.
    pub fn conserved(&self) -> bool {
        let sum = [self.free, self.used, self.cached, self.lent, self.quarantined].map(u64::from).iter().sum::<u64>();
        sum == u64::from(self.total)
    }

    /// Nothing is owned by anybody: what a drained worker must report.
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
