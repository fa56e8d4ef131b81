//! Numbers for names and seeds.

use std::hash::{BuildHasher, Hasher, RandomState};

/// 64 bits nobody can foresee: the standard library seeds each hasher from the system.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}
