//! How long to wait before trying again. Pure: a seed gives the random spread of the waits.

use std::time::Duration;

use baton_types::hash_bytes;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);

/// Waits that double from 100 ms to 2 s, or to a lower limit. Each wait is spread over its upper half, so that the clients of
/// one registry do not all come back at once.
#[derive(Clone, Debug)]
pub struct Backoff {
    seed: u64,
    longest: Duration,
    tries: u32,
}

impl Backoff {
    /// A backoff of which no wait is longer than `limit`. `seed` should differ between clients.
    pub fn new(seed: u64, limit: Duration) -> Backoff {
        Backoff { seed, longest: limit.min(LONGEST), tries: 0 }
    }

    /// Records that a try worked: the next wait is the shortest again.
    pub fn reset(&mut self) {
        self.tries = 0;
    }

    /// True when no try has failed since the last success.
    pub fn is_fresh(&self) -> bool {
        self.tries == 0
    }

    /// How long to wait now. Later waits are longer, up to the limit.
    #[allow(clippy::should_implement_trait)] // Unlike an iterator, it never ends.
    pub fn next(&mut self) -> Duration {
        let full = FIRST.saturating_mul(1 << self.tries.min(16)).min(self.longest);
        let spread = hash_bytes(self.seed, &self.tries.to_le_bytes()) as u32;
        self.tries = self.tries.saturating_add(1);
        full / 2 + (full / 2).mul_f64(f64::from(spread) / f64::from(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_are_bounded_and_differ_between_clients() {
        let mut a = Backoff::new(1, Duration::from_secs(60));
        let mut b = Backoff::new(2, Duration::from_secs(60));
        assert!(a.is_fresh());
        for full in [100, 200, 400, 800, 1600, 2000, 2000].map(Duration::from_millis) {
            let (wait, other) = (a.next(), b.next());
            assert!(wait >= full / 2 && wait <= full, "{wait:?} of {full:?}");
            assert_ne!(wait, other);
        }
        assert!(!a.is_fresh());
        a.reset();
        assert!(a.next() <= FIRST);
        let mut short = Backoff::new(3, Duration::from_millis(300));
        assert!((0..100).all(|_| short.next() <= Duration::from_millis(300)));
    }
}
