//! The events and counts for the owner of reservations.

use baton_types::Epoch;

use crate::error::TransferError;
use crate::limits::TransportKind;

/// What happens to reservations, in order.
///
/// A reservation ends in one of these ways:
/// - `Verified`;
/// - `Failed`, then `Fenced`;
/// - taken back by its owner: either [`FenceState::Clear`], or [`FenceState::Pending`] and then `Fenced`.
#[derive(Clone, PartialEq, Debug)]
pub enum ReceiverEvent {
    /// Every block arrived and matches its digest (I2). The blocks are the owner's; [`super::Ledger::release`] ends the lease.
    Verified {
        /// The reservation.
        epoch: Epoch,
        /// The tail of the sender's completion.
        tail: Vec<u8>,
        /// KV bytes.
        bytes: u64,
        /// Seconds from granting access to verification.
        seconds: f64,
        /// The transport that carried it.
        transport: TransportKind,
        /// Per group and index: the digest it was verified with. Empty where nothing is digested.
        digests: Vec<Vec<u64>>,
    },
    /// The reservation will never be verified. Its blocks stay lent until `Fenced` (I3), which always follows.
    Failed {
        /// The reservation.
        epoch: Epoch,
        /// Why.
        error: TransferError,
        /// The transport that carried it; None when nobody was granted access.
        transport: Option<TransportKind>,
    },
    /// Nobody can write to the reservation's blocks any more; they may be reused. At most once per epoch.
    Fenced {
        /// The reservation.
        epoch: Epoch,
    },
}

impl ReceiverEvent {
    /// The reservation it is about.
    pub fn epoch(&self) -> Epoch {
        match self {
            ReceiverEvent::Verified { epoch, .. }
            | ReceiverEvent::Failed { epoch, .. }
            | ReceiverEvent::Fenced { epoch } => *epoch,
        }
    }
}

/// The result of [`super::Ledger::fence`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceState {
    /// Nobody can write to the blocks: reuse them now.
    Clear,
    /// A peer may still be writing: keep the blocks aside until [`ReceiverEvent::Fenced`].
    Pending,
}

/// Counts since the start, for metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReceiverStats {
    /// Handoffs verified.
    pub verified: u64,
    /// Handoffs failed.
    pub failed: u64,
    /// Times other bytes arrived than were sent: handoffs with a block whose digest did not match, and frames that changed on their way.
    /// Each such frame ends its session with all its handoffs.
    pub verify_failures: u64,
    /// KV bytes verified that came over shared memory.
    pub shm_bytes: u64,
    /// KV bytes verified that came over TCP.
    pub tcp_bytes: u64,
    /// KV bytes verified that came over UCX.
    pub ucx_bytes: u64,
    /// KV bytes verified that came from GPU to GPU.
    pub cuda_ipc_bytes: u64,
    /// Reservations that are not over, now.
    pub reservations: usize,
    /// Connected prefill workers, now.
    pub sessions: usize,
}
