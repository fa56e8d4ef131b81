//! What a model is asked to compute: the trait the engine owns and the models implement.

use baton_kv_cache::BlockTable;
use baton_types::{SamplingParams, SeqId, TokenOut};

use crate::RunError;

/// Computes batches against one KV pool. Implementations pass [`crate::conformance`].
pub trait ModelRunner: Send {
    /// Computes every row of the batch.
    ///
    /// Stores the K and V of each row's tokens in the pool through the row's block tables and calls `on_layer(layer)`
    /// after each layer's are stored for all rows: every layer of the model once, ascending. Pushes one [`TokenOut`] for
    /// each row that samples, in row order, and nothing else. A row for which no token can be chosen says so in
    /// [`TokenOut::failed`]; only its sequence fails.
    ///
    /// A row's result depends on that row's sequence only: not on the other rows, not on how its tokens were cut into
    /// chunks, not on which blocks it was given (I1).
    fn run(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        out: &mut Vec<TokenOut>,
    ) -> Result<(), RunError>;
}

/// The rows of one step, in a deterministic order: rows of one token that samples first, then chunks.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// At least one row; no sequence twice.
    pub rows: &'a [Row<'a>],
}

/// Some consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`; the KV of all positions before it is in the pool.
    pub start: u32,
    /// One block table per layer group, each covering `start + tokens.len()` tokens or more.
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
