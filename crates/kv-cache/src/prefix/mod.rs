//! The prefix index, a tree of the prefixes in the pool, and how a sequence uses it.
//!
//! A node is one block of tokens that follows its parent's tokens. It names the block that holds its KV in each layer group.
//! A node stays as long as it or a descendant has a block in the pool, so the pool bounds the index (I5). Windows may leave
//! nodes without a block; the index therefore has at most four nodes for each block of the pool. [`CacheConfig::max_blocks`]
//! bounds it further.
//!
//! A lookup compares token ids with those of a node's children, not hashes:
//!
//! - It takes a handful of comparisons.
//! - It also finds the longest common beginning of a block (for copy-on-write).
//! - A crafted prompt can never be given another prompt's KV.
//!
//! Each full block also has a [`BlockName`], for those who do not hold its tokens. The index notes which names come and go, if somebody wants
//! to know ([`Cached`](crate::Cached)).

mod check;
mod eviction;
mod index;
mod name;

use std::time::Duration;

use baton_types::Time;

pub use eviction::Eviction;
pub(crate) use index::{Block, NodeId, Parent, PrefixIndex};
pub use name::{BlockName, NameChain, NameSecret};

/// The prefix cache's limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheConfig {
    /// Most blocks of tokens in the index, whatever the size of the pool; 0 turns the cache off.
    pub max_blocks: u32,
    /// Most blocks of tokens kept ([`Prefix::keep`]) at once. Requests to keep more are ignored.
    pub max_kept: u32,
    /// Which cached blocks are evicted first.
    pub eviction: Eviction,
}

impl Default for CacheConfig {
    /// As much as the pool holds, evicting the least recently used first.
    fn default() -> Self {
        CacheConfig { max_blocks: u32::MAX, max_kept: u32::MAX, eviction: Eviction::Lru }
    }
}

/// The root under which a sequence's tokens are indexed, and how long its blocks are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefix {
    /// Sequences with equal seeds may share KV. Derived from the model's fingerprint and the tenant's salt.
    pub seed: u64,
    /// What comes before the first block, in its name.
    pub root: NameChain,
    /// Priority for [`Eviction::Priority`]: lower is evicted first, and 0 means not kept. A block has the highest priority of
    /// the sequences that used it.
    pub keep: u8,
    /// When `keep` ends. `None`: never.
    pub keep_until: Option<Time>,
}

impl Prefix {
    /// The same prefix for a request that asks for its blocks to be kept for `wanted`, of which it gets at most `most` (I5). Among the requests that
    /// ask, those with a lower `priority` number, which are more urgent, are kept longer.
    #[must_use]
    pub fn kept_for(self, wanted: Duration, most: Duration, priority: i32, now: Time) -> Prefix {
        let millis = wanted.min(most).as_millis() as u64;
        if millis == 0 {
            return self;
        }
        let rank = i32::from(i8::MAX) + 1 - priority.clamp(i8::MIN.into(), i8::MAX.into());
        Prefix { keep: u8::try_from(rank).unwrap_or(u8::MAX), keep_until: Some(now.after_ms(millis)), ..self }
    }
}
