//! Everything that can go wrong while KV moves, with the fields a reader needs to find the culprit.

use std::time::Duration;

use baton_types::{BatonError, BlockId, Epoch, ErrorKind, LayoutMismatch, WorkerId};

use crate::codec::Malformed;
use crate::wire::CHECK;

/// An error of the data plane. Cloned because one lost connection fails many handoffs.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransferError {
    /// The two workers' KV layouts differ; nothing else of the peer's message was read.
    #[error(transparent)]
    Layout(#[from] LayoutMismatch),
    /// A target descriptor that cannot be used.
    #[error("target descriptor: {field}: {problem}; pass the bytes of Reserved.target unchanged")]
    Descriptor {
        /// The descriptor's field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A peer that does not keep to the session protocol.
    #[error("{peer} broke the transfer protocol: {field}: {problem}")]
    Protocol {
        /// The peer.
        peer: WorkerId,
        /// The frame's field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A call of this crate with an argument that can never work.
    #[error("{field}: {problem}")]
    Argument {
        /// The argument.
        field: &'static str,
        /// What is wrong with it and what would be right.
        problem: String,
    },
    /// A block arrived with other bytes than were sent (I2).
    #[error(
        "block {block} of group {group} (number {index} of {epoch}) from {peer} failed verification: digest {got:016x}, the sender's is {want:016x}"
    )]
    Verify {
        /// The handoff.
        epoch: Epoch,
        /// The worker that sent it.
        peer: WorkerId,
        /// Layer group.
        group: u32,
        /// Position in the reservation's list of this group.
        index: u32,
        /// The decode pool's block.
        block: BlockId,
        /// Digest that the sender computed from its own pool.
        want: u64,
        /// Digest of the bytes in the decode pool.
        got: u64,
    },
    /// A block of the local pool has other bytes than it was verified with when it came (I2).
    #[error(
        "block {block} of group {group} has changed in this pool since it came: digest {got:016x}, it was {want:016x}"
    )]
    Changed {
        /// Layer group.
        group: u32,
        /// The block.
        block: BlockId,
        /// Digest that it was verified with.
        want: u64,
        /// Digest of what was read now.
        got: u64,
    },
    /// A frame arrived with other bytes than were sent, so nothing of the session can be relied on (I2).
    #[error("a frame from {peer} changed on its way")]
    Corrupt {
        /// The peer.
        peer: WorkerId,
    },
    /// A handoff was completed although not every layer of every block was written.
    #[error("{epoch} from {peer} is incomplete: {written} of {expected} block layers were written")]
    Incomplete {
        /// The handoff.
        epoch: Epoch,
        /// The worker that sent it.
        peer: WorkerId,
        /// Block layers that were written.
        written: u64,
        /// Block layers that the reservation holds.
        expected: u64,
    },
    /// The decode worker has no reservation to write to under this epoch: ended, fenced, or never made.
    #[error("{peer} refuses {epoch}: {reason}; ask the decode worker for a new reservation")]
    Refused {
        /// The handoff.
        epoch: Epoch,
        /// The worker that refused.
        peer: WorkerId,
        /// Why.
        reason: String,
    },
    /// The decode worker took the reservation back.
    #[error("{peer} fenced {epoch}")]
    Fenced {
        /// The handoff.
        epoch: Epoch,
        /// The worker that fenced it.
        peer: WorkerId,
    },
    /// The handoff was given up on the prefill side.
    #[error("{epoch} was aborted by the prefill worker")]
    Aborted {
        /// The handoff.
        epoch: Epoch,
    },
    /// A reservation's lease ran out before its KV was verified.
    #[error("the lease of {epoch} expired before its KV arrived")]
    Expired {
        /// The handoff.
        epoch: Epoch,
    },
    /// A handoff's deadline passed.
    #[error("{epoch} to {peer} missed its deadline while {doing}")]
    Deadline {
        /// The handoff.
        epoch: Epoch,
        /// The decode worker.
        peer: WorkerId,
        /// What was going on.
        doing: &'static str,
    },
    /// The peer is connected but does not move, so the handoff is given up before its deadline.
    #[error("{peer} made no progress for {waited:?} while {epoch} was {doing}")]
    Stalled {
        /// The handoff.
        epoch: Epoch,
        /// The worker at the other end.
        peer: WorkerId,
        /// What was going on.
        doing: &'static str,
        /// The configured longest wait.
        waited: Duration,
    },
    /// The connection to a peer ended.
    #[error("lost {peer}: {cause}")]
    PeerLost {
        /// The peer.
        peer: WorkerId,
        /// What ended it.
        cause: String,
    },
    /// A peer could not be reached.
    #[error("cannot reach {peer} at {address}: {cause}")]
    Connect {
        /// The peer.
        peer: WorkerId,
        /// The address that was tried.
        address: String,
        /// Why it failed.
        cause: String,
    },
    /// A configured bound was hit (I5).
    #[error("{what}: {asked} asked, the limit is {limit}")]
    Limit {
        /// What is bounded.
        what: &'static str,
        /// The bound.
        limit: u64,
        /// What was asked for.
        asked: u64,
    },
    /// A block was reserved that an earlier epoch has not given back yet (I3).
    #[error("block {block} of group {group} is still lent under {epoch}; fence that first")]
    Lent {
        /// Layer group.
        group: u32,
        /// The block.
        block: BlockId,
        /// The epoch that holds it.
        epoch: Epoch,
    },
    /// This end is shutting down.
    #[error("the transfer engine is shut down")]
    Closed,
    /// The session had no handoffs for a while, so this end closed it. The next handoff begins a new one.
    #[error("the session with {peer} was idle")]
    Idle {
        /// The other worker.
        peer: WorkerId,
    },
    /// UCX is missing, or refused something this worker needs.
    #[error("UCX cannot {what}: {cause}")]
    Ucx {
        /// What was tried.
        what: &'static str,
        /// UCX's error.
        cause: String,
    },
    /// The pool's device refused something, or failed.
    #[error("the KV pool's device cannot {what}: {cause}")]
    Device {
        /// What was tried.
        what: &'static str,
        /// The device's error.
        cause: String,
    },
    /// The operating system refused something this worker needs.
    #[error("{what}: {cause}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        cause: String,
    },
}

impl TransferError {
    /// Whether one side's owner ended the handoff on purpose, mostly for a cancelled request.
    pub fn is_withdrawal(&self) -> bool {
        matches!(self, TransferError::Fenced { .. } | TransferError::Aborted { .. })
    }

    /// Whether other bytes arrived than were sent (I2).
    pub fn is_corruption(&self) -> bool {
        matches!(self, TransferError::Verify { .. } | TransferError::Corrupt { .. })
    }

    /// Whether a session that could not begin over one path may begin over another. Layouts differ over every path, and a session that was
    /// stopped wants no other.
    pub fn is_of_path(&self) -> bool {
        !matches!(self, TransferError::Layout(_) | TransferError::Closed)
    }

    /// A stable word for what went wrong, for metrics labels.
    pub fn cause(&self) -> &'static str {
        use TransferError::*;
        match self {
            Layout(_) | Descriptor { .. } => "mismatch",
            Verify { .. } | Changed { .. } | Corrupt { .. } => "corruption",
            Incomplete { .. } => "incomplete",
            Protocol { .. } => "protocol",
            Refused { .. } => "refused",
            Fenced { .. } | Aborted { .. } => "withdrawn",
            Expired { .. } | Deadline { .. } => "deadline",
            Stalled { .. } => "stalled",
            PeerLost { .. } => "peer_lost",
            Connect { .. } => "connect",
            Limit { .. } => "limit",
            Closed | Idle { .. } => "closed",
            Argument { .. } | Lent { .. } | Ucx { .. } | Device { .. } | Os { .. } => "internal",
        }
    }

    /// The operating system refused something.
    pub fn os(what: &'static str, cause: impl std::fmt::Display) -> Self {
        TransferError::Os { what, cause: cause.to_string() }
    }

    /// UCX refused something.
    pub fn ucx(what: &'static str, cause: impl std::fmt::Display) -> Self {
        TransferError::Ucx { what, cause: cause.to_string() }
    }

    /// The error for malformed bytes from a peer: corruption if a frame's check failed, else a protocol error.
    pub fn broken(peer: WorkerId, Malformed { field, problem }: Malformed) -> Self {
        match field {
            CHECK => TransferError::Corrupt { peer },
            _ => TransferError::Protocol { peer, field, problem },
        }
    }

    /// An argument that can never work.
    pub fn argument(field: &'static str, problem: impl Into<String>) -> Self {
        TransferError::Argument { field, problem: problem.into() }
    }
}

impl BatonError for TransferError {
    fn kind(&self) -> ErrorKind {
        use TransferError::*;
        match self {
            Layout(mismatch) => mismatch.kind(),
            Descriptor { .. } => ErrorKind::InvalidArgument,
            Verify { .. } | Changed { .. } | Corrupt { .. } | Incomplete { .. } => ErrorKind::DataLoss,
            Aborted { .. } => ErrorKind::Cancelled,
            PeerLost { .. } => ErrorKind::PathLost,
            Deadline { .. } => ErrorKind::DeadlineExceeded,
            Limit { .. } => ErrorKind::ResourceExhausted,
            // A lease is the worker's own bound. The request's deadline may be far, so another try may succeed.
            Expired { .. }
            | Protocol { .. }
            | Refused { .. }
            | Fenced { .. }
            | Stalled { .. }
            | Connect { .. }
            | Closed
            | Idle { .. } => ErrorKind::Unavailable,
            Argument { .. } | Lent { .. } | Ucx { .. } | Device { .. } | Os { .. } => ErrorKind::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lease is the worker's own bound: its end is no reason to tell a client that the request's deadline has passed.
    #[test]
    fn only_a_deadline_is_a_deadline() {
        let (epoch, peer) = (Epoch(1), WorkerId(2));
        assert_eq!(TransferError::Expired { epoch }.kind(), ErrorKind::Unavailable);
        let late = TransferError::Deadline { epoch, peer, doing: "waiting" };
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    }
}
