//! Several prefill ranks fill one decode rank's blocks, each under a reservation of its own: when is the whole there?
//!
//! Pure, and the owner's to use beside [`crate::Receiver`]: the receiver verifies and fences each part by itself, with the
//! one state machine; this only counts.

use std::collections::BTreeSet;

use baton_types::Epoch;

use crate::receiver::ReceiverEvent;

/// Parts of one sequence's KV on one decode rank.
#[derive(Debug)]
pub struct Gather {
    /// Not verified yet.
    waiting: BTreeSet<Epoch>,
    verified: BTreeSet<Epoch>,
    failed: bool,
}

/// What an event comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gathered {
    /// Nothing for the whole, or it is about another reservation.
    Nothing,
    /// The last part is verified (I2): all blocks may be read. Said once.
    Whole,
    /// A part failed, so the whole will never be there: fence [`Gather::parts`], and reuse a block only when all parts of
    /// it are given back (I3). Said once.
    Failed,
}

impl Gather {
    /// Of the reservations with these epochs.
    pub fn new(parts: impl IntoIterator<Item = Epoch>) -> Gather {
        Gather { waiting: parts.into_iter().collect(), verified: BTreeSet::new(), failed: false }
    }

    /// All its epochs.
    pub fn parts(&self) -> impl Iterator<Item = Epoch> + '_ {
        self.waiting.union(&self.verified).copied()
    }

    /// Takes note of a receiver's event.
    pub fn step(&mut self, event: &ReceiverEvent) -> Gathered {
        match event {
            ReceiverEvent::Verified { epoch, .. } if self.waiting.remove(epoch) => {
                self.verified.insert(*epoch);
                if self.waiting.is_empty() && !self.failed { Gathered::Whole } else { Gathered::Nothing }
            }
            ReceiverEvent::Failed { epoch, .. } if self.waiting.contains(epoch) => {
                if std::mem::replace(&mut self.failed, true) { Gathered::Nothing } else { Gathered::Failed }
            }
            _ => Gathered::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TransferError, TransportKind};

    fn verified(epoch: u64) -> ReceiverEvent {
        let (epoch, tail, transport) = (Epoch(epoch), Vec::new(), TransportKind::Shm);
        ReceiverEvent::Verified { epoch, tail, bytes: 1, seconds: 1.0, transport }
    }

    fn failed(epoch: u64) -> ReceiverEvent {
        let epoch = Epoch(epoch);
        ReceiverEvent::Failed { epoch, error: TransferError::Expired { epoch }, transport: None }
    }

    #[test]
    fn the_whole_is_there_with_the_last_part_and_not_before() {
        let mut gather = Gather::new([1, 2, 3].map(Epoch));
        for (event, said) in [(3, Gathered::Nothing), (3, Gathered::Nothing), (9, Gathered::Nothing)] {
            assert_eq!(gather.step(&verified(event)), said);
        }
        assert_eq!(gather.step(&verified(1)), Gathered::Nothing);
        assert_eq!(gather.step(&verified(2)), Gathered::Whole);
        assert_eq!(gather.step(&verified(2)), Gathered::Nothing);
    }

    #[test]
    fn a_failed_part_fails_the_whole_once_and_for_good() {
        let mut gather = Gather::new([1, 2, 3].map(Epoch));
        assert_eq!(gather.step(&verified(1)), Gathered::Nothing);
        assert_eq!(gather.step(&failed(2)), Gathered::Failed);
        assert_eq!(gather.step(&failed(3)), Gathered::Nothing);
        assert_eq!(gather.step(&verified(3)), Gathered::Nothing);
        assert_eq!(gather.step(&failed(9)), Gathered::Nothing, "another's");
        assert_eq!(gather.parts().collect::<Vec<_>>(), [1, 2, 3].map(Epoch));
    }
}
