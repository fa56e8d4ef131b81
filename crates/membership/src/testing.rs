//! A member for tests.

use baton_types::WorkerId;

use crate::{Member, Role};

/// A valid decode worker with this id.
pub fn member(id: u64) -> Member {
    Member {
        id: WorkerId(id),
        role: Role::Decode,
        grpc: "http://127.0.0.1:9001".to_owned(),
        admin: "http://127.0.0.1:9002".to_owned(),
        model: "smollm2".to_owned(),
        layout: u64::MAX,
        blocks: 512,
        block_size: 16,
        window_tokens: 0,
        max_running: 64,
        context_tokens: 8192,
        draining: false,
        late_targets: false,
        exchanges: 0,
        kv_secret: 0,
    }
}
