//! A small pool and reservations of it, for tests of both ends and of the code that drives them.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{Epoch, KvDtype, KvGroup, KvLayout, PoolGeometry, WorkerId};

use crate::{Core, Descriptor, Host};

/// A pool of four blocks with one layer.
pub fn geometry() -> PoolGeometry {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
    PoolGeometry::uniform(layout, 4)
}

/// A reservation of `blocks` blocks at worker 1.
pub fn target(blocks: u32) -> Descriptor {
    Descriptor {
        worker: WorkerId(1),
        epoch: Epoch(1),
        key: 7,
        tokens: 4 * blocks,
        first: vec![0],
        counts: vec![blocks],
        layout: geometry().layout,
        device: false,
        host: Host { boot: [1; 16], place: 1 },
        unix: b"none".to_vec(),
        address: "127.0.0.1".into(),
        port: 1,
    }
}

/// A handoff of one block to worker 1.
pub fn core(epoch: Epoch, deadline: Instant) -> Arc<Core> {
    Arc::new(Core::new(&Descriptor { epoch, ..target(1) }, deadline))
}
