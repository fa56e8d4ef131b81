//! One layer group's blocks: states, owners, counters.
//!
//! The state machine under the tokens of [`crate::KvPools`]. Works on plain ids, so every transition is checked here,
//! and one that does not exist is an error that changes nothing.

use baton_types::BlockId;

use crate::{BlockCounts, KvError};

/// What a block is right now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// Nobody's.
    Free,
    /// Owned by one or more sequences of this worker.
    Used,
    /// Kept for its prefix, owned by no sequence.
    Cached,
    /// Reserved for a peer to write to.
    Lent,
    /// Taken back while a peer could still reach it (I3).
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    state: BlockState,
    refs: u32,
}

/// The blocks of one layer group. Allocation order is a function of the calls made, nothing else.
#[derive(Debug)]
pub struct BlockPool {
    group: usize,
    blocks: Vec<Block>,
    /// Free ids; the last is handed out next.
    free: Vec<BlockId>,
    counts: BlockCounts,
}

impl BlockPool {
    /// `total` free blocks for layer group `group` (which only errors name).
    pub fn new(group: usize, total: u32) -> Self {
        BlockPool {
            group,
            blocks: vec![Block { state: BlockState::Free, refs: 0 }; total as usize],
            free: (0..total).rev().map(BlockId).collect(),
            counts: BlockCounts { total, free: total, ..BlockCounts::default() },
        }
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// A block's state and owners.
    pub fn state(&self, block: BlockId) -> Result<(BlockState, u32), KvError> {
        self.blocks.get(block.0 as usize).map(|b| (b.state, b.refs)).ok_or(self.outside(block))
    }

    /// Free → Used, one owner: appends `n` blocks to `into`, or takes none.
    pub fn allocate(&mut self, n: usize, into: &mut Vec<BlockId>) -> Result<(), KvError> {
        self.take(n, BlockState::Used, into)
    }

    /// Free → Lent, one owner: appends `n` blocks to `into`, or takes none.
    pub fn lend(&mut self, n: usize, into: &mut Vec<BlockId>) -> Result<(), KvError> {
        self.take(n, BlockState::Lent, into)
    }

    /// Used → Used with one more owner.
    pub fn share(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "share", |b| b.state == BlockState::Used)?;
        self.blocks[at].refs += 1;
        Ok(())
    }

    /// Used → Used with one owner less, or Free when that was the last.
    pub fn free(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "free", |b| b.state == BlockState::Used)?;
        if self.blocks[at].refs > 1 {
            self.blocks[at].refs -= 1;
            return Ok(());
        }
        self.put_back(at);
        Ok(())
    }

    /// Lent → Used: what the peer wrote has been verified (I2).
    pub fn accept(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "accept", |b| b.state == BlockState::Lent)?;
        self.shift(at, BlockState::Used);
        Ok(())
    }

    /// Lent → Free: no peer can write to it any more, or none was ever told (I3).
    pub fn reclaim(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "reclaim", |b| b.state == BlockState::Lent)?;
        self.put_back(at);
        Ok(())
    }

    /// Lent, or Used with one owner → Quarantined: a peer or a transfer may still reach it (I3).
    pub fn quarantine(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self
            .expect(block, "quarantine", |b| matches!(b.state, BlockState::Lent | BlockState::Used) && b.refs == 1)?;
        self.shift(at, BlockState::Quarantined);
        Ok(())
    }

    /// Quarantined → Free: the fence is confirmed.
    pub fn clear_quarantine(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "clear the quarantine of", |b| b.state == BlockState::Quarantined)?;
        self.put_back(at);
        Ok(())
    }

    /// I6, by counting: every block in one state, free list and counters agree with the states.
    pub fn check(&self) -> Result<(), KvError> {
        let mut found = BlockCounts { total: self.blocks.len() as u32, ..BlockCounts::default() };
        for (id, block) in self.blocks.iter().enumerate() {
            *counter(&mut found, block.state) += 1;
            let owned = !matches!(block.state, BlockState::Free | BlockState::Cached);
            if owned != (block.refs > 0) {
                return Err(self.corrupt(id, "its owners contradict its state"));
            }
        }
        if found != self.counts || !found.conserved() {
            return Err(KvError::NotConserved { group: self.group, counted: self.counts, found });
        }
        let mut listed = vec![false; self.blocks.len()];
        for id in self.free.iter().map(|b| b.0 as usize) {
            if self.blocks[id].state != BlockState::Free || std::mem::replace(&mut listed[id], true) {
                return Err(self.corrupt(id, "listed as free more than once or while it is not"));
            }
        }
        if self.free.len() as u32 != found.free {
            return Err(KvError::NotConserved { group: self.group, counted: self.counts, found });
        }
        Ok(())
    }

    fn take(&mut self, n: usize, state: BlockState, into: &mut Vec<BlockId>) -> Result<(), KvError> {
        let Some(rest) = self.free.len().checked_sub(n) else {
            return Err(KvError::OutOfBlocks { group: self.group, wanted: n, free: self.free.len() });
        };
        for &block in self.free[rest..].iter().rev() {
            self.blocks[block.0 as usize] = Block { state, refs: 1 };
            into.push(block);
        }
        self.free.truncate(rest);
        self.counts.free -= n as u32;
        *counter(&mut self.counts, state) += n as u32;
        Ok(())
    }

    fn put_back(&mut self, at: usize) {
        self.shift(at, BlockState::Free);
        self.blocks[at].refs = 0;
        self.free.push(BlockId(at as u32));
    }

    fn shift(&mut self, at: usize, to: BlockState) {
        *counter(&mut self.counts, self.blocks[at].state) -= 1;
        *counter(&mut self.counts, to) += 1;
        self.blocks[at].state = to;
        debug_assert!(self.counts.conserved(), "I6: {:?}", self.counts);
    }

    fn expect(
        &self,
        block: BlockId,
        operation: &'static str,
        legal: impl FnOnce(&Block) -> bool,
    ) -> Result<usize, KvError> {
        let found = self.blocks.get(block.0 as usize).ok_or(self.outside(block))?;
        if legal(found) {
            return Ok(block.0 as usize);
        }
        Err(KvError::Illegal { group: self.group, block, operation, state: found.state, refs: found.refs })
    }

    fn outside(&self, block: BlockId) -> KvError {
        KvError::Outside { group: self.group, block, total: self.counts.total }
    }

    fn corrupt(&self, at: usize, what: &'static str) -> KvError {
        KvError::Corrupt { group: self.group, block: BlockId(at as u32), what }
    }
}

fn counter(counts: &mut BlockCounts, state: BlockState) -> &mut u32 {
    match state {
        BlockState::Free => &mut counts.free,
        BlockState::Used => &mut counts.used,
        BlockState::Cached => &mut counts.cached,
        BlockState::Lent => &mut counts.lent,
        BlockState::Quarantined => &mut counts.quarantined,
    }
}
