//! For tests, the simulator and the fuzzers: one random generator, one way to choose its seed, and one way to leave a test out.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::mix;
use crate::seeded::STEP;

/// The generator SplitMix64 (Steele et al., OOPSLA 2014). Holds its state, which begins with the seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A random 64-bit number.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `n`. `n` must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// An index below `len`. `len` must not be 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with a probability of `per_mille` / 1000.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }

    /// A number uniform in `[-1, 1)`, with 24 random bits.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A vector of `len` numbers, each from [`Random::unit`].
    pub fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    /// `len` random bytes, eight from each number.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.bits().to_le_bytes()[..chunk.len()]);
        }
        bytes
    }

    /// Flips one random bit. `bytes` must not be empty.
    pub fn flip(&mut self, bytes: &mut [u8]) {
        let byte = self.index(bytes.len());
        bytes[byte] ^= 1 << self.below(8);
    }
}

/// The environment variable that sets the seed of randomised tests.
pub const SEED: &str = "BATON_TEST_SEED";

/// The seed in `BATON_TEST_SEED`; None if it is not set.
///
/// # Panics
/// When it is not a number.
pub fn seed() -> Option<u64> {
    let text = std::env::var(SEED).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{SEED} is {text:?}; it must be a whole number, 0 or above")))
}

/// Runs a randomised test with each of these seeds, or only with the seed in `BATON_TEST_SEED` if it is set. Prints the seed of a panic.
pub fn with_seeds(seeds: impl IntoIterator<Item = u64>, test: impl FnMut(u64)) {
    match seed() {
        Some(seed) => each([seed], test),
        None => each(seeds, test),
    }
}

fn each(seeds: impl IntoIterator<Item = u64>, mut test: impl FnMut(u64)) {
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            eprintln!("the seed was {seed}; {SEED}={seed} runs it alone");
            resume_unwind(panic);
        }
    }
}

/// Says that the calling test is left out, and why. Fails it where `BATON_REQUIRE_ALL` is set, as `.ci/run` sets it, so that a green run
/// there has left nothing out.
///
/// # Panics
/// When `BATON_REQUIRE_ALL` is set and not empty.
pub fn left_out(why: impl Display) {
    let all = std::env::var_os("BATON_REQUIRE_ALL").is_some_and(|value| !value.is_empty());
    assert!(!all, "BATON_REQUIRE_ALL is set, and this test cannot run here: {why}");
    println!("skipped: {why}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scenarios, corpora and test models are recorded as seeds, so a seed must always give the same numbers.
    #[test]
    fn the_numbers_are_those_they_have_always_been() {
        let mut random = Random(0);
        let first = [random.bits(), random.bits(), random.bits()];
        assert_eq!(first, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
        let mut random = Random(7);
        let whole = random.clone().bytes(16);
        assert_eq!(random.bytes(11), whole[..11]);
        assert_eq!(u64::from_le_bytes(*whole.first_chunk().unwrap()), Random(7).bits());
    }

    #[test]
    fn numbers_keep_to_their_bounds() {
        let mut random = Random(1);
        let mut seen = [0; 4];
        for _ in 0..1000 {
            seen[random.within(2, 5) as usize - 2] += 1;
            assert!((-1.0..1.0).contains(&random.unit()));
        }
        assert!(seen.iter().all(|&count| count > 200), "{seen:?}");
        let mut bytes = [0; 9];
        random.flip(&mut bytes);
        assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        assert!(!random.chance(0) && random.chance(1000));
    }

    #[test]
    fn a_failure_ends_the_seeds() {
        let mut tried = Vec::new();
        let failed = catch_unwind(AssertUnwindSafe(|| {
            each(0..9, |seed| {
                tried.push(seed);
                assert!(seed < 3);
            })
        }));
        assert!(failed.is_err());
        assert_eq!(tried, [0, 1, 2, 3]);
    }
}
