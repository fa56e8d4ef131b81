//! Bounds of both ends, and what carries blocks between them.

use std::time::Duration;

use crate::wire::{FrameLimits, MAX_STREAMS, Over};

/// Bounds that hold on either end (I5).
#[derive(Clone, Debug)]
pub struct TransferLimits {
    /// Open sessions with peers. On the decode side so many further connections of sessions over TCP, too.
    pub connections: usize,
    /// Handoffs alive at once: reservations on the decode side, open handoffs per peer on the prefill side.
    pub handoffs: usize,
    /// Blocks of one handoff, over all groups.
    pub blocks_per_handoff: usize,
    /// Bytes of the tail that a completion carries.
    pub tail_bytes: usize,
    /// Block writes waiting per connection on the prefill side; a write beyond it waits for room.
    pub queued_blocks: usize,
    /// Longest time a write waits for room. Short, because the caller computes for other peers too.
    pub room: Duration,
    /// Longest time for connecting and shaking hands, over all transports tried; and again for each handoff to be
    /// granted access.
    pub handshake: Duration,
    /// While a handoff is under way, each end says at least so often that it is alive. The same on both ends.
    pub heartbeat: Duration,
    /// A peer that says nothing for so long while a handoff is under way is given up, and its handoffs with it. Several
    /// times the heartbeat.
    pub silence: Duration,
}

impl Default for TransferLimits {
    fn default() -> Self {
        TransferLimits {
            connections: 256,
            handoffs: 4096,
            blocks_per_handoff: 65_536,
            tail_bytes: 64 << 10,
            queued_blocks: 65_536,
            room: Duration::from_secs(1),
            handshake: Duration::from_secs(2),
            heartbeat: Duration::from_millis(400),
            silence: Duration::from_secs(2),
        }
    }
}

impl TransferLimits {
    /// How long what a device was given may take to be done once it is given up. It waits for the steps that it was queued behind, and
    /// while it is waited for the peer hears nothing.
    pub fn grace(&self) -> Duration {
        self.silence / 2
    }
}

impl FrameLimits {
    /// Bounds for handoffs within `limits` over `groups` layer groups.
    pub fn new(limits: &TransferLimits, groups: usize) -> FrameLimits {
        let lists = 64 + 4 * groups;
        FrameLimits {
            list: lists + 4 * limits.blocks_per_handoff,
            complete: lists + 8 * (MAX_STREAMS + limits.blocks_per_handoff) + limits.tail_bytes,
        }
    }
}

/// What carried a handoff.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransportKind {
    /// The decode pool mapped into the prefill worker.
    Shm,
    /// A TCP connection.
    Tcp,
    /// Whatever UCX has found.
    Ucx,
    /// The decode pool opened by the prefill worker's GPU.
    CudaIpc,
}

baton_types::words!(TransportKind { Shm = "shm", Tcp = "tcp", Ucx = "ucx", CudaIpc = "cuda-ipc" });

impl TransportKind {
    /// What a session's stream implies, and what its caller asks for.
    pub fn of(unix: bool, over: Over) -> TransportKind {
        match (over, unix) {
            (Over::Ucx, _) => TransportKind::Ucx,
            (Over::CudaIpc, _) => TransportKind::CudaIpc,
            (Over::Stream, true) => TransportKind::Shm,
            (Over::Stream, false) => TransportKind::Tcp,
        }
    }

    /// Whether the prefill worker writes into the decode worker's pool by itself, so that only it knows when it has
    /// stopped (I3).
    pub fn is_one_sided(self) -> bool {
        self != TransportKind::Tcp
    }
}
