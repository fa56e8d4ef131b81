//! What a handoff's owner and its session share.

use std::sync::OnceLock;
use std::time::Instant;

use baton_types::{Epoch, WorkerId};

use crate::descriptor::Descriptor;
use crate::error::TransferError;
use crate::limits::TransportKind;

/// What a handoff's owner and its session both know.
#[derive(Debug)]
pub struct Core {
    /// The reservation's epoch.
    pub epoch: Epoch,
    pub(crate) key: u64,
    /// The decode worker.
    pub peer: WorkerId,
    /// When the handoff must be over.
    pub deadline: Instant,
    /// Blocks of the reservation per group.
    pub counts: Vec<u32>,
    /// Block layers of the reservation.
    pub(crate) layers: u64,
    /// The transport that carries it, once access is granted.
    pub(crate) transport: OnceLock<TransportKind>,
    /// Why it failed, once it has.
    pub(crate) failure: OnceLock<TransferError>,
}

impl Core {
    /// A handoff to the reservation that `target` describes, to be over by `deadline`.
    pub fn new(target: &Descriptor, deadline: Instant) -> Core {
        Core {
            epoch: target.epoch,
            key: target.key,
            peer: target.worker,
            deadline,
            counts: target.counts.clone(),
            layers: target.layers(),
            transport: OnceLock::new(),
            failure: OnceLock::new(),
        }
    }

    /// The transport that carries it, once access is granted.
    pub fn transport(&self) -> Option<TransportKind> {
        self.transport.get().copied()
    }

    /// Why it failed, once it has.
    pub fn failure(&self) -> Option<&TransferError> {
        self.failure.get()
    }
}
