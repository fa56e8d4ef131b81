//! What a session is opened with: who talks to whom, between which pools blocks move, and how long what is waited for.

use std::time::Duration;

use baton_types::{PoolGeometry, WorkerId};

use crate::batch::BATCH_BYTES;

/// Who is who.
#[derive(Clone, Copy, Debug)]
pub struct Parties {
    /// The prefill worker.
    pub me: WorkerId,
    /// The decode worker.
    pub peer: WorkerId,
}

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionTimeouts {
    /// For access to be granted.
    pub grant: Duration,
    /// For anything at all to be heard while a handoff is under way.
    pub silence: Duration,
}

/// Between which pools blocks move.
#[derive(Clone, Debug)]
pub struct Pools {
    /// This worker's.
    pub local: PoolGeometry,
    /// The peer's. Its layout differs in its KV type at most.
    pub remote: PoolGeometry,
    /// Bytes of a batch.
    pub batch_bytes: usize,
    /// Whether what leaves is digested (I2). Only a benchmark may say no.
    pub verify: bool,
}

impl Pools {
    /// Two of the same shape.
    pub fn alike(geometry: PoolGeometry) -> Pools {
        Pools { local: geometry.clone(), remote: geometry, batch_bytes: BATCH_BYTES, verify: true }
    }
}
