//! Which cached block goes first: the one interface behind which the eviction policies stand.
//!
//! A policy turns what is known of a block's use into a rank; the index keeps evictable blocks in the order of their
//! ranks and takes the lowest. That leaves go before their parents is the index's business, not the policy's.

/// An eviction policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently used, with dynamic aging (LFU-DA: Arlitt et al., "Evaluating content management techniques for
    /// Web proxy caches", 2000): a block's count starts at that of the last one evicted, so that what was popular once
    /// does not stay for ever. Ties: least recently used.
    Lfu,
    /// Lowest [`crate::Prefix::keep`] first, for as long as its time lasts; ties: least recently used. Keeping orders, it
    /// does not reserve: when nothing else is left, what is kept goes too.
    Priority,
}

baton_types::words!(Eviction { Lru = "lru", Lfu = "lfu", Priority = "priority" });

/// The order of eviction: lowest first.
pub(crate) type EvictionRank = (u64, u64);

/// What is known of a block's use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockUsage {
    /// When it was last used, in uses of the whole index.
    last: u64,
    /// Uses, and the age of the cache at the last of them.
    uses: u64,
    score: u64,
    /// How it is kept now.
    pub pin: Pin,
    /// And once that has ended: less, but longer.
    pub later: Pin,
}

/// How strongly a block is kept, 0: not at all, and until when; `u64::MAX`: for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Pin {
    pub keep: u8,
    pub until: u64,
}

impl BlockUsage {
    /// Kept as asked for as well. What others have asked for is neither weakened nor ended early by that; of three levels the
    /// middle one may end with the strongest.
    pub fn pinned(&mut self, asked: Pin) {
        let all = [self.pin, self.later, asked];
        self.pin = all.into_iter().max().unwrap_or_default();
        let longer = all.into_iter().filter(|pin| pin.keep > 0 && pin.until > self.pin.until);
        self.later = longer.max_by_key(|pin| (pin.until, pin.keep)).unwrap_or_default();
    }

    /// The time of its pin is over.
    pub fn unpinned(&mut self) {
        self.pin = std::mem::take(&mut self.later);
    }
}

/// A policy with its state.
#[derive(Debug)]
pub(crate) struct Ranking {
    policy: Eviction,
    tick: u64,
    age: u64,
}

impl Ranking {
    pub fn new(policy: Eviction) -> Ranking {
        Ranking { policy, tick: 0, age: 0 }
    }

    /// Its sequence matched or made it.
    pub fn used(&mut self, usage: &mut BlockUsage) {
        self.rested(usage);
        usage.uses += 1;
        usage.score = self.age + usage.uses;
    }

    /// Nobody uses it any more from now on.
    pub fn rested(&mut self, usage: &mut BlockUsage) {
        self.tick += 1;
        usage.last = self.tick;
    }

    pub fn rank(&self, usage: &BlockUsage) -> EvictionRank {
        match self.policy {
            Eviction::Lru => (usage.last, 0),
            Eviction::Lfu => (usage.score, usage.last),
            Eviction::Priority => (u64::from(usage.pin.keep), usage.last),
        }
    }

    pub fn evicted(&mut self, usage: &BlockUsage) {
        self.age = self.age.max(usage.score);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_never_weakened_nor_ended_early() {
        let pin = |keep, until| Pin { keep, until };
        let after = |asked: &[Pin]| {
            let mut usage = BlockUsage::default();
            asked.iter().for_each(|asked| usage.pinned(*asked));
            (usage.pin, usage.later)
        };
        let (short, long, none) = (pin(9, 10), pin(1, 3600), Pin::default());
        assert_eq!(after(&[long]), (long, none));
        assert_eq!(after(&[long, short]), (short, long));
        assert_eq!(after(&[short, long]), (short, long));
        assert_eq!(after(&[short, long, pin(1, 20)]), (short, long), "shorter than what follows");
        assert_eq!(after(&[short, long, pin(2, 3600)]), (short, pin(2, 3600)));
        assert_eq!(after(&[short, long, pin(9, u64::MAX)]), (pin(9, u64::MAX), none));
        let mut usage = BlockUsage::default();
        [long, short].into_iter().for_each(|asked| usage.pinned(asked));
        usage.unpinned();
        assert_eq!((usage.pin, usage.later), (long, none));
    }
}
