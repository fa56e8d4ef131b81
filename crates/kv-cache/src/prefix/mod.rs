//! Which prefixes are in the pool: a tree of blocks, and how a sequence asks for it.
//!
//! A node is one block of tokens after its parent's, with the block that holds its KV in each layer group. A node stays as
//! long as it or one below it has a block in the pool, so the pool bounds the index, to four nodes a block where windows leave
//! nodes without one (I5); [`CacheConfig::max_blocks`] bounds it further.
//!
//! Nodes are found by comparing token ids under their parent, not by a hash: a lookup is a handful of comparisons, finds
//! the longest common beginning of a block as well (for copy-on-write), and a crafted prompt can never be given another
//! prompt's KV. The hash chain ([`chain_hash`]) only names a prefix to those who do not hold its tokens.

mod check;
mod eviction;
mod index;

use baton_types::{Time, hash_bytes};

pub use eviction::Eviction;
pub(crate) use index::{NodeId, Parent, PrefixIndex};

/// The prefix cache's limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheConfig {
    /// Most indexed blocks of tokens, whatever the pool has; 0 turns the cache off.
    pub max_blocks: u32,
    /// Most blocks of tokens that are kept ([`Prefix::keep`]) at once; those beyond count as any other.
    pub max_kept: u32,
    /// Which cached blocks go first.
    pub eviction: Eviction,
}

impl Default for CacheConfig {
    /// As much as the pool holds, least recently used first.
    fn default() -> Self {
        CacheConfig { max_blocks: u32::MAX, max_kept: u32::MAX, eviction: Eviction::Lru }
    }
}

/// Under which root a sequence's tokens are indexed, and how its blocks are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefix {
    /// Sequences with equal seeds may share KV: made of the model's fingerprint and the tenant's salt.
    pub seed: u64,
    /// For [`Eviction::Priority`]: blocks of lower ones go first, those of 0 (not kept at all) before all. A block has the
    /// highest of those that use it.
    pub keep: u8,
    /// When `keep` ends; `None`: never.
    pub keep_until: Option<Time>,
}

/// The name of a prefix: `chain_hash(chain_hash(seed, block 0), block 1)` and so on, over full blocks of token ids.
///
/// Not collision-free: good for placement and for guessing, not for handing out KV.
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
