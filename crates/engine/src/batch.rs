//! The batch a model is asked to compute, and [`ModelRunner`], the trait that models implement.

use baton_kv_cache::{BlockCopy, BlockTable};
use baton_types::{SamplingParams, SeqId, TokenOut};

use crate::RunError;

/// Computes batches on one KV pool, one step at a time. Every implementation passes [`crate::conformance`].
///
/// A step is launched and later collected. A runner with a device of its own computes between the two calls, while the
/// caller does other work. Another runner may compute everything inside either call.
pub trait ModelRunner: Send {
    /// Launches a step: makes the batch's copies, then computes every row.
    ///
    /// - A copy takes over the whole block in all layers of its group.
    /// - The K and V of each row's tokens go to the pool through the row's block tables.
    /// - `on_layer(layer)` is called once for every layer of the model, in ascending order, before this call returns.
    ///   It says that the layer's K and V of all rows are stored, or will be before any access to the pool that is
    ///   requested from then on.
    ///
    /// After an error there is nothing to collect and nothing of the step is in flight: the caller gives its blocks to
    /// others (I3). A runner that cannot guarantee this must say so in [`ModelRunner::lost`].
    ///
    /// A row's result depends only on its own sequence: not on the other rows, on how its tokens were cut into chunks,
    /// on which blocks it was given (I1), or on when it is collected.
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError>;

    /// Waits for the oldest step that was launched and not collected. `batch` is that step's batch: all its tokens are
    /// known by now, and its block tables are the current ones.
    ///
    /// Pushes, in row order, one [`TokenOut`] for each token that a row scores, then one for the token it samples, if it
    /// samples; and nothing else. When no token can be chosen for a row, [`TokenOut::failed`] says why, and only its
    /// sequence fails. The step is over after this call, also after an error: nothing of it is in flight.
    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError>;

    /// Whether a step may be launched before the previous one is collected, with rows that follow it
    /// ([`Row::follows`]). A runner whose steps are over when `launch` returns gains nothing from this: its tokens
    /// would only be delivered later.
    fn overlaps(&self) -> bool {
        false
    }

    /// Whether a row of several tokens reads a layer's K and V of earlier tokens only after `on_layer(layer)` has returned. They need not be in the
    /// pool before, then ([`crate::Step::behind`]).
    fn reads_by_layer(&self) -> bool {
        false
    }

    /// Name of the device that its calls wait for and that may hang; `None` when it computes on this processor.
    fn device(&self) -> Option<String> {
        None
    }

    /// Launches and collects a step, for callers with no other work meanwhile.
    fn run(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        out: &mut Vec<TokenOut>,
    ) -> Result<(), RunError> {
        self.launch(batch, on_layer)?;
        self.collect(batch, out)
    }

    /// Why the runner can run no further step; `None` when the next one may succeed. Asked after a step has failed.
    fn lost(&mut self) -> Option<RunError> {
        None
    }
}

/// The rows of one step, in a deterministic order: rows of one token first, then chunks.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// At least one row, and at most one per sequence. Rows may share blocks, but no row writes to a shared block.
    pub rows: &'a [Row<'a>],
    /// Blocks to copy within the pool before the rows are computed: the beginning of a block that a new sequence shares
    /// with another. No block is written twice, and none is both read and written.
    pub copies: &'a [BlockCopy],
}

impl Batch<'_> {
    /// Whether it goes on with an answer, for whose next token someone waits.
    pub fn decodes(&self) -> bool {
        self.rows
            .iter()
            .any(|row| row.follows.is_some() || row.sample.is_some_and(|sample| !sample.generated.is_empty()))
    }
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Place, among all that the previous step gives, of the token that this row consumes; the row then has exactly one
    /// token. Until the previous step is collected, `tokens` is a placeholder and [`Sample::generated`] lacks that token.
    /// A sequence whose sampling needs that token ([`SamplingParams::looks_back`]) never has such a row.
    pub follows: Option<u32>,
    /// Position of `tokens[0]`. The KV of all earlier positions is in the pool, or the batch's copies bring it there; or `on_layer` does, where
    /// [`ModelRunner::reads_by_layer`] says that this is soon enough.
    pub start: u32,
    /// One block table per layer group, each covering at least `start + tokens.len()` tokens. Blocks that the group's
    /// window has passed may be missing.
    pub tables: &'a [BlockTable],
    /// Known tokens whose log probabilities this row gives.
    pub score: Option<Score<'a>>,
    /// How to sample the token after the last one; `None` when more of the sequence must be computed first.
    pub sample: Option<Sample<'a>>,
}

/// Tokens of a prompt, each to be scored by the logits of the token before it.
#[derive(Clone, Copy, Debug)]
pub struct Score<'a> {
    /// Index, among the row's tokens, of the one before the first scored token.
    pub after: u32,
    /// The scored tokens, consecutive in the prompt; at least one.
    pub tokens: &'a [u32],
    /// How many of the most likely tokens come with each.
    pub top: u32,
}

/// What sampling may use.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Index of the token in the answer, from 0 (I4). Randomness depends only on this and the seed (I1).
    pub index: u32,
    /// The prompt.
    pub prompt: &'a [u32],
    /// The answer so far: `index` tokens, or one fewer when the row follows a step that is not collected yet
    /// ([`Row::follows`]).
    pub generated: &'a [u32],
}
