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
//! The hash chain ([`chain_hash`]) only names a prefix for those who do not hold its tokens.

mod check;
mod eviction;
mod index;

use std::time::Duration;

use baton_types::{Time, hash_bytes};

pub use eviction::Eviction;
pub(crate) use index::{NodeId, Parent, PrefixIndex};

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
    /// Priority for [`Eviction::Priority`]: lower is evicted first, and 0 means not kept. A block has the highest priority of
    /// the sequences that used it.
    pub keep: u8,
    /// When `keep` ends. `None`: never.
    pub keep_until: Option<Time>,
}

impl Prefix {
    /// The prefix of a request that asks for its blocks to be kept for `wanted`, of which it gets at most `most` (I5). Among the requests that
    /// ask, those with a lower `priority` number, which are more urgent, are kept longer.
    pub fn kept_for(seed: u64, wanted: Duration, most: Duration, priority: i32, now: Time) -> Prefix {
        let millis = wanted.min(most).as_millis() as u64;
        if millis == 0 {
            return Prefix { seed, ..Prefix::default() };
        }
        let rank = i32::from(i8::MAX) + 1 - priority.clamp(i8::MIN.into(), i8::MAX.into());
        Prefix { seed, keep: u8::try_from(rank).unwrap_or(u8::MAX), keep_until: Some(now.after_ms(millis)) }
    }
}

/// The name of a prefix: `chain_hash(chain_hash(seed, block 0), block 1)` and so on, over full blocks of token ids.
///
/// Hashes can collide: use them for placement and for hints, never to hand out KV.
pub fn chain_hash(before: u64, block: &[u32]) -> u64 {
    block.chunks(2).fold(hash_bytes(before, &(block.len() as u64).to_le_bytes()), |state, pair| {
        let word = u64::from(pair[0]) | pair.get(1).map_or(0, |&high| u64::from(high) << 32);
        hash_bytes(state, &word.to_le_bytes())
    })
}

/// [`chain_hash`] after each full block of `tokens`.
pub fn chain_hashes(seed: u64, tokens: &[u32], block_size: u32) -> impl Iterator<Item = u64> {
    tokens.chunks_exact(block_size as usize).scan(seed, |state, block| {
        *state = chain_hash(*state, block);
        Some(*state)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_named_by_all_before_it() {
        let names = |seed, tokens: &[u32]| chain_hashes(seed, tokens, 3).collect::<Vec<_>>();
        let base = names(1, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(base.len(), 2, "full blocks only");
        assert_eq!(base[..1], names(1, &[1, 2, 3, 9, 9, 9])[..1]);
        assert_ne!(base[1], names(1, &[1, 2, 3, 9, 9, 9])[1]);
        assert_ne!(base[1], names(1, &[9, 2, 3, 4, 5, 6])[1]);
        assert_ne!(base, names(2, &[1, 2, 3, 4, 5, 6]));
    }
}
