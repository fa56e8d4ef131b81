//! Bulk copy of blocks from the local pool into a peer's: the one thing transports differ in.
//!
//! A session's thread submits batches, as many at a time as the transport takes, and polls until they are flushed. Everything else (access, digests,
//! completion, fencing) is the session's and the same for all. Implementations must pass the suite in `conformance`.

use std::os::fd::BorrowedFd;

use baton_handoff::{TransferError, TransportKind};
use baton_types::Epoch;

use crate::links::Links;
use crate::load::Load;

/// Bytes of a batch where a device copies: large enough that its launch costs less than its bytes, and still copied within a millisecond.
pub(crate) const DEVICE_BATCH_BYTES: usize = 16 << 20;
/// The same where devices only digest and a network carries: a digest's launch costs less, and what is given up arrives soon over a slow one.
pub(crate) const PUT_BATCH_BYTES: usize = 2 << 20;

/// For each run of a batch its block's position and its digest.
pub(crate) type Digests = Vec<(u32, u64)>;

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
    fn submit(&mut self, load: Load, links: &mut Links) -> Result<(), TransferError>;

    /// Goes on with the batches for a short while. They are flushed in their order, at most one by each call.
    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError>;

    /// Whether it digests what it reads, so that memory is read once. Otherwise the session does, before submitting.
    fn digests(&self) -> bool {
        false
    }

    /// Of a transport that [digests](Transport::digests): for each run of a flushed batch, its block's position and its
    /// digest.
    fn take_digests(&mut self) -> Digests {
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
