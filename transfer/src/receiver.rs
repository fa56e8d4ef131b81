//! The decode end.

use std::net::SocketAddr;
use std::time::Duration;

use baton_types::{BlockId, Epoch};

use crate::error::TransferError;
use crate::options::{ReceiverOptions, TransportKind};

/// What happens to reservations; called on transfer threads, in order, one at a time. Must not block.
#[derive(Clone, PartialEq, Debug)]
pub enum ReceiverEvent {
    /// Every block arrived and matches its digest (I2). The blocks are the caller's; [`Receiver::release`] ends the lease.
    Verified {
        /// The reservation.
        epoch: Epoch,
        /// What the sender passed along with the completion.
        tail: Vec<u8>,
        /// KV bytes.
        bytes: u64,
        /// From the sender's start to verification.
        seconds: f64,
        /// What carried it.
        transport: TransportKind,
    },
    /// The reservation will never be verified. Its blocks stay lent until `Fenced` (I3), which always follows.
    Failed {
        /// The reservation.
        epoch: Epoch,
        /// Why.
        error: TransferError,
    },
    /// Nobody can write to the reservation's blocks any more; they may be reused.
    Fenced {
        /// The reservation.
        epoch: Epoch,
    },
}

/// What [`Receiver::fence`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceState {
    /// Nobody can write to the blocks: reuse them now.
    Clear,
    /// A peer may still be writing: keep the blocks aside until [`ReceiverEvent::Fenced`].
    Pending,
}

/// Called with every event.
pub type OnEvent = Box<dyn Fn(ReceiverEvent) + Send + Sync>;

/// Where KV arrives.
pub struct Receiver {
    address: SocketAddr,
}

impl Receiver {
    /// Listens for peers.
    pub fn bind(options: ReceiverOptions, on_event: OnEvent) -> Result<Receiver, TransferError> {
        let _ = on_event;
        Ok(Receiver { address: options.tcp })
    }

    /// The TCP address bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Lends `blocks` (per group, in token order) to whoever presents the descriptor returned here, for `lease`.
    pub fn reserve(
        &self,
        epoch: Epoch,
        blocks: &[Vec<BlockId>],
        tokens: u32,
        lease: Duration,
    ) -> Result<Vec<u8>, TransferError> {
        let _ = (epoch, blocks, tokens, lease);
        Err(TransferError::Closed)
    }

    /// Ends the lease after `Verified`.
    pub fn release(&self, epoch: Epoch) {
        let _ = epoch;
    }

    /// Takes the reservation back, whatever its state.
    pub fn fence(&self, epoch: Epoch) -> FenceState {
        let _ = epoch;
        FenceState::Clear
    }
}
