//! Random numbers for ids, keys and seeds.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// 64 bits that nobody can predict. For shells only: pure crates are given their randomness.
///
/// A count, hashed by SipHash under a key that the standard library takes from the system once a process.
pub fn random_u64() -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::random_u64;

    #[test]
    fn numbers_differ() {
        let numbers: std::collections::BTreeSet<u64> = (0..1000).map(|_| random_u64()).collect();
        assert_eq!(numbers.len(), 1000);
    }
}
