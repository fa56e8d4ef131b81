//! What a model is asked to compute: the trait the engine owns and the models implement.

use baton_kv_cache::{BlockCopy, BlockTable};
use baton_types::{SamplingParams, SeqId, TokenOut};

use crate::{BlockSwap, RunError};

/// Computes batches against one KV pool, a step at a time. Implementations pass [`crate::conformance`].
///
/// A step is launched and later collected. One on a device of its own computes in between, while the caller does other work; another one
/// may do everything at once, in either call.
pub trait ModelRunner: Send {
    /// Begins a step: makes the batch's copies, first those to host memory, then those from it, then those in the pool; then computes
    /// every row.
    ///
    /// A copy takes over all layers of its group, and everything of the block. Host memory keeps what is copied to it until it
    /// is copied over; its block numbers lie below [`crate::SwapConfig::blocks`] of the engine's configuration. Stores the K
    /// and V of each row's tokens in the pool through the row's block tables and calls `on_layer(layer)` after each layer's
    /// are stored for all rows, or will be before anything that is asked of the pool's memory from then on: every layer of the model once,
    /// ascending, before it returns. After an error there is nothing to collect, and nothing of the step is under way: the caller gives its
    /// blocks to others (I3). One that cannot see to that is [`ModelRunner::lost`].
    ///
    /// A row's result depends on that row's sequence only: not on the other rows, not on how its tokens were cut into
    /// chunks, not on which blocks it was given (I1), and not on when it is collected.
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError>;

    /// Waits for the step that was launched first of those not collected; `batch` is its batch, now with all tokens known, and tables as
    /// they have become. Pushes one [`TokenOut`] for each row that samples, in row order, and nothing else. A row for which no token can
    /// be chosen says so in [`TokenOut::failed`]; only its sequence fails. After an error, too, the step is over, and nothing of it under way.
    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError>;

    /// Whether a step may be launched while another one is not collected, and [`Row::follows`] it. One whose steps are over when
    /// they are launched gains nothing by that: tokens would only be told of later.
    fn overlaps(&self) -> bool {
        false
    }

    /// What its calls wait for, by name, where that is not this processor: a device that may stand still.
    fn device(&self) -> Option<String> {
        None
    }

    /// A step from beginning to end, for those who have nothing else to do.
    fn run(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        out: &mut Vec<TokenOut>,
    ) -> Result<(), RunError> {
        self.launch(batch, on_layer)?;
        self.collect(batch, out)
    }

    /// Why it can run no step any more, asked after one has failed; None where the next may go well.
    fn lost(&mut self) -> Option<RunError> {
        None
    }
}

/// The rows of one step, in a deterministic order: rows of one token first, then chunks.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// At least one row; no sequence twice. Rows may have blocks in common, but none writes to such a block.
    pub rows: &'a [Row<'a>],
    /// Blocks to copy first: the beginning of a block that a new sequence shares with another. No block is written twice
    /// or both read and written by copies.
    pub copies: &'a [BlockCopy],
    /// Blocks to copy to host memory before anything is written: of sequences that were preempted for these.
    pub swap_out: &'a [BlockSwap],
    /// Blocks to copy from host memory: of sequences of the batch that were preempted before. None is written twice.
    pub swap_in: &'a [BlockSwap],
}

/// Some consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Its one token is what the step launched before this one chooses for its so manieth sampling row. Until that is collected,
    /// `tokens` says nothing, and [`Sample::generated`] lacks it; whoever needs that ([`SamplingParams::looks_back`]) follows nobody.
    pub follows: Option<u32>,
    /// Position of `tokens[0]`; the KV of all positions before it is in the pool, or comes there by the batch's copies.
    pub start: u32,
    /// One block table per layer group, each covering `start + tokens.len()` tokens or more; what its group's window has
    /// passed may be missing.
    pub tables: &'a [BlockTable],
    /// How to choose the token after the last one; `None` when more of the sequence is to be computed first.
    pub sample: Option<Sample<'a>>,
}

/// What sampling may look at.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Number of the token in the answer, from 0 (I4); with the seed, all that randomness may depend on (I1).
    pub index: u32,
    /// The prompt.
    pub prompt: &'a [u32],
    /// The answer so far: `index` tokens; one less of a row that [`Row::follows`] a step not collected yet.
    pub generated: &'a [u32],
}
