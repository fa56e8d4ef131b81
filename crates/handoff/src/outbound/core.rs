//! What a handoff's owner and its session share.

use std::sync::OnceLock;
use std::time::Instant;

use baton_types::{BlockId, Epoch, WorkerId};

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
    /// What blocks were verified with when they came here.
    known: OnceLock<Vec<Known>>,
}

/// The digest that a block of the local pool was verified with when it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    /// Layer group.
    pub group: u32,
    /// Position in the reservation's list of this group.
    pub index: u32,
    /// The block of the local pool.
    pub block: BlockId,
    /// The sum of the digests of its layers.
    pub digest: u64,
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
            known: OnceLock::new(),
        }
    }

    /// The transport that carries it, once access is granted.
    pub fn transport(&self) -> Option<TransportKind> {
        self.transport.get().copied()
    }

    /// Says what blocks were verified with when they came here. If other bytes leave, it fails with [`TransferError::Changed`]. Only the first call
    /// counts, before the completion.
    pub fn knows(&self, known: Vec<Known>) {
        // A second list is a mistake of the caller's, and the first is still right.
        let _ = self.known.set(known);
    }

    /// The first block of which other bytes have left than it was verified with. `sums`: digests of what has left, per group and index.
    pub(crate) fn changed(&self, sums: &[Vec<u64>]) -> Option<TransferError> {
        let left = |known: &Known| sums.get(known.group as usize)?.get(known.index as usize).copied();
        let mut differ = self.known.get()?.iter().filter_map(|known| Some((known, left(known)?)));
        let (known, got) = differ.find(|(known, got)| known.digest != *got)?;
        let Known { group, block, digest: want, .. } = *known;
        Some(TransferError::Changed { group, block, want, got })
    }

    /// Why it failed, once it has.
    pub fn failure(&self) -> Option<&TransferError> {
        self.failure.get()
    }
}
