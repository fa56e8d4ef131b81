//! What owns blocks: values that cannot be copied, consumed by the transition that ends them.

use baton_types::BlockId;

use crate::prefix::{NodeId, Parent};
use crate::{BlockTable, Prefix};

/// One block table per layer group, all Used: what a sequence that runs here owns. Full blocks may have other owners too.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropped tables leak their blocks; give them back with KvPools::free"]
pub struct Tables {
    pub(crate) tables: Vec<BlockTable>,
    pub(crate) chain: Option<Chain>,
    /// Blocks to copy before the first token is computed, one per layer group, to those at index [`Self::copy_to`].
    pub(crate) sources: Vec<BlockId>,
    pub(crate) copy_to: u32,
}

/// One block table per layer group: leading blocks shared with the prefix cache, the others Lent, what a peer may write to.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropped tables leak their blocks; accept, reclaim or quarantine them"]
pub struct LentTables {
    pub(crate) tables: Vec<BlockTable>,
    pub(crate) chain: Option<Chain>,
    pub(crate) shared: u32,
}

/// Blocks that are nobody's before [`crate::KvPools::clear_quarantine`].
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a dropped quarantine leaks its blocks; clear it with KvPools::clear_quarantine"]
pub struct Quarantine(pub(crate) Vec<BlockTable>);

/// How far a sequence's blocks are in the prefix index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Chain {
    pub prefix: Prefix,
    /// Leading full blocks that are indexed; the table's are the index's.
    pub blocks: u32,
    /// The last of them. Its owner keeps a block of it, so that it stays.
    pub tip: Parent,
    /// The block after it, indexed with fewer tokens.
    pub partial: Option<NodeId>,
}

impl Chain {
    pub fn new(prefix: Prefix) -> Chain {
        Chain { prefix, blocks: 0, tip: Parent::Root(prefix.seed), partial: None }
    }
}

/// One block's KV to be copied to another, in all layers of its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// Layer group.
    pub group: usize,
    /// Read from here.
    pub from: BlockId,
    /// Written here.
    pub to: BlockId,
}

impl Tables {
    /// The block tables, one per layer group.
    pub fn as_slice(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Tokens covered in every group; in those without a window there may be more.
    pub fn tokens(&self) -> u32 {
        self.tables.iter().map(|table| table.tokens).min().unwrap_or(0)
    }

    /// Blocks owned, over all groups.
    pub fn blocks(&self) -> usize {
        self.tables.iter().map(|table| table.blocks.len() - table.holes as usize).sum()
    }

    /// What must be copied before the first token is computed; nothing after [`crate::KvPools::copied`].
    pub fn copies(&self) -> impl Iterator<Item = BlockCopy> {
        let to = self.tables.iter().map(|table| table.blocks.get(self.copy_to as usize));
        let pairs = self.sources.iter().zip(to).enumerate();
        pairs.filter_map(|(group, (from, to))| Some(BlockCopy { group, from: *from, to: *to? }))
    }

    /// Blocks others own that these tables keep from changing until the copy is made.
    pub fn sources(&self) -> &[BlockId] {
        &self.sources
    }

    /// Whether blocks that fill up become part of the prefix index.
    pub fn indexed(&self) -> bool {
        self.chain.is_some()
    }
}

impl LentTables {
    /// The block tables, one per layer group.
    pub fn as_slice(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Leading blocks of each table that are here already; the others are lent.
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Whether what arrives becomes part of the prefix index.
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
