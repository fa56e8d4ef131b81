//! One layer group's blocks: states, owners, counters.
//!
//! The state machine behind the ownership tokens of [`crate::KvPools`]. It works on plain ids, so it checks every
//! transition. An illegal transition is an error and changes nothing.

use baton_types::BlockId;

use crate::{BlockCounts, KvError};

/// A block's current state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// Owned by nobody, holds nothing; can be allocated or lent.
    Free,
    /// Owned by one or more sequences of this worker.
    Used,
    /// Owned by no sequence; kept because the prefix index names it.
    Cached,
    /// Reserved for a peer to write to.
    Lent,
    /// Taken back while a peer or a transfer may still reach it (I3).
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    state: BlockState,
    refs: u32,
}

/// The blocks of one layer group. The order of allocation depends only on the calls made.
#[derive(Debug)]
pub struct BlockPool {
    group: usize,
    blocks: Vec<Block>,
    /// Free ids; the last one is allocated next.
    free: Vec<BlockId>,
    counts: BlockCounts,
}

impl BlockPool {
    /// A pool of `total` free blocks. `group` is the layer group's index; only error messages use it.
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

    /// A block's state and its number of owners.
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

    /// Used → Used with one more owner, or Cached → Used with one owner.
    pub fn share(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "share", |b| matches!(b.state, BlockState::Used | BlockState::Cached))?;
        if self.blocks[at].state == BlockState::Cached {
            self.shift(at, BlockState::Used);
        }
        self.blocks[at].refs += 1;
        Ok(())
    }

    /// Used → Used with one owner less, or Cached when that was the last owner.
    pub fn cache(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "cache", |b| b.state == BlockState::Used)?;
        self.blocks[at].refs -= 1;
        if self.blocks[at].refs == 0 {
            self.shift(at, BlockState::Cached);
        }
        Ok(())
    }

    /// Cached → Free.
    pub fn evict(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "evict", |b| b.state == BlockState::Cached)?;
        self.put_back(at);
        Ok(())
    }

    /// Used → Used with one owner less, or Free when that was the last owner.
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

    /// Lent → Free: no peer can write to the block any more, or no peer was ever told of it (I3).
    pub fn reclaim(&mut self, block: BlockId) -> Result<(), KvError> {
        let at = self.expect(block, "reclaim", |b| b.state == BlockState::Lent)?;
        self.put_back(at);
        Ok(())
    }

    /// Lent, or Used with one owner → Quarantined: a peer or a transfer may still reach the block (I3).
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

    /// Checks I6 by counting: every block is in one state, and the free list and the counters agree with the states.
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

#[cfg(test)]
mod tests {
    use super::BlockState::*;
    use super::*;

    type Operation = fn(&mut BlockPool, BlockId) -> Result<(), KvError>;

    const OPERATIONS: [(&str, Operation); 8] = [
        ("share", BlockPool::share),
        ("cache", BlockPool::cache),
        ("evict", BlockPool::evict),
        ("free", BlockPool::free),
        ("accept", BlockPool::accept),
        ("reclaim", BlockPool::reclaim),
        ("quarantine", BlockPool::quarantine),
        ("clear the quarantine of", BlockPool::clear_quarantine),
    ];

    /// A pool whose block 0 is in the given state.
    fn pool(state: BlockState, refs: u32) -> BlockPool {
        let mut pool = BlockPool::new(0, 3);
        if state != Free {
            pool.take(1, state, &mut Vec::new()).unwrap();
            pool.blocks[0].refs = refs;
        }
        pool.check().unwrap();
        pool
    }

    #[test]
    fn every_transition_is_as_documented_and_every_other_changes_nothing() {
        let states = [(Free, 0), (Used, 1), (Used, 2), (Cached, 0), (Lent, 1), (Quarantined, 1)];
        let legal = |from, name| match (from, name) {
            ((Used, n), "share") => Some((Used, n + 1)),
            ((Cached, 0), "share") => Some((Used, 1)),
            ((Used, 1), "cache") => Some((Cached, 0)),
            ((Used, 1), "free") | ((Lent, 1), "reclaim") | ((Cached, 0), "evict") => Some((Free, 0)),
            ((Used, 2), "free" | "cache") => Some((Used, 1)),
            ((Lent, 1), "accept") => Some((Used, 1)),
            ((Lent, 1) | (Used, 1), "quarantine") => Some((Quarantined, 1)),
            ((Quarantined, 1), "clear the quarantine of") => Some((Free, 0)),
            _ => None,
        };
        for (state, refs) in states {
            for (name, operation) in OPERATIONS {
                let mut pool = pool(state, refs);
                let done = operation(&mut pool, BlockId(0));
                let expected = legal((state, refs), name);
                let illegal = KvError::Illegal { group: 0, block: BlockId(0), operation: name, state, refs };
                assert_eq!(done, expected.map(|_| ()).ok_or(illegal), "{name} from {state:?}");
                assert_eq!(pool.state(BlockId(0)), Ok(expected.unwrap_or((state, refs))), "{name} from {state:?}");
                assert_eq!(pool.check(), Ok(()), "I6 after {name} from {state:?}");
            }
        }
    }

    #[test]
    fn a_block_outside_is_an_error_not_a_panic() {
        let mut pool = pool(Free, 0);
        for (name, operation) in OPERATIONS {
            let outside = KvError::Outside { group: 0, block: BlockId(3), total: 3 };
            assert_eq!(operation(&mut pool, BlockId(3)), Err(outside), "{name}");
        }
    }

    #[test]
    fn takes_all_or_nothing_in_a_fixed_order() {
        let (mut pool, mut got) = (BlockPool::new(4, 4), Vec::new());
        pool.allocate(3, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2].map(BlockId));
        let none = KvError::OutOfBlocks { group: 4, wanted: 2, free: 1 };
        assert_eq!(pool.lend(2, &mut got), Err(none));
        assert_eq!((got.len(), pool.counts().free), (3, 1));
        got.drain(..).rev().for_each(|block| pool.free(block).unwrap());
        pool.lend(4, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2, 3].map(BlockId), "given back in reverse, they come again in order");
    }

    /// [`BlockPool::check`] detects each way to break I6.
    #[test]
    fn check_sees_each_corruption() {
        let breaks: [fn(&mut BlockPool); 8] = [
            |p| p.counts.used += 1,
            |p| p.counts.total += 1,
            |p| p.counts.lent += 1,
            |p| p.blocks[0].state = Free,
            |p| p.blocks[1].state = Quarantined,
            |p| p.blocks[0].refs = 0,
            |p| p.free[0] = p.free[1],
            |p| p.free.truncate(1),
        ];
        for (number, damage) in breaks.into_iter().enumerate() {
            let mut pool = pool(Used, 1);
            damage(&mut pool);
            assert!(pool.check().is_err(), "corruption {number}");
        }
    }
}
