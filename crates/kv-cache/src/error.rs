//! Errors of block accounting.

use baton_types::{BatonError, BlockId, ErrorKind};

use crate::{BlockCounts, BlockState};

/// Errors of this crate. All but [`KvError::OutOfBlocks`] and [`KvError::Geometry`] are defects of the caller.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KvError {
    /// Not enough blocks are free or evictable now. Nothing was taken.
    #[error("layer group {group} has {free} KV blocks to give, {wanted} are needed")]
    OutOfBlocks {
        /// Layer group.
        group: usize,
        /// Blocks asked for.
        wanted: usize,
        /// Blocks free or cached.
        free: usize,
    },
    /// An invalid pool geometry.
    #[error("pool geometry: {field} is {value}; it must be {must}")]
    Geometry {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What is allowed.
        must: &'static str,
    },
    /// An illegal transition from the block's state.
    #[error("cannot {operation} block {block} of layer group {group}: it is {state:?} with {refs} owners")]
    Illegal {
        /// Layer group.
        group: usize,
        /// Block.
        block: BlockId,
        /// The transition asked for.
        operation: &'static str,
        /// The block's state, unchanged.
        state: BlockState,
        /// The block's owners, unchanged.
        refs: u32,
    },
    /// A block the pool does not have.
    #[error("block {block} is outside layer group {group}, which has {total} blocks")]
    Outside {
        /// Layer group.
        group: usize,
        /// Block.
        block: BlockId,
        /// Blocks of the pool.
        total: u32,
    },
    /// Block tables of another pool, which has another number of layer groups.
    #[error("block tables of {theirs} layer groups given to a pool of {ours}")]
    ForeignTables {
        /// Groups of this pool.
        ours: usize,
        /// Groups of the tables.
        theirs: usize,
    },
    /// I6 broken: counters and states disagree.
    #[error("blocks of layer group {group} are not conserved: counted {counted:?}, found {found:?}")]
    NotConserved {
        /// Layer group.
        group: usize,
        /// The counters.
        counted: BlockCounts,
        /// The counts derived from the blocks' states.
        found: BlockCounts,
    },
    /// I6 broken: the prefix index and the blocks disagree.
    #[error("prefix index: {0}")]
    Index(String),
    /// I6 broken: a block's own record contradicts itself.
    #[error("block {block} of layer group {group}: {what}")]
    Corrupt {
        /// Layer group.
        group: usize,
        /// Block.
        block: BlockId,
        /// The contradiction.
        what: &'static str,
    },
}

impl BatonError for KvError {
    fn kind(&self) -> ErrorKind {
        match self {
            KvError::OutOfBlocks { .. } => ErrorKind::ResourceExhausted,
            KvError::Geometry { .. } => ErrorKind::InvalidArgument,
            _ => ErrorKind::Internal,
        }
    }
}
