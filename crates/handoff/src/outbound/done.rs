//! How a handoff's owner at the prefill end learns the outcome.

use crate::error::TransferError;
use crate::limits::TransportKind;

/// Measurements of a verified handoff.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TransferStats {
    /// KV bytes.
    pub bytes: u64,
    /// Seconds from the first write to the decode side's answer.
    pub seconds: f64,
    /// Of these, seconds from when all was written and completion was asked for: what the decode side still had to take in and verify.
    pub verify_seconds: f64,
    /// The transport that carried it.
    pub transport: TransportKind,
    /// Block layers written.
    pub writes: u64,
    /// Batches handed to the transport, each of one layer.
    pub slices: u64,
}

/// Called once with a handoff's outcome, on whichever thread learns of it. Must not block.
pub type OnDone = Box<dyn FnOnce(Result<TransferStats, TransferError>) + Send>;

/// A completion's callback. It is called exactly once: when dropped uncalled, with [`TransferError::Closed`].
pub struct Done(Option<OnDone>);

impl Done {
    /// Wraps `callback`.
    pub fn new(callback: OnDone) -> Done {
        Done(Some(callback))
    }

    /// Calls the callback with this outcome.
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

/// A callback for when nothing reads a handoff's local blocks any more. Dropping this calls it.
pub struct Quiet(pub Option<Box<dyn FnOnce() + Send>>);

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback();
        }
    }
}
