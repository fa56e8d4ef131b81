//! What a preempted sequence has in host memory.

use baton_kv_cache::Hit;
use baton_types::BlockId;

/// KV of one preempted sequence in host memory.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// Leading tokens whose KV was computed when it was preempted.
    pub computed: u32,
    /// Index of the first block of its tables that comes from host memory. The blocks before it had other owners too
    /// and were not copied.
    pub from: u32,
    /// Ordered by group, then by index into the block table.
    pub blocks: Vec<HostBlock>,
}

/// One block in host memory.
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
    /// Whether the hit and these blocks together are all the sequence's KV, and more than the hit alone.
    pub fn completes(&self, hit: &Hit) -> bool {
        hit.tokens() < self.computed && hit.blocks() >= self.from
    }
}
