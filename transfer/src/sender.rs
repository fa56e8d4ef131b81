//! The prefill end.

use std::time::Instant;

use baton_types::{BlockId, Epoch};

use crate::error::TransferError;
use crate::options::{SenderOptions, TransportKind};

/// What a verified handoff took.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TransferStats {
    /// KV bytes.
    pub bytes: u64,
    /// From the first write to the decode side's answer.
    pub seconds: f64,
    /// What carried it.
    pub transport: TransportKind,
    /// Block layers written.
    pub writes: u64,
}

/// Called once with a handoff's outcome, on a transfer thread. Must not block.
pub type OnDone = Box<dyn FnOnce(Result<TransferStats, TransferError>) + Send>;

/// Where KV leaves.
pub struct Sender {}

impl Sender {
    /// Connects to nobody yet.
    pub fn new(options: SenderOptions) -> Result<Sender, TransferError> {
        let _ = options;
        Ok(Sender {})
    }

    /// Starts a handoff to the reservation `target` describes, to be over by `deadline`. Does not wait for the network.
    pub fn open(&self, target: &[u8], deadline: Instant) -> Result<Handoff, TransferError> {
        let _ = (target, deadline);
        Err(TransferError::Closed)
    }
}

/// One handoff under way. Dropping it aborts it.
pub struct Handoff {
    epoch: Epoch,
    counts: Vec<u32>,
    tokens: u32,
}

impl Handoff {
    /// The reservation's epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Tokens whose KV the reservation wants: the last ones of the prompt.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Blocks the reservation holds, per group.
    pub fn block_counts(&self) -> &[u32] {
        &self.counts
    }

    /// Queues one layer of some blocks: pairs of (block of the local pool, index in the reservation's list of the
    /// group). Every layer of every block must be written once. The local blocks must stay unchanged until the
    /// handoff's end is reported. Blocks while the queue is full, until the deadline.
    pub fn write(
        &mut self,
        group: usize,
        layer_in_group: usize,
        pairs: &[(BlockId, u32)],
    ) -> Result<(), TransferError> {
        let _ = (group, layer_in_group, pairs);
        Err(TransferError::Closed)
    }

    /// Everything is written: `on_done` is called exactly once, when the decode side has verified or refused, or at
    /// abort, loss of the peer or deadline. `tail` travels along to `Verified`.
    pub fn complete(self, tail: Vec<u8>, on_done: OnDone) {
        let _ = tail;
        on_done(Err(TransferError::Closed));
    }

    /// Gives up. `on_quiet` is called once nothing reads the local blocks any more.
    pub fn abort(self, on_quiet: Box<dyn FnOnce() + Send>) {
        on_quiet();
    }
}
