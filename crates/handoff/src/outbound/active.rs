//! One handoff under way at the prefill end, as its session keeps it.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{BlockId, Epoch};

use super::core::Core;
use super::done::{Done, TransferStats};
use super::terms::{Pools, SessionTimeouts};
use crate::batch::{BlockWrite, WriteBatch};
use crate::error::TransferError;
use crate::limits::TransportKind;
use crate::state::{self, Action, Input, State};
use crate::wire::MAX_WRITE_BLOCKS;

/// A handoff's state, digests and counts.
pub(crate) struct Active {
    pub core: Arc<Core>,
    pub state: State,
    /// Reserved blocks of the peer's pool per group; empty until access is granted.
    pub targets: Vec<Vec<BlockId>>,
    /// Per group and index: sum of the digests of the layers written.
    pub sums: Vec<Vec<u64>>,
    pub writes: u64,
    pub slices: u64,
    pub bytes: u64,
    /// Callback for the outcome; set once the handoff is completed.
    pub done: Option<Done>,
    /// Whether access was asked for, so that an answer will come.
    pub begun: bool,
    /// When access was asked for.
    asked: Instant,
    /// When the first write left; before that, the same as `asked`.
    began: Instant,
    /// When it was completed at this end; before that, the same as `asked`.
    completed: Instant,
}

impl Active {
    pub(crate) fn new(core: Arc<Core>, now: Instant) -> Active {
        let sums = core.counts.iter().map(|n| vec![0; *n as usize]).collect();
        let (state, _) = state::step(State::Offered, Input::Reserve);
        Active {
            core,
            state,
            targets: Vec::new(),
            sums,
            writes: 0,
            slices: 0,
            bytes: 0,
            done: None,
            begun: false,
            asked: now,
            began: now,
            completed: now,
        }
    }

    /// All of it is written; `done` is told the outcome.
    pub(crate) fn complete(&mut self, done: Done, now: Instant) {
        (self.done, self.completed) = (Some(done), now);
    }

    /// Takes a step and returns what to do.
    pub(crate) fn step(&mut self, input: Input, now: Instant) -> Action {
        let (next, action) = state::step(self.state, input);
        self.state = next;
        if action == Action::Apply && self.writes == 0 {
            self.began = now;
        }
        action
    }

    /// Adds the digest of a block layer that leaves.
    pub(crate) fn add_digest(&mut self, group: usize, index: u32, digest: u64) {
        if let Some(sum) = self.sums.get_mut(group).and_then(|sums| sums.get_mut(index as usize)) {
            *sum = sum.wrapping_add(digest);
        }
    }

    /// Whether it has not ended yet.
    pub(crate) fn is_running(&self) -> bool {
        self.state != State::Released
    }

    pub(crate) fn stats(&self, transport: TransportKind, now: Instant) -> TransferStats {
        let since = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let (seconds, verify_seconds) = (since(self.began), since(self.completed));
        TransferStats {
            bytes: self.bytes,
            seconds,
            verify_seconds,
            transport,
            writes: self.writes,
            slices: self.slices,
        }
    }

    /// When it is given up, whichever comes first:
    /// - at its deadline;
    /// - when access was not granted in time;
    /// - when the peer, last heard from at `heard`, has been silent for too long.
    pub(crate) fn due(&self, timeouts: &SessionTimeouts, heard: Option<Instant>) -> Instant {
        let silent = heard.map_or(self.asked, |heard| heard.max(self.asked)) + timeouts.silence;
        let due = self.core.deadline.min(silent);
        match self.state {
            State::Reserved => due.min(self.asked + timeouts.grant),
            _ => due,
        }
    }

    /// The error for giving it up once it is due.
    pub(crate) fn late(&self, now: Instant, timeouts: &SessionTimeouts) -> TransferError {
        let (epoch, peer, doing) = (self.core.epoch, self.core.peer, self.doing());
        let waited = match self.state {
            State::Reserved => timeouts.grant.min(timeouts.silence),
            _ => timeouts.silence,
        };
        match self.core.deadline <= now {
            true => TransferError::Deadline { epoch, peer, doing },
            false => TransferError::Stalled { epoch, peer, doing, waited },
        }
    }

    /// What it is doing, for error messages.
    fn doing(&self) -> &'static str {
        match (self.state, &self.done) {
            (State::Reserved, _) => "waiting for access to its pool",
            (_, None) => "writing",
            (_, Some(_)) => "waiting for its verification",
        }
    }
}

/// A write as it was queued, and how far it has got: `pairs` before `next` are in batches.
pub(crate) struct Writing {
    pub epoch: Epoch,
    pub group: usize,
    pub layer: usize,
    pub pairs: Vec<(BlockId, u32)>,
    pub after: u64,
    pub next: usize,
}

impl Writing {
    pub(crate) fn is_done(&self) -> bool {
        self.next == self.pairs.len()
    }

    /// The next batch: as many blocks as fit into `batch_bytes` in the peer's pool, at least one. None when an index was not reserved.
    pub(crate) fn next_batch(&mut self, pools: &Pools, to: &Active) -> Option<WriteBatch> {
        let Pools { local, remote, batch_bytes, .. } = pools;
        let (group, layer) = (self.group, self.layer);
        let (source_len, len) = (local.layout.block_bytes(group), remote.layout.block_bytes(group));
        let count = (batch_bytes / len.max(1)).clamp(1, MAX_WRITE_BLOCKS);
        let end = (self.next + count).min(self.pairs.len());
        let targets = to.targets.get(group)?;
        let write = |&(block, index): &(BlockId, u32)| {
            let target = targets.get(index as usize)?;
            let source = local.block_range(group, layer, block).start;
            Some(BlockWrite { index, source, target: remote.block_range(group, layer, *target).start })
        };
        let writes = self.pairs[self.next..end].iter().map(write).collect::<Option<_>>()?;
        self.next = end;
        let lane = remote.layout.first_lane(group, layer);
        let (epoch, after) = (self.epoch, self.after);
        Some(WriteBatch { epoch, group, layer, source_len, len, lane, writes, after, digest: true })
    }
}
