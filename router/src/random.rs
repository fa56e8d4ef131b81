//! Random numbers for ids and seeds.

use std::hash::{BuildHasher, Hasher, RandomState};

/// 64 unpredictable bits: the standard library seeds its hashers from the system's random numbers.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}
