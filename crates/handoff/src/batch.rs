//! What a session hands to a transport at a time: one layer of some blocks, each from its place in the local pool to its place in the
//! peer's.
//!
//! Pure: offsets and lengths, no memory. Who reads the bytes, and how they travel, is the transport's business.

use baton_types::Epoch;

use crate::wire::WriteHead;

/// A range of a pool: offset and bytes.
pub type Range = (usize, usize);

/// Bytes of a batch, unless a single block is larger: small enough to fence quickly and to stay in a core's cache
/// between digest and copy.
pub const BATCH_BYTES: usize = 256 << 10;

/// Batches over TCP for each connection: while one waits until its peer has read, the next is digested, which takes a sixth of the
/// sender's time; and of several connections the others go on with as many. Not more: what is digested is to be sent while it is in the
/// cache.
pub const TCP_BATCHES: usize = 2;

/// One layer's part of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWrite {
    /// Its position in the reservation's list of the group.
    pub index: u32,
    /// Offset where it is read: in the local pool, or in what a transport has put in its place.
    pub source: usize,
    /// Offset in the peer's pool.
    pub target: usize,
}

/// One contiguous piece of a batch: a block's layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRun {
    /// Of the block with this position.
    pub index: u32,
    /// Offset where it is read.
    pub source: usize,
    /// Offset in the peer's pool.
    pub target: usize,
    /// Bytes.
    pub len: usize,
    /// Number of its first digest lane in the block.
    pub lane: u64,
}

/// One layer of some blocks; at most 256 of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteBatch {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: usize,
    /// Layer in the group.
    pub layer: usize,
    /// Bytes of each block's layer where they are read.
    pub source_len: usize,
    /// Bytes of each block's layer in the peer's pool. The same unless values change their type on the way, which they have not yet.
    pub len: usize,
    /// First digest lane of the layer in a block.
    pub lane: u64,
    /// What goes where.
    pub writes: Vec<BlockWrite>,
    /// The local pool's mark when it was queued: all of it is stored after that.
    pub after: u64,
    /// Whether the transport is to digest what it reads.
    pub digest: bool,
}

impl WriteBatch {
    /// Its pieces, block by block: the order of bytes in a payload.
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

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.writes.len() * self.len
    }

    /// The Write frame that names these blocks.
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
