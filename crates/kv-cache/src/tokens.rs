//! Ownership tokens: values that own blocks. They cannot be copied, and the transition that ends one consumes it.

use baton_types::BlockId;

use crate::prefix::{NodeId, Parent};
use crate::{BlockTable, NameChain, Prefix};

/// The blocks of a sequence that runs here: one block table per layer group, all blocks Used. Full blocks may have other
/// owners too.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropped tables leak their blocks; give them back with KvPools::free"]
pub struct Tables {
    pub(crate) tables: Vec<BlockTable>,
    pub(crate) chain: Option<Chain>,
    /// Blocks to copy before the first token is computed, one per layer group; empty when there is nothing to copy.
    pub(crate) sources: Vec<BlockId>,
    /// Index in each block table of the block that the copy is written to.
    pub(crate) copy_to: u32,
}

/// Blocks reserved for a sequence whose KV a peer writes: one block table per layer group. Leading blocks are shared with
/// the prefix cache; the peer may write to the others, which are Lent.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropped tables leak their blocks; accept, reclaim or quarantine them"]
pub struct LentTables {
    pub(crate) tables: Vec<BlockTable>,
    pub(crate) chain: Option<Chain>,
    /// Leading blocks of each table that are shared.
    pub(crate) shared: u32,
}

/// Blocks that nobody may reuse before [`crate::KvPools::clear_quarantine`].
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a dropped quarantine leaks its blocks; clear it with KvPools::clear_quarantine"]
pub struct Quarantine(pub(crate) Vec<BlockTable>);

/// How many of a sequence's blocks are in the prefix index, and where the next one goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Chain {
    pub prefix: Prefix,
    /// Leading full blocks that are indexed. The tables hold the same blocks as the index.
    pub blocks: u32,
    /// The last indexed full block, or the root. The sequence keeps a block of it, so it stays indexed.
    pub tip: Parent,
    /// Where its name stands, or the root's.
    pub name: NameChain,
    /// The node of the partly full block after `tip`, if it is indexed.
    pub partial: Option<NodeId>,
}

impl Chain {
    pub fn new(prefix: Prefix) -> Chain {
        Chain { prefix, blocks: 0, tip: Parent::Root(prefix.seed), name: prefix.root, partial: None }
    }
}

/// A copy of one block's KV to another block, in all layers of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// Layer group.
    pub group: usize,
    /// Source block.
    pub from: BlockId,
    /// Destination block.
    pub to: BlockId,
}

impl Tables {
    /// The block tables, one per layer group.
    pub fn as_slice(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Tokens covered in every layer group. A group without a window may cover more.
    pub fn tokens(&self) -> u32 {
        self.tables.iter().map(|table| table.tokens).min().unwrap_or(0)
    }

    /// Blocks owned, over all groups.
    pub fn blocks(&self) -> usize {
        self.tables.iter().map(|table| table.blocks.len() - table.holes as usize).sum()
    }

    /// Copies to make before the first token is computed. Empty after [`crate::KvPools::copied`].
    pub fn copies(&self) -> impl Iterator<Item = BlockCopy> {
        let to = self.tables.iter().map(|table| table.blocks.get(self.copy_to as usize));
        let pairs = self.sources.iter().zip(to).enumerate();
        pairs.filter_map(|(group, (from, to))| Some(BlockCopy { group, from: *from, to: *to? }))
    }

    /// Source blocks of those copies. These tables hold a reference to them until the copies are made.
    pub fn sources(&self) -> &[BlockId] {
        &self.sources
    }

    /// Whether blocks of this sequence enter the prefix index as they fill up.
    pub fn indexed(&self) -> bool {
        self.chain.is_some()
    }
}

impl LentTables {
    /// The block tables, one per layer group.
    pub fn as_slice(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Leading blocks of each table whose KV is here already. The others are lent.
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Whether blocks that arrive from the peer enter the prefix index.
    pub fn indexed(&self) -> bool {
        self.chain.is_some()
    }
}

impl Quarantine {
    /// The block tables, one per layer group.
    pub fn as_slice(&self) -> &[BlockTable] {
        &self.0
    }
}
