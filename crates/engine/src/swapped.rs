//! What a preempted sequence has in host memory.

use baton_kv_cache::Hit;
use baton_types::BlockId;

/// What a sequence has in host memory.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// Leading tokens whose KV was computed when it was preempted.
    pub computed: u32,
    /// The first block of its tables that comes from here. Those before had other owners, and were not copied.
    pub from: u32,
    /// By group, then in the order of its tables.
    pub blocks: Vec<HostBlock>,
}

/// One block of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBlock {
    /// Layer group.
    pub group: usize,
    /// Index into the block table.
    pub at: u32,
    /// The block of host memory.
    pub host: BlockId,
}

impl Swapped {
    /// Whether this and a hit together are all its KV, and more than the hit alone.
    pub fn completes(&self, hit: &Hit) -> bool {
        hit.tokens() < self.computed && hit.blocks() >= self.from
    }
}
