//! How long it takes to load what prompts ask for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use baton_kv_store::Tier;

use super::pace::Paces;

/// How fast it follows what is found.
const FOLLOW: f64 = 0.1;

/// Where the stored prefixes that prompts lately asked for lie. It follows from what is found, not from what is loaded: what is too slow to be loaded
/// counts, too.
pub(super) struct Expected {
    /// Share of blocks by tier, as bits of an f64.
    shares: [AtomicU64; Tier::ALL.len()],
    paces: Arc<Paces>,
}

impl Expected {
    /// Before anything was found, all is in this tier.
    pub fn new(paces: Arc<Paces>, tier: Tier) -> Expected {
        let share = |of: Tier| AtomicU64::new(f64::from(u8::from(of == tier)).to_bits());
        Expected { shares: Tier::ALL.map(share), paces }
    }

    /// Nanoseconds that a byte is expected to take now.
    pub fn nanos(&self) -> f64 {
        let of = |tier: Tier| f64::from_bits(self.shares[tier as usize].load(Relaxed)) * self.paces.of(tier);
        Tier::ALL.into_iter().map(of).sum()
    }

    /// A prefix was found whose blocks lie in these tiers. Called by one thread.
    pub fn found(&self, blocks: impl Iterator<Item = Tier>) {
        let mut counts = [0_u32; Tier::ALL.len()];
        blocks.for_each(|tier| counts[tier as usize] += 1);
        let all = f64::from(counts.iter().sum::<u32>().max(1));
        for (share, count) in self.shares.iter().zip(counts) {
            let now = f64::from_bits(share.load(Relaxed));
            share.store((now + FOLLOW * (f64::from(count) / all - now)).to_bits(), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker with an object store that has most of its prompts in host memory is not as slow as the object store.
    #[test]
    fn what_is_found_lately_counts() {
        let paces = Arc::new(Paces::new());
        let expected = Expected::new(Arc::clone(&paces), Tier::Object);
        assert_eq!(expected.nanos(), paces.of(Tier::Object));
        (0..100).for_each(|_| expected.found([Tier::Host, Tier::Host].into_iter()));
        assert!((expected.nanos() / paces.of(Tier::Host) - 1.0).abs() < 0.01);
        (0..100).for_each(|_| expected.found([Tier::Host, Tier::Object].into_iter()));
        let half = (paces.of(Tier::Host) + paces.of(Tier::Object)) / 2.0;
        assert!((expected.nanos() / half - 1.0).abs() < 0.01);
    }
}
