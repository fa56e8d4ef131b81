//! A planned step, and which blocks it fills.

use std::ops::Range;

use baton_types::SeqId;

/// What the next step computes. Ends in [`crate::Engine::apply`] or [`crate::Engine::fail`], in the order of planning; at most
/// one other is planned before that.
#[derive(Debug)]
#[must_use = "a step that is neither applied nor failed stops the engine"]
pub struct Step {
    pub(crate) rows: Vec<StepRow>,
    pub(crate) number: u64,
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
    /// `start`, or 0 in a sequence's first row: the blocks it found in the prefix cache are told of with those it computes.
    pub since: u32,
    /// Number in its answer of the token that it samples (I4).
    pub index: u32,
    /// Its token is the one that the step before it chooses for its so manieth sampling row, and was not known when this was planned.
    pub follows: Option<u32>,
}

impl StepRow {
    /// Whether it is its sequence's first since that started, so that what the sequence begins with is copied first.
    pub(crate) fn begins(&self) -> bool {
        self.since == 0
    }

    /// Indices into the sequence's block tables of the blocks that are complete with this row and were not told of before;
    /// see [`completed_blocks`].
    pub fn completed_blocks(&self, block_size: u32) -> Range<usize> {
        completed_blocks(self.since, self.start + self.len - self.since, block_size, self.samples)
    }
}

impl Step {
    /// The rows, in the order of the batch's rows.
    pub fn rows(&self) -> &[StepRow] {
        &self.rows
    }

    /// Counts the engine's steps, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Tokens over all rows.
    pub fn tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.len).sum()
    }
}

/// Indices of the blocks that hold nothing but final KV once `len` tokens from position `start` are computed and did not
/// before: those that became full, and with `last` (no further chunk follows) also the one that stays partial.
///
/// Over the chunks of a sequence, cut in any way, each of its blocks is in exactly one of these ranges.
pub fn completed_blocks(start: u32, len: u32, block_size: u32, last: bool) -> Range<usize> {
    let end = start + len;
    let full = if last { end.div_ceil(block_size) } else { end / block_size };
    (start / block_size) as usize..full as usize
}
