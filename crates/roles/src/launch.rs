//! A step on its way to the model, and the blocks that travel to peers as its layers are stored.

use std::sync::Arc;

use baton_handoff::TransferError;
use baton_types::{BlockId, KvLayout, SeqId};

/// Blocks of one sequence that a step completes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outgoing {
    /// The sequence.
    pub seq: SeqId,
    /// Per layer group: pairs of local block and index in the reservation.
    pub pairs: Vec<Vec<(BlockId, u32)>>,
}

/// One layer of some of a sequence's blocks, for its handoff to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Layer group.
    pub group: usize,
    /// Index of the layer in its group.
    pub layer: usize,
    /// Pairs of local block and index in the reservation.
    pub pairs: &'a [(BlockId, u32)],
}

/// A step to be launched. Its batch comes from [`crate::WorkerCore::with_batch`].
#[derive(Debug)]
pub struct StepLaunch {
    pub(crate) step: u64,
    pub(crate) tokens: u32,
    pub(crate) behind: Option<SeqId>,
    pub(crate) layout: Arc<KvLayout>,
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) refused: Vec<(SeqId, TransferError)>,
}

impl StepLaunch {
    /// Number of the step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Tokens it computes.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The load that it does not wait for ([`crate::tiers::Command::Streams`]): on each layer that the model says is stored, and before
    /// [`StepLaunch::stored`] is called, wait until that layer is loaded and verified (I2). The launch has failed if one is not. Whatever comes of the
    /// launch, answer it once nothing writes to the load's blocks any more (I3).
    pub fn behind(&self) -> Option<SeqId> {
        self.behind
    }

    /// The K and V of `layer` are in the pool, or will be before any read of the pool that is requested from now on.
    /// Calls `write` for each sequence whose blocks of this layer are to travel. A handoff that refuses a write gets no
    /// further one.
    pub fn stored(&mut self, layer: u32, mut write: impl FnMut(Write<'_>) -> Result<(), TransferError>) {
        let Some((group, layer)) = self.layout.locate(layer) else { return };
        for outgoing in &self.outgoing {
            let (seq, pairs) = (outgoing.seq, &outgoing.pairs[group]);
            if pairs.is_empty() || self.refused.iter().any(|(refused, _)| *refused == seq) {
                continue;
            }
            if let Err(error) = write(Write { seq, group, layer, pairs }) {
                self.refused.push((seq, error));
            }
        }
    }

    /// Records that a sequence's handoff refuses a write it was given earlier.
    pub fn refuse(&mut self, seq: SeqId, error: TransferError) {
        if !self.refused.iter().any(|(refused, _)| *refused == seq) {
            self.refused.push((seq, error));
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::tiny_layout;

    use super::*;

    #[test]
    fn each_layer_travels_with_its_group_and_a_refused_handoff_is_left_alone() {
        let pairs = vec![vec![(BlockId(3), 0)], vec![]];
        let other = vec![vec![(BlockId(4), 0)], vec![(BlockId(7), 1)]];
        let outgoing = vec![Outgoing { seq: SeqId(1), pairs }, Outgoing { seq: SeqId(2), pairs: other }];
        let layout = Arc::new(tiny_layout(4));
        let mut launch = StepLaunch { step: 1, tokens: 4, behind: None, layout, outgoing, refused: Vec::new() };
        let mut seen = Vec::new();
        for layer in 0..4 {
            launch.stored(layer, |write| {
                seen.push((layer, write.seq.0, write.group, write.layer, write.pairs.to_vec()));
                if write.seq == SeqId(2) { Err(TransferError::Closed) } else { Ok(()) }
            });
        }
        let third = |seq, block| (seq, 0, vec![(BlockId(block), 0)]);
        let flat: Vec<_> = seen
            .into_iter()
            .map(|(layer, seq, group, at, pairs)| (layer, at, third(seq, pairs[0].0.0), group))
            .collect();
        // Layers 0 and 2 are group 0's, layer 1 is group 1's; the model has no layer 3.
        assert_eq!(flat, [(0, 0, third(1, 3), 0), (0, 0, third(2, 4), 0), (2, 1, third(1, 3), 0)]);
        assert_eq!(launch.refused, [(SeqId(2), TransferError::Closed)]);
    }
}
