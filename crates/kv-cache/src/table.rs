//! Block tables: where the KV of one sequence's tokens lies in one layer group.

use std::ops::Range;

use baton_types::BlockId;

/// Placeholder in a block table for a block that no query sees any more, because the window has passed it. No block holds
/// those positions.
pub const HOLE: BlockId = BlockId(u32::MAX);

/// The blocks of one sequence in one layer group, in token order. Not `Clone`, because it owns the blocks. Only the pool
/// makes and changes it.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens: u32,
    /// Leading blocks that hold attention sinks; the window never passes them.
    pub(crate) sinks: u32,
    pub(crate) holes: u32,
}

impl BlockTable {
    /// The blocks: position `p` lies in slot `p % block_size` of `blocks()[p / block_size]`. All [`HOLE`]s are contiguous, at
    /// the beginning or right after the sinks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens the table covers: each position in `0..tokens()` has a slot or lies in a [`HOLE`].
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Number of [`HOLE`]s: blocks that were given back, or never taken.
    pub fn holes(&self) -> u32 {
        self.holes
    }

    /// The blocks before the holes and the blocks after them, in token order.
    pub fn present(&self) -> (&[BlockId], &[BlockId]) {
        let before = if self.holes == 0 { 0 } else { self.sinks as usize };
        (&self.blocks[..before], &self.blocks[before + self.holes as usize..])
    }

    /// Block and slot of a position; `None` when the table does not cover it, or it lies in a [`HOLE`].
    pub fn slot(&self, position: u32, block_size: u32) -> Option<(BlockId, u32)> {
        if position >= self.tokens {
            return None;
        }
        let block = *self.blocks.get((position / block_size) as usize)?;
        (block != HOLE).then_some((block, position % block_size))
    }

    /// Appends `n` holes, for blocks between the sinks and the window.
    pub(crate) fn skip(&mut self, n: u32) {
        self.blocks.resize(self.blocks.len() + n as usize, HOLE);
        self.holes += n;
    }

    /// Indexes of the blocks to give back when the window begins at block `first`.
    pub(crate) fn passed(&self, first: u32) -> Range<u32> {
        let next = self.sinks + self.holes;
        next..first.max(next)
    }

    /// Turns the blocks at these indexes into holes.
    pub(crate) fn cut(&mut self, passed: Range<u32>) {
        self.holes += passed.len() as u32;
        self.blocks.iter_mut().skip(passed.start as usize).take(passed.len()).for_each(|block| *block = HOLE);
    }
}
