//! Bulk copy of blocks from the local pool into a peer's: the one thing transports differ in.
//!
//! A session's thread submits one batch at a time and polls until it is flushed. Everything else (access, digests,
//! completion, fencing) is the session's and the same for all. Implementations must pass the suite in `conformance`.

use baton_types::{BlockId, Epoch};

use crate::error::TransferError;
use crate::link::{Link, Range};
use crate::options::TransportKind;
use crate::wire::WriteHead;

/// Bytes of a batch, unless a single block is larger: small enough to fence quickly and to stay in a core's cache
/// between digest and copy.
pub(crate) const BATCH_BYTES: usize = 256 << 10;

/// One layer's part of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWrite {
    /// Where it lies in the local pool.
    pub source: Range,
    /// Its position in the reservation's list of the group.
    pub index: u32,
    /// The block in the peer's pool.
    pub target: BlockId,
}

/// One layer of some blocks; at most [`crate::wire::MAX_WRITE_BLOCKS`] of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: usize,
    /// Layer in the group.
    pub layer: usize,
    /// What goes where.
    pub writes: Vec<BlockWrite>,
}

impl Batch {
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

/// How far the batch is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The local pool is not read any more, and a frame queued from now on reaches the peer after the batch has been
    /// applied there.
    Flushed,
    /// More can be done right away.
    Runnable,
    /// The link must move first.
    Blocked,
}

/// One-sided writes into one peer's pool.
pub(crate) trait Transport: Send {
    /// Which one.
    fn kind(&self) -> TransportKind;

    /// Starts a batch; the previous one is flushed or cancelled.
    fn submit(&mut self, batch: Batch, link: &mut Link) -> Result<(), TransferError>;

    /// Goes on with the batch for a short while.
    fn poll(&mut self, link: &mut Link) -> Result<Progress, TransferError>;

    /// Gives the batch up. From the return on the local pool is not read, and nothing is written to the peer's pool
    /// that the peer does not apply itself, in order (I3).
    fn cancel(&mut self, link: &mut Link);
}
