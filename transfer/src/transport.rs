//! Bulk copy of blocks from the local pool into a peer's: the one thing in which transports differ.
//!
//! A session's thread submits batches, as many at a time as the transport takes, and polls until they are flushed. The session does
//! everything else, the same for all transports: access, digests, completion, fencing. Implementations must pass the suite in
//! `conformance`.

use std::os::fd::BorrowedFd;

use baton_handoff::{TransferError, TransportKind};
use baton_types::Epoch;

use crate::links::Links;
use crate::load::Load;

/// Bytes of a batch that a device copies: large enough that its launch costs less than its bytes, and still copied within a millisecond.
pub(crate) const DEVICE_BATCH_BYTES: usize = 16 << 20;
/// Bytes of a batch that a device only digests and a network carries. Launching a digest costs less, and a small batch that is
/// cancelled is soon through a slow network.
pub(crate) const PUT_BATCH_BYTES: usize = 2 << 20;

/// For each run of a batch: its block's index in the reservation, and its digest.
pub(crate) type Digests = Vec<(u32, u64)>;

/// Progress of the oldest batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The local pool is no longer read for the batch. A frame queued from now on takes effect at the peer after the batch. Either it
    /// arrives behind the batch, or it is a completion, which says how many writes on other connections it [waits](Links::send) for.
    Flushed,
    /// More can be done right away.
    Runnable,
    /// Nothing can be done until the links move or [`Transport::fd`] becomes readable.
    Blocked,
}

/// One-sided writes into one peer's pool.
pub(crate) trait Transport: Send {
    /// Which transport this is.
    fn kind(&self) -> TransportKind;

    /// Most batches under way at once.
    fn depth(&self) -> usize {
        1
    }

    /// Starts a batch. Must be called only while fewer than [`Transport::depth`] batches are under way.
    fn submit(&mut self, load: Load, links: &mut Links) -> Result<(), TransferError>;

    /// Works on the batches for a short while. They are flushed in order, at most one per call.
    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError>;

    /// Whether it digests blocks while it reads them, so that memory is read once. Otherwise the session digests before submitting.
    fn digests(&self) -> bool {
        false
    }

    /// From a transport that [digests](Transport::digests): the digests of the batch just flushed.
    fn take_digests(&mut self) -> Digests {
        Vec::new()
    }

    /// Descriptor, besides the links, that becomes readable when blocked batches can go on. Valid right after `poll` has returned
    /// [`Progress::Blocked`].
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Gives up the batches of a handoff. After it returns, the local pool is no longer read for them. Their bytes reach the peer's pool
    /// only if the peer itself applies them, in order (I3). After an error neither is certain: the session must end without telling the
    /// peer that it has stopped.
    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError>;
}
