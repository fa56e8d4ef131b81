//! Where one sequence's tokens lie in one layer group.

use baton_types::BlockId;

/// The blocks of one sequence in one layer group, in token order. Not `Clone`: it is what owns the blocks, and only the
/// pool makes and changes it.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens: u32,
}

impl BlockTable {
    /// The blocks; position `p` lies in slot `p % block_size` of `blocks()[p / block_size]`.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens the table covers: positions `0..tokens()` have a slot.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Block and slot of a position; `None` when the table does not cover it.
    pub fn slot(&self, position: u32, block_size: u32) -> Option<(BlockId, u32)> {
        if position >= self.tokens {
            return None;
        }
        let block = self.blocks.get((position / block_size) as usize)?;
        Some((*block, position % block_size))
    }
}
