//! How a handoff's owner at the prefill end learns of its end.

use crate::error::TransferError;
use crate::limits::TransportKind;

/// What a verified handoff took.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TransferStats {
    /// KV bytes.
    pub bytes: u64,
    /// From the first write to the decode side's answer.
    pub seconds: f64,
    /// What carried it.
    pub transport: TransportKind,
    /// Layers of blocks written.
    pub writes: u64,
    /// Pieces they were handed to the transport in, each of one layer.
    pub slices: u64,
}

/// Called once with a handoff's outcome, on whatever thread learns of it. Must not block.
pub type OnDone = Box<dyn FnOnce(Result<TransferStats, TransferError>) + Send>;

/// A completion's callback. Called exactly once, if need be by being dropped.
pub struct Done(Option<OnDone>);

impl Done {
    /// Calls `callback`.
    pub fn new(callback: OnDone) -> Done {
        Done(Some(callback))
    }

    /// Calls it with this outcome.
    pub fn report(mut self, outcome: Result<TransferStats, TransferError>) {
        if let Some(callback) = self.0.take() {
            callback(outcome);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(TransferError::Closed));
        }
    }
}

/// Called once nothing reads a handoff's local blocks any more, if need be by being dropped.
pub struct Quiet(pub Option<Box<dyn FnOnce() + Send>>);

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback();
        }
    }
}
