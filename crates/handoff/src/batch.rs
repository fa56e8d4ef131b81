//! The batch: the unit a session hands to a transport. A batch is one layer of some blocks, each with its offset in the local pool and in
//! the peer's pool.
//!
//! Pure: offsets and lengths, no memory. The transport reads the bytes and carries them.

use baton_types::Epoch;

use crate::wire::WriteHead;

/// A range of a pool: (offset, length), both in bytes.
pub type Range = (usize, usize);

/// Target size of a batch in bytes; exceeded only where one layer of one block is larger. Small enough to fence quickly, and to stay in a
/// core's cache between digest and copy.
pub const BATCH_BYTES: usize = 256 << 10;

/// Most batches under way per TCP connection. While one waits for the peer to read, the next is digested; digesting takes a sixth of the
/// sender's time. Not more than two, so that a digested batch is sent while it is still in the cache.
pub const TCP_BATCHES: usize = 2;

/// One layer's part of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWrite {
    /// Position of the block in the reservation's list of the group.
    pub index: u32,
    /// Offset in bytes where it is read: in the local pool, or in the staging memory that a transport reads instead.
    pub source: usize,
    /// Offset in bytes in the peer's pool.
    pub target: usize,
}

/// One contiguous piece of a batch: one layer of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRun {
    /// Position of the block in the reservation's list of the group.
    pub index: u32,
    /// Offset in bytes where it is read, as in [`BlockWrite`].
    pub source: usize,
    /// Offset in bytes in the peer's pool.
    pub target: usize,
    /// Length in bytes.
    pub len: usize,
    /// Number of the run's first 8-byte digest lane in the block.
    pub lane: u64,
}

/// One layer of at most 256 blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteBatch {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: usize,
    /// Layer in the group.
    pub layer: usize,
    /// Bytes of each block's layer where it is read.
    pub source_len: usize,
    /// Bytes of each block's layer in the peer's pool. Equals `source_len`, unless the values must still be converted to the peer's type.
    pub len: usize,
    /// Number of the layer's first 8-byte digest lane in a block.
    pub lane: u64,
    /// The blocks to write.
    pub writes: Vec<BlockWrite>,
    /// The local pool's mark when the write was queued. The blocks may be read once everything stored up to this mark is there.
    pub after: u64,
    /// Whether the transport must digest the bytes it reads.
    pub digest: bool,
}

impl WriteBatch {
    /// The batch's runs, block by block, in the order of the payload's bytes.
    pub fn runs(&self) -> impl Iterator<Item = BlockRun> + '_ {
        let &WriteBatch { len, lane, .. } = self;
        self.writes.iter().map(move |&BlockWrite { index, source, target }| BlockRun {
            index,
            source,
            target,
            len,
            lane,
        })
    }

    /// Bytes of all runs in the peer's pool.
    pub fn bytes(&self) -> usize {
        self.writes.len() * self.len
    }

    /// The Write frame's body that names these blocks. `payload` is the number of payload bytes that follow the frame.
    pub fn head(&self, payload: u32) -> WriteHead {
        WriteHead {
            epoch: self.epoch,
            group: self.group as u16,
            layer: self.layer as u16,
            payload,
            indexes: self.writes.iter().map(|w| w.index).collect(),
        }
    }
}
