//! How a decoder exchanges with the other ranks.

use baton_engine::RunError;
use baton_kernels::Backend;

use super::Sharding;

/// One rank's side of the exchange. Every rank calls the same methods in the same order with the same sizes. The decoder guarantees this:
/// its calls are a function of the batch alone.
pub trait Collective<B: Backend>: Send {
    /// Replaces `x[i]` by the sum of all ranks' `x[i]`, added in the order of the ranks, for the first `elements`. Every rank gets the same
    /// bits, whatever else is summed beside it (I1). When it returns, every rank has called it and has done all work before the call.
    ///
    /// # Errors
    /// When a rank has failed, or the exchange did.
    fn all_reduce(&mut self, backend: &mut B, x: &mut B::Buffer, elements: usize) -> Result<(), RunError>;

    /// Joins the ranks' columns on rank 0. Rank r's `part` is `[rows, splits[r + 1] - splits[r]]` and becomes columns
    /// `splits[r]..splits[r + 1]` of rank 0's `whole`, `[rows, last of splits]`. On other ranks `whole` does not change.
    ///
    /// # Errors
    /// The same as [`Collective::all_reduce`].
    fn gather(
        &mut self,
        backend: &mut B,
        part: &B::Buffer,
        rows: usize,
        splits: &[usize],
        whole: &mut B::Buffer,
    ) -> Result<(), RunError>;

    /// This rank leaves the step. Every rank that waits for it, now or until [`Collective::reset`], gets `why` as its error.
    fn abort(&self, why: &RunError);

    /// Clears an aborted step. Called on one rank, while no rank is in a step.
    ///
    /// # Errors
    /// When the ranks cannot go on after it.
    fn reset(&mut self) -> Result<(), RunError>;
}

/// Makes a decoder one of several ranks.
pub struct Rank<B: Backend> {
    /// The part of the model it holds.
    pub sharding: Sharding,
    /// Its exchange with the others.
    pub collective: Box<dyn Collective<B>>,
}
