//! How fast each tier is, as measured while blocks are loaded.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_kv_store::Tier;

/// Nanoseconds that a byte takes, before one was loaded: 1 GB/s.
const FIRST: f64 = 1.0;
/// How fast the measured pace follows.
const FOLLOW: f64 = 0.2;
/// A pace above [`FIRST`] that is not measured comes halfway back in so long: a tier that was slow is tried again.
const FORGETS: Duration = Duration::from_secs(60);

/// Nanoseconds that a byte takes to load, by tier.
pub(super) struct Paces {
    begun: Instant,
    tiers: [Pace; Tier::ALL.len()],
}

/// A pace in nanoseconds a byte, as bits of an f64, and when it was measured, in nanoseconds since the beginning.
struct Pace {
    nanos: AtomicU64,
    at: AtomicU64,
}

impl Paces {
    pub fn new() -> Paces {
        Paces::from(FIRST)
    }

    /// As if each had been measured just now.
    pub fn from(nanos: f64) -> Paces {
        let pace = |_| Pace { nanos: AtomicU64::new(nanos.to_bits()), at: AtomicU64::new(0) };
        Paces { begun: Instant::now(), tiers: Tier::ALL.map(pace) }
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Nanoseconds that a byte takes now, as far as is known.
    pub fn of(&self, tier: Tier) -> f64 {
        self.at(tier, self.now())
    }

    fn at(&self, tier: Tier, now: Duration) -> f64 {
        let Pace { nanos, at } = &self.tiers[tier as usize];
        let since = now.saturating_sub(Duration::from_nanos(at.load(Relaxed)));
        let slower = f64::from_bits(nanos.load(Relaxed)) - FIRST;
        let halves = since.as_secs_f64() / FORGETS.as_secs_f64();
        FIRST + if slower > 0.0 { slower * 0.5_f64.powf(halves) } else { slower }
    }

    /// Takes in how long so many bytes took.
    pub fn follow(&self, tier: Tier, took: Duration, bytes: usize) {
        self.take_in(tier, took, bytes, self.now());
    }

    /// Takes in that so many bytes were not there after so long.
    pub fn waited(&self, tier: Tier, waited: Duration, bytes: usize) {
        let now = self.now();
        if nanos(waited, bytes) > self.at(tier, now) {
            self.take_in(tier, waited, bytes, now);
        }
    }

    fn take_in(&self, tier: Tier, took: Duration, bytes: usize, now: Duration) {
        let (old, new) = (self.at(tier, now), nanos(took, bytes));
        let pace = &self.tiers[tier as usize];
        pace.nanos.store((old + FOLLOW * (new - old)).to_bits(), Relaxed);
        pace.at.store(now.as_nanos() as u64, Relaxed);
    }
}

fn nanos(took: Duration, bytes: usize) -> f64 {
    took.as_nanos() as f64 / bytes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_tier_that_was_slow_is_tried_again_after_a_while() {
        let paces = Paces::new();
        paces.take_in(Tier::Object, Duration::from_secs(1), 1_000_000, Duration::ZERO);
        let slow = paces.at(Tier::Object, Duration::ZERO);
        assert!((slow - 200.8).abs() < 1e-6, "{slow}: a fifth of the way from 1 to 1,000");
        let later = paces.at(Tier::Object, 2 * MINUTE);
        assert!((later - (1.0 + 199.8 / 4.0)).abs() < 1e-6, "{later}");
        assert!(paces.at(Tier::Object, 60 * MINUTE) < 1.1);
        assert_eq!(paces.at(Tier::Disk, MINUTE), 1.0, "the others are not concerned");
        // What is measured goes on from there.
        paces.take_in(Tier::Object, Duration::from_secs(1), 1_000_000, 60 * MINUTE);
        assert!((paces.at(Tier::Object, 60 * MINUTE) - slow).abs() < 0.1);
    }

    #[test]
    fn a_measured_pace_is_followed() {
        let paces = Paces::new();
        (0..100).for_each(|_| paces.follow(Tier::Disk, Duration::from_micros(3), 1000));
        assert!((2.9..=3.0).contains(&paces.of(Tier::Disk)));
    }

    #[test]
    fn a_pace_better_than_the_first_stays() {
        let paces = Paces::new();
        paces.take_in(Tier::Host, Duration::from_millis(1), 10_000_000, Duration::ZERO);
        let fast = paces.at(Tier::Host, Duration::ZERO);
        assert!(fast < 0.9);
        assert_eq!(paces.at(Tier::Host, 60 * MINUTE), fast);
    }

    #[test]
    fn what_was_not_waited_for_long_says_nothing() {
        let paces = Paces::new();
        paces.waited(Tier::Object, Duration::from_nanos(1), 1000);
        assert_eq!(paces.of(Tier::Object), 1.0);
        paces.waited(Tier::Object, Duration::from_millis(500), 1000);
        assert!(paces.of(Tier::Object) > 1000.0);
    }
}
