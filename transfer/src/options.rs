//! What the two ends are told when they start. Values come from the nodes' configuration; nothing is read from outside.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_types::{PoolGeometry, WorkerId};

use crate::convert::Converter;
use crate::error::TransferError;
use crate::segment::Segment;

/// Bounds that hold on either end (I5).
#[derive(Clone, Debug)]
pub struct Limits {
    /// Open connections to peers.
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
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 256,
            handoffs: 4096,
            blocks_per_handoff: 65_536,
            tail_bytes: 64 << 10,
            queued_blocks: 65_536,
            room: Duration::from_secs(1),
            handshake: Duration::from_secs(2),
        }
    }
}

/// How to reach a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransportChoice {
    /// Shared memory when both are on one host and it can be had, otherwise TCP.
    #[default]
    Auto,
    /// Shared memory or nothing.
    Shm,
    /// TCP.
    Tcp,
}

/// What carried a handoff.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransportKind {
    /// The decode pool mapped into the prefill worker.
    Shm,
    /// A TCP connection.
    Tcp,
}

impl TransportKind {
    /// A stable word for metrics labels and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
        }
    }
}

/// The decode end.
#[derive(Clone, Debug)]
pub struct ReceiverOptions {
    /// This worker.
    pub worker: WorkerId,
    /// Where to listen; port 0 takes any free one.
    pub tcp: SocketAddr,
    /// Host name or address peers should connect to; needed when `tcp` is unspecified (0.0.0.0), else its address.
    pub advertise: Option<String>,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub segment: Arc<Segment>,
    /// Bounds.
    pub limits: Limits,
    /// Whether what arrives is compared with its digests (I2). Only a benchmark may say no.
    pub verify: bool,
}

/// The prefill end.
#[derive(Clone, Debug)]
pub struct SenderOptions {
    /// This worker.
    pub worker: WorkerId,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub segment: Arc<Segment>,
    /// How to reach decode workers.
    pub transport: TransportChoice,
    /// Bounds.
    pub limits: Limits,
    /// Writes KV in the type of decode pools that have another; None: both sides must have the same.
    pub convert: Option<Converter>,
    /// Whether what leaves is digested (I2). Only a benchmark may say no; see [`ReceiverOptions::verify`].
    pub verify: bool,
}

/// A pool's geometry must fit its segment before any of its offsets is used.
pub(crate) fn check_pool(geometry: &PoolGeometry, segment: &Segment) -> Result<(), TransferError> {
    if geometry.blocks.len() != geometry.layout.groups.len() || geometry.blocks.is_empty() {
        let problem =
            format!("{} block counts for {} layer groups", geometry.blocks.len(), geometry.layout.groups.len());
        return Err(TransferError::argument("geometry.blocks", problem));
    }
    if geometry.bytes() > segment.len() {
        let problem = format!("{} bytes, but the pool's geometry needs {}", segment.len(), geometry.bytes());
        return Err(TransferError::argument("segment", problem));
    }
    Ok(())
}
