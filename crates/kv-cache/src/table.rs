//! Where one sequence's tokens lie in one layer group.

use baton_types::BlockId;

/// Stands in a block table where a window has passed: no query sees those positions any more, and no block holds them.
pub const HOLE: BlockId = BlockId(u32::MAX);

/// The blocks of one sequence in one layer group, in token order. Not `Clone`: it is what owns the blocks, and only the
/// pool makes and changes it.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens: u32,
    pub(crate) holes: u32,
}

impl BlockTable {
    /// The blocks; position `p` lies in slot `p % block_size` of `blocks()[p / block_size]`. The first [`Self::holes`] are
    /// [`HOLE`].
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens the table covers: positions `0..tokens()` have a slot, or had one before a window passed.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Leading blocks that are no longer, or never were, here.
    pub fn holes(&self) -> u32 {
        self.holes
    }

    /// Block and slot of a position; `None` when the table does not cover it.
    pub fn slot(&self, position: u32, block_size: u32) -> Option<(BlockId, u32)> {
        if position >= self.tokens {
            return None;
        }
        let block = *self.blocks.get((position / block_size) as usize)?;
        (block != HOLE).then_some((block, position % block_size))
    }

    /// Gives up the first `n` blocks.
    pub(crate) fn cut(&mut self, n: u32) {
        self.holes = self.holes.max(n);
        self.blocks[..self.holes as usize].fill(HOLE);
    }

    /// The blocks that are here, in token order.
    pub fn present(&self) -> &[BlockId] {
        &self.blocks[self.holes as usize..]
    }
}
