//! Eviction policies: which cached block is evicted first.
//!
//! A policy turns a block's usage into a rank. The index keeps evictable blocks in the order of their ranks and evicts the
//! lowest. The index, not the policy, sees to it that leaves are evicted before their parents.

/// An eviction policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently used, with dynamic aging (LFU-DA: Arlitt et al., "Evaluating content management techniques for
    /// Web proxy caches", 2000). A used block's score is its use count plus the highest score evicted so far, so a block
    /// that was popular once does not stay for ever. Ties: least recently used.
    Lfu,
    /// Lowest [`crate::Prefix::keep`] first, until its time ends. Ties: least recently used. A kept block is not reserved:
    /// when nothing else is left, it is evicted too.
    Priority,
}

baton_types::words!(Eviction { Lru = "lru", Lfu = "lfu", Priority = "priority" });

/// A block's place in the order of eviction: lowest first.
pub(crate) type EvictionRank = (u64, u64);

/// How a block was used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockUsage {
    /// When the block was last used or released, in ticks of the whole index.
    last: u64,
    /// Number of uses.
    uses: u64,
    /// LFU-DA score: `uses` plus the age of the cache at the last use.
    score: u64,
    /// How the block is kept now.
    pub pin: Pin,
    /// How the block is kept once `pin` has ended: more weakly, but for longer.
    pub later: Pin,
}

/// How strongly a block is kept (`keep` 0: not at all) and until when (`until` `u64::MAX`: for ever).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Pin {
    pub keep: u8,
    pub until: u64,
}

impl BlockUsage {
    /// Adds a pin. This neither weakens nor ends early the strongest pin and the pin that lasts longest. Only those two are
    /// stored: a pin between them ends with the strongest.
    pub fn pinned(&mut self, asked: Pin) {
        let all = [self.pin, self.later, asked];
        self.pin = all.into_iter().max().unwrap_or_default();
        let longer = all.into_iter().filter(|pin| pin.keep > 0 && pin.until > self.pin.until);
        self.later = longer.max_by_key(|pin| (pin.until, pin.keep)).unwrap_or_default();
    }

    /// Ends the current pin, whose time is over.
    pub fn unpinned(&mut self) {
        self.pin = std::mem::take(&mut self.later);
    }
}

/// A policy with its state.
#[derive(Debug)]
pub(crate) struct Ranking {
    policy: Eviction,
    /// Uses and releases so far: the clock of [`BlockUsage`].
    tick: u64,
    /// Highest score evicted so far (LFU-DA's cache age).
    age: u64,
}

impl Ranking {
    pub fn new(policy: Eviction) -> Ranking {
        Ranking { policy, tick: 0, age: 0 }
    }

    /// Records a use: a sequence matched or computed the block.
    pub fn used(&mut self, usage: &mut BlockUsage) {
        self.rested(usage);
        usage.uses += 1;
        usage.score = self.age + usage.uses;
    }

    /// Marks the block as most recently used, for example when its last owner releases it.
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
