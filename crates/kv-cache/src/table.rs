//! Where one sequence's tokens lie in one layer group.

use std::ops::Range;

use baton_types::BlockId;

/// Stands in a block table where a window has passed: no query sees those positions any more, and no block holds them.
pub const HOLE: BlockId = BlockId(u32::MAX);

/// The blocks of one sequence in one layer group, in token order. Not `Clone`: it is what owns the blocks, and only the
/// pool makes and changes it.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens: u32,
    /// Leading blocks that no window passes.
    pub(crate) sinks: u32,
    pub(crate) holes: u32,
}

impl BlockTable {
    /// The blocks; position `p` lies in slot `p % block_size` of `blocks()[p / block_size]`. All [`HOLE`]s stand in one row:
    /// at the beginning, or behind the group's sinks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens the table covers: positions `0..tokens()` have a slot, or had one before a window passed.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Blocks that are no longer, or never were, here.
    pub fn holes(&self) -> u32 {
        self.holes
    }

    /// The blocks that are here, in token order: those before the holes and those after them.
    pub fn present(&self) -> (&[BlockId], &[BlockId]) {
        let before = if self.holes == 0 { 0 } else { self.sinks as usize };
        (&self.blocks[..before], &self.blocks[before + self.holes as usize..])
    }

    /// Block and slot of a position; `None` when the table does not cover it.
    pub fn slot(&self, position: u32, block_size: u32) -> Option<(BlockId, u32)> {
        if position >= self.tokens {
            return None;
        }
        let block = *self.blocks.get((position / block_size) as usize)?;
        (block != HOLE).then_some((block, position % block_size))
    }

    /// Appends blocks that are not here: they lie between the sinks and the window.
    pub(crate) fn skip(&mut self, n: u32) {
        self.blocks.resize(self.blocks.len() + n as usize, HOLE);
        self.holes += n;
    }

    /// The blocks to give up for a window that begins with block `first`.
    pub(crate) fn passed(&self, first: u32) -> Range<u32> {
        let next = self.sinks + self.holes;
        next..first.max(next)
    }

    /// Gives them up.
    pub(crate) fn cut(&mut self, passed: Range<u32>) {
        self.holes += passed.len() as u32;
        self.blocks.iter_mut().skip(passed.start as usize).take(passed.len()).for_each(|block| *block = HOLE);
    }
}
