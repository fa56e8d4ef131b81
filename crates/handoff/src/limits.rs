//! Bounds of both ends, and the transports between them.

use std::time::Duration;

use crate::wire::{FrameLimits, MAX_STREAMS, Over};

/// Bounds that hold on either end (I5).
#[derive(Clone, Debug)]
pub struct TransferLimits {
    /// Open sessions with peers. On the decode side also the further TCP connections of all sessions together. When the prefill side takes
    /// the last one, it closes the session that was used least recently, if that is idle.
    pub connections: usize,
    /// A session without handoffs is closed after this time.
    pub idle: Duration,
    /// Handoffs alive at once: reservations on the decode side, open handoffs per peer on the prefill side.
    pub handoffs: usize,
    /// Blocks of one handoff, over all groups.
    pub blocks_per_handoff: usize,
    /// Bytes of the tail that a completion carries.
    pub tail_bytes: usize,
    /// Block writes (one layer of one block each) queued per session on the prefill side. A write beyond that waits for room.
    pub queued_blocks: usize,
    /// Longest time a write waits for room. Short, because the caller computes for other peers too.
    pub room: Duration,
    /// Longest time to connect and shake hands, over all transports tried. Also the longest time for a handoff to be granted access.
    pub handshake: Duration,
    /// While a handoff is under way, each end sends something at least this often. The same on both ends.
    pub heartbeat: Duration,
    /// A peer that sends nothing for this long while a handoff is under way is given up, and its handoffs with it. Several times the
    /// heartbeat.
    pub silence: Duration,
}

impl Default for TransferLimits {
    fn default() -> Self {
        TransferLimits {
            connections: 256,
            idle: Duration::from_secs(600),
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
    /// How long a device may take to finish work that was given up. The work waits behind the engine steps queued before it, and the peer
    /// hears nothing from this end meanwhile.
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

/// The transport that carries a handoff's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransportKind {
    /// The decode pool mapped into the prefill worker.
    Shm,
    /// A TCP connection.
    Tcp,
    /// UCX, over the network it has chosen.
    Ucx,
    /// The decode pool opened by the prefill worker's GPU.
    CudaIpc,
}

baton_types::words!(TransportKind { Shm = "shm", Tcp = "tcp", Ucx = "ucx", CudaIpc = "cuda-ipc" });

impl TransportKind {
    /// The transport of a session whose caller asks for `over`. `unix` says whether its stream is a unix socket.
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
