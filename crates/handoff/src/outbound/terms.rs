//! A session's parameters: its two workers, its two pools, and its timeouts.

use std::time::Duration;

use baton_types::{PoolGeometry, WorkerId};

use crate::batch::BATCH_BYTES;

/// The two workers of a session.
#[derive(Clone, Copy, Debug)]
pub struct Parties {
    /// The prefill worker.
    pub me: WorkerId,
    /// The decode worker.
    pub peer: WorkerId,
}

/// How long a session waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionTimeouts {
    /// For access to be granted.
    pub grant: Duration,
    /// For anything at all from the peer while a handoff is under way.
    pub silence: Duration,
}

/// The two pools between which blocks move.
#[derive(Clone, Debug)]
pub struct Pools {
    /// This worker's pool.
    pub local: PoolGeometry,
    /// The peer's pool. Its layout differs at most in its KV type.
    pub remote: PoolGeometry,
    /// Target size of a batch in bytes.
    pub batch_bytes: usize,
    /// Whether blocks that leave are digested (I2). Only a benchmark may turn this off.
    pub verify: bool,
}

impl Pools {
    /// Two pools of the same shape.
    pub fn alike(geometry: PoolGeometry) -> Pools {
        Pools { local: geometry.clone(), remote: geometry, batch_bytes: BATCH_BYTES, verify: true }
    }
}
