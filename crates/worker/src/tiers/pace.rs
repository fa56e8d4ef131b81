//! How fast each tier is, as measured while blocks are loaded.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_kv_store::Tier;

/// Nanoseconds that a byte takes at best: from memory, from several NVMe disks, over a network of 100 Gbit/s. Of a tier that was not tried yet this is
/// expected: one that is not expected to be sooner than computing would never be tried.
const BEST: [f64; Tier::ALL.len()] = [0.02, 0.07, 0.1];
/// Nanoseconds a byte that are waited for at least: 1 GB/s.
const USUAL: f64 = 1.0;
/// How fast the measured pace follows.
const FOLLOW: f64 = 0.2;
/// How far the first measurement counts.
const FIRST: f64 = 0.5;
/// An expected pace comes halfway back to the best in so long without a measurement: a tier that was slow is tried again.
const FORGETS: Duration = Duration::from_secs(60);

/// Nanoseconds that a byte takes to load, by tier.
pub(super) struct Paces {
    begun: Instant,
    tiers: [Pace; Tier::ALL.len()],
}

/// A pace in nanoseconds a byte, as bits of an f64, and when it was measured, in nanoseconds since the beginning. 0: it was not.
#[derive(Default)]
struct Pace {
    nanos: AtomicU64,
    at: AtomicU64,
}

impl Paces {
    pub fn new() -> Paces {
        Paces { begun: Instant::now(), tiers: Default::default() }
    }

    /// As if each had been measured just now.
    #[cfg(test)]
    pub fn from(nanos: f64) -> Paces {
        let paces = Paces::new();
        paces.tiers.iter().for_each(|pace| pace.nanos.store(nanos.to_bits(), Relaxed));
        paces
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn measured(&self, tier: Tier) -> Option<f64> {
        let nanos = f64::from_bits(self.tiers[tier as usize].nanos.load(Relaxed));
        (nanos > 0.0).then_some(nanos)
    }

    /// Nanoseconds that a byte is expected to take now.
    pub fn of(&self, tier: Tier) -> f64 {
        self.at(tier, self.now())
    }

    /// Nanoseconds a byte that are no surprise. What was slow counts no longer than it is expected to be, so that a tier that is away costs little.
    pub fn usual(&self, tier: Tier) -> f64 {
        self.of(tier).max(self.measured(tier).unwrap_or(USUAL).min(USUAL))
    }

    fn at(&self, tier: Tier, now: Duration) -> f64 {
        let best = BEST[tier as usize];
        let Some(measured) = self.measured(tier).filter(|nanos| *nanos > best) else {
            return self.measured(tier).unwrap_or(best);
        };
        let since = now.saturating_sub(Duration::from_nanos(self.tiers[tier as usize].at.load(Relaxed)));
        let halves = since.as_secs_f64() / FORGETS.as_secs_f64();
        best + (measured - best) * 0.5_f64.powf(halves)
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

    /// Several threads load. If two measure at the same moment, one of the measurements is lost.
    fn take_in(&self, tier: Tier, took: Duration, bytes: usize, now: Duration) {
        let new = nanos(took, bytes);
        let followed = match self.measured(tier) {
            // What was forgotten meanwhile comes back only as far as it is slow again.
            Some(old) => {
                let since = new.clamp(self.at(tier, now).min(old), old);
                since + FOLLOW * (new - since)
            }
            None => BEST[tier as usize] + FIRST * (new - BEST[tier as usize]),
        };
        let pace = &self.tiers[tier as usize];
        pace.nanos.store(followed.to_bits(), Relaxed);
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

    /// A device computes 25 GB of KV a second, and a disk reads 10.
    #[test]
    fn a_tier_is_tried_before_it_is_known_to_be_slow_and_again_after_a_while() {
        let paces = Paces::new();
        assert!(Tier::ALL.into_iter().all(|tier| paces.at(tier, Duration::ZERO) <= 0.1), "{BEST:?}");
        paces.take_in(Tier::Object, Duration::from_secs(1), 1_000_000, Duration::ZERO);
        let slow = paces.at(Tier::Object, Duration::ZERO);
        assert!((slow - 500.05).abs() < 1e-6, "{slow}: half of the way from 0.1 to 1,000");
        let later = paces.at(Tier::Object, 2 * MINUTE);
        assert!((later - (0.1 + 499.95 / 4.0)).abs() < 1e-6, "{later}");
        assert!(paces.at(Tier::Object, 60 * MINUTE) < 0.11);
        assert_eq!(paces.at(Tier::Disk, MINUTE), 0.07, "the others are not concerned");
        // One more measurement, and it is known again.
        paces.take_in(Tier::Object, Duration::from_secs(1), 1_000_000, 60 * MINUTE);
        assert!(paces.at(Tier::Object, 60 * MINUTE) > slow);
        // Or it is fast by now, and what was slow is over.
        paces.take_in(Tier::Object, Duration::from_micros(300), 1_000_000, 120 * MINUTE);
        assert!(paces.at(Tier::Object, 120 * MINUTE) < 0.31);
    }

    #[test]
    fn a_measured_pace_is_followed() {
        let paces = Paces::new();
        (0..100).for_each(|_| paces.follow(Tier::Disk, Duration::from_micros(3), 1000));
        assert!((2.9..=3.0).contains(&paces.of(Tier::Disk)));
    }

    #[test]
    fn a_pace_better_than_the_best_stays() {
        let paces = Paces::new();
        paces.take_in(Tier::Disk, Duration::from_millis(1), 100_000_000, Duration::ZERO);
        let fast = paces.at(Tier::Disk, Duration::ZERO);
        assert!(fast < BEST[Tier::Disk as usize]);
        assert_eq!(paces.at(Tier::Disk, 60 * MINUTE), fast);
    }

    #[test]
    fn what_is_no_surprise_is_one_gigabyte_a_second_or_what_was_measured() {
        let paces = Paces::new();
        assert_eq!(paces.usual(Tier::Disk), USUAL, "not known");
        (0..100).for_each(|_| paces.follow(Tier::Disk, Duration::from_micros(500), 1_000_000));
        assert!((0.49..0.51).contains(&paces.usual(Tier::Disk)));
        // Long ago it was slow.
        paces.take_in(Tier::Disk, Duration::from_secs(1), 1_000_000, Duration::ZERO);
        let long_ago = Paces { begun: Instant::now() - 20 * MINUTE, ..paces };
        assert!((1.0..1.1).contains(&long_ago.usual(Tier::Disk)), "{}", long_ago.usual(Tier::Disk));
    }

    #[test]
    fn what_was_not_waited_for_long_says_nothing() {
        let paces = Paces::new();
        paces.waited(Tier::Object, Duration::from_nanos(1), 1000);
        assert_eq!(paces.of(Tier::Object), 0.1);
        paces.waited(Tier::Object, Duration::from_millis(500), 1000);
        assert!(paces.of(Tier::Object) > 1000.0);
    }
}
