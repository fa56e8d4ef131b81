//! How long it takes to load what prompts ask for.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How fast it follows what is found.
const FOLLOW: f64 = 0.1;

/// Nanoseconds that a byte of a stored prefix is expected to take, as the prefixes lately found lie in the tiers. It follows from what is found, not
/// from what is loaded: what is too slow to be loaded is known, too.
#[derive(Debug)]
pub(super) struct Expected(AtomicU64);

impl Expected {
    pub fn new(nanos: f64) -> Expected {
        Expected(AtomicU64::new(nanos.to_bits()))
    }

    pub fn nanos(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// A prefix was found of which a byte takes so long. Called by one thread.
    pub fn found(&self, nanos: f64) {
        let now = self.nanos();
        self.0.store((now + FOLLOW * (nanos - now)).to_bits(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker with an object store that has most of its prompts in host memory is not as slow as the object store.
    #[test]
    fn what_is_found_lately_counts() {
        let expected = Expected::new(20.0);
        (0..100).for_each(|_| expected.found(0.1));
        assert!((0.1..0.2).contains(&expected.nanos()));
        (0..100).for_each(|_| expected.found(20.0));
        assert!((19.0..20.0).contains(&expected.nanos()));
    }
}
