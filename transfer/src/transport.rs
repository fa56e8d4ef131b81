//! Bulk copy of blocks from the local pool into a peer's: the one thing transports differ in.
//!
//! A session's thread submits batches, as many at a time as the transport takes, and polls until they are flushed. Everything else (access, digests,
//! completion, fencing) is the session's and the same for all. Implementations must pass the suite in `conformance`.

use std::os::fd::BorrowedFd;

use baton_types::{Epoch, digest_run};

use crate::device::{Pool, Staged};
use crate::error::TransferError;
use crate::links::Links;
use crate::options::TransportKind;
use crate::wire::WriteHead;

/// Bytes of a batch, unless a single block is larger: small enough to fence quickly and to stay in a core's cache
/// between digest and copy.
pub(crate) const BATCH_BYTES: usize = 256 << 10;
/// The same where a device copies: large enough that its launch costs less than its bytes, and still copied within a millisecond.
pub(crate) const DEVICE_BATCH_BYTES: usize = 16 << 20;
/// The same where devices only digest and a network carries: a digest's launch costs less, and what is given up arrives soon over a slow one.
pub(crate) const PUT_BATCH_BYTES: usize = 2 << 20;

/// One layer's part of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWrite {
    /// Its position in the reservation's list of the group.
    pub index: u32,
    /// Offset of the block in the local pool, or in the staging memory of the batch.
    pub source: usize,
    /// Offset of the block in the peer's pool.
    pub target: usize,
}

/// One contiguous piece of a batch: a block's layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Of the block with this position.
    pub index: u32,
    /// Offset in the local pool, or in the staging memory of the batch.
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
pub struct Batch {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: usize,
    /// Layer in the group.
    pub layer: usize,
    /// Bytes of each block's layer where they are read: in the local pool, or in the staging memory of the batch.
    pub(crate) source_len: usize,
    /// Bytes of each block's layer in the peer's pool. The same unless values change their type on the way, which they have not yet.
    pub(crate) len: usize,
    /// First digest lane of the layer in a block.
    pub(crate) lane: u64,
    /// What goes where.
    pub writes: Vec<BlockWrite>,
    /// The local pool's mark when it was queued: all of it is stored after that.
    pub(crate) after: u64,
    /// Whether digests are wanted from a transport that [makes them](Transport::digests).
    pub(crate) digest: bool,
    /// Memory of its own that it is sent from instead of the pool, in the order of its runs and without gaps.
    pub(crate) staged: Option<Staged>,
}

impl Batch {
    /// Its pieces, block by block: the order of bytes in a payload.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let &Batch { len, lane, .. } = self;
        self.writes.iter().map(move |&BlockWrite { index, source, target }| Run { index, source, target, len, lane })
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.writes.len() * self.len
    }

    /// First byte of a run, or None when it lies outside the memory it is sent from.
    pub(crate) fn source(&self, pool: &Pool, run: &Run) -> Option<*const u8> {
        self.at(pool, run.source, run.len)
    }

    /// Address of `len` bytes at `start` of the memory it is sent from, or None when they lie outside.
    pub(crate) fn at(&self, pool: &Pool, start: usize, len: usize) -> Option<*const u8> {
        match &self.staged {
            None => pool.at(start, len).map(|start| start.cast_const()),
            Some(staged) => staged.bytes().get(start..)?.get(..len).map(<[u8]>::as_ptr),
        }
    }

    /// From now on it is sent from memory of its own, which has `each` bytes of every block, block by block and without gaps.
    pub(crate) fn stand_in(&mut self, staged: Staged, each: usize) {
        for (i, write) in self.writes.iter_mut().enumerate() {
            write.source = i * each;
        }
        self.source_len = each;
        self.staged = Some(staged);
    }

    /// Its pieces in order, each with the address of the next one's first byte, or of the byte behind it: what is read next, as a hint.
    pub(crate) fn runs_and_next(&self, pool: &Pool) -> impl Iterator<Item = (Run, *const u8)> {
        let nexts = self.runs().skip(1).map(|next| (next.source, next.len));
        let last = self.runs().last().map(|last| (last.source.saturating_add(last.len), 0));
        let nexts = nexts.chain(last).map(|(start, len)| self.at(pool, start, len).unwrap_or(std::ptr::null()));
        self.runs().zip(nexts)
    }

    /// For each run its block's position and its digest.
    pub(crate) fn digests(&self, pool: &Pool) -> impl Iterator<Item = (u32, u64)> {
        self.runs_and_next(pool).filter_map(|(run, next)| {
            let start = self.source(pool, &run)?;
            // SAFETY: inside the memory it is sent from; a local block stays unchanged until its handoff's end is reported.
            let bytes = unsafe { std::slice::from_raw_parts(start, run.len) };
            Some((run.index, digest_run(bytes, run.lane, next)))
        })
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

/// How far the oldest batch is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The local pool is not read for it any more, and a frame queued from now on is acted upon by the peer after the batch has
    /// been applied there: it arrives behind it, or, a completion, says how much on other connections it [waits](Links::send) for.
    Flushed,
    /// More can be done right away.
    Runnable,
    /// The links must move first, or [`Transport::fd`] become readable.
    Blocked,
}

/// One-sided writes into one peer's pool.
pub(crate) trait Transport: Send {
    /// Which one.
    fn kind(&self) -> TransportKind;

    /// Batches it takes before the first of them must be flushed.
    fn depth(&self) -> usize {
        1
    }

    /// Starts a batch; fewer than [`Transport::depth`] are neither flushed nor cancelled.
    fn submit(&mut self, batch: Batch, links: &mut Links) -> Result<(), TransferError>;

    /// Goes on with the batches for a short while. They are flushed in their order, at most one by each call.
    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError>;

    /// Whether it digests what it reads, so that memory is read once. Otherwise the session does, before submitting.
    fn digests(&self) -> bool {
        false
    }

    /// Of a transport that [digests](Transport::digests): for each run of a flushed batch, its block's position and its
    /// digest.
    fn take_digests(&mut self) -> Vec<(u32, u64)> {
        Vec::new()
    }

    /// What else than the links can move blocked batches, ready to be waited for right after `poll` has answered so.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Gives up the batches of a handoff. From the return on the local pool is not read for it, and nothing of it is
    /// written to the peer's pool that the peer does not apply itself, in order (I3). After an error something may still
    /// be: the session must end without telling the peer that it has stopped.
    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError>;
}
