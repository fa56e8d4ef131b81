//! What a model is asked to compute: the trait the engine owns and the models implement.

use baton_kv_cache::{BlockCopy, BlockTable};
use baton_types::{SamplingParams, SeqId, TokenOut};

use crate::{BlockSwap, RunError};

/// Computes batches against one KV pool. Implementations pass [`crate::conformance`].
pub trait ModelRunner: Send {
    /// Makes the batch's copies, first those to host memory, then those from it, then those in the pool; then computes every
    /// row.
    ///
    /// A copy takes over all layers of its group, and everything of the block. Host memory keeps what is copied to it until it
    /// is copied over; its block numbers lie below [`crate::SwapConfig::blocks`] of the engine's configuration. Stores the K
    /// and V of each row's tokens in the pool through the row's block tables and calls `on_layer(layer)` after each layer's
    /// are stored for all rows: every layer of the model once, ascending. Pushes one [`TokenOut`] for each row that samples,
    /// in row order, and nothing else. A row for which no token can be chosen says so in [`TokenOut::failed`]; only its
    /// sequence fails.
    ///
    /// A row's result depends on that row's sequence only: not on the other rows, not on how its tokens were cut into
    /// chunks, not on which blocks it was given (I1).
    fn run(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        out: &mut Vec<TokenOut>,
    ) -> Result<(), RunError>;

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
    /// The answer so far: `index` tokens.
    pub generated: &'a [u32],
}
