//! A planned step, and which blocks it fills.

use std::ops::Range;

use baton_types::SeqId;

/// A planned step. It ends in [`crate::Engine::apply`] or [`crate::Engine::fail`], in the order of planning. At most
/// one other step is planned before that.
#[derive(Debug)]
#[must_use = "a step that is neither applied nor failed stops the engine"]
pub struct Step {
    pub(crate) rows: Vec<StepRow>,
    pub(crate) number: u64,
    pub(crate) behind: Option<SeqId>,
}

/// One row of a step: consecutive tokens of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepRow {
    /// The sequence.
    pub seq: SeqId,
    /// Position of its first token.
    pub start: u32,
    /// Tokens, at least 1.
    pub len: u32,
    /// The row reaches the sequence's last token, so the next one is sampled.
    pub samples: bool,
    /// The sequence is [`crate::Start::ComputeAndHold`]: its blocks go to a peer as they fill.
    pub held: bool,
    /// `start`, or 0 in a sequence's first row: blocks that it found in the prefix cache are reported with those it
    /// computes.
    pub since: u32,
    /// Index in the answer of the token it samples, if it samples (I4).
    pub index: u32,
    /// Position of the first token of the prompt that this row scores, and how many it scores.
    pub scores: (u32, u32),
    /// Place, among all that the previous step gives, of the token that this row consumes; that token was not known when
    /// this was planned.
    pub follows: Option<u32>,
}

impl StepRow {
    /// Whether this is the sequence's first row since it started. The sequence's copies are made before this row.
    pub(crate) fn begins(&self) -> bool {
        self.since == 0
    }

    /// How many [`baton_types::TokenOut`] the runner gives for it.
    pub(crate) fn gives(&self) -> u32 {
        self.scores.1 + u32::from(self.samples)
    }

    /// Indices into the sequence's block tables of the blocks that this row completes and that were not reported
    /// before; see [`completed_blocks`].
    pub fn completed_blocks(&self, block_size: u32) -> Range<usize> {
        completed_blocks(self.since, self.start + self.len - self.since, block_size, self.samples)
    }
}

impl Step {
    /// The rows, in the order of the batch's rows.
    pub fn rows(&self) -> &[StepRow] {
        &self.rows
    }

    /// Number of the step; the engine counts its steps from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The fetch whose blocks its only row reads while they are written to ([`crate::Engine::streams`]). The runner has to wait in each layer until that
    /// layer is complete and verified (I2), and the step ends no sooner than the writing (I3). If not all is complete and right, it has failed.
    pub fn behind(&self) -> Option<SeqId> {
        self.behind
    }

    /// Tokens over all rows.
    pub fn tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.len).sum()
    }
}

/// Indices of the blocks that become final when `len` tokens from position `start` on are computed: those that become
/// full and, with `last` (no further chunk follows), also the one that stays partial.
///
/// However the tokens of a sequence are cut into chunks, each of its blocks is in exactly one of these ranges.
pub fn completed_blocks(start: u32, len: u32, block_size: u32, last: bool) -> Range<usize> {
    let end = start + len;
    let full = if last { end.div_ceil(block_size) } else { end / block_size };
    (start / block_size) as usize..full as usize
}
