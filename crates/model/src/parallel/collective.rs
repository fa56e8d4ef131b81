//! What the decoder asks of the other ranks.

use baton_engine::RunError;
use baton_kernels::Backend;

use super::Sharding;

/// One rank's way to the others. Every rank calls the same methods in the same order with the same sizes: that order is the decoder's,
/// a function of the batch alone.
pub trait Collective<B: Backend>: Send {
    /// `x[i]` = the sum of all ranks' `x[i]`, added in the order of the ranks, for the first `elements`: the same bits on every rank,
    /// whatever else is summed beside it (I1). When it returns, every rank has called it, so all that they did before is done.
    ///
    /// # Errors
    /// When a rank has failed, or this exchange did.
    fn all_reduce(&mut self, backend: &mut B, x: &mut B::Buffer, elements: usize) -> Result<(), RunError>;

    /// Puts the ranks' columns beside each other: rank r's `part` is `[rows, splits[r + 1] - splits[r]]` and becomes columns
    /// `splits[r]..splits[r + 1]` of `whole` on rank 0, `[rows, last of splits]`. Other ranks' `whole` is left as it is.
    ///
    /// # Errors
    /// As of [`Collective::all_reduce`].
    fn gather(
        &mut self,
        backend: &mut B,
        part: &B::Buffer,
        rows: usize,
        splits: &[usize],
        whole: &mut B::Buffer,
    ) -> Result<(), RunError>;

    /// This rank leaves the step: whoever waits for it, now or until [`Collective::reset`], is told why.
    fn abort(&self, why: &RunError);

    /// Forgets a step that was aborted. Called on one rank, while none is in a step.
    ///
    /// # Errors
    /// When the ranks cannot go on after it.
    fn reset(&mut self) -> Result<(), RunError>;
}

/// What makes a decoder one of several.
pub struct Rank<B: Backend> {
    /// What it holds.
    pub sharding: Sharding,
    /// How it reaches the others.
    pub collective: Box<dyn Collective<B>>,
}
