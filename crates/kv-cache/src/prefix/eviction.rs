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

/// The order of eviction: lowest first.
pub(crate) type Rank = (u64, u64);

/// What is known of a block's use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// When it was last used, in uses of the whole index.
    last: u64,
    /// Uses, and the age of the cache at the last of them.
    uses: u64,
    score: u64,
    pub keep: u8,
    /// 0: for ever.
    pub keep_until: u64,
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
    pub fn used(&mut self, usage: &mut Usage) {
        self.rested(usage);
        usage.uses += 1;
        usage.score = self.age + usage.uses;
    }

    /// Nobody uses it any more from now on.
    pub fn rested(&mut self, usage: &mut Usage) {
        self.tick += 1;
        usage.last = self.tick;
    }

    pub fn rank(&self, usage: &Usage) -> Rank {
        match self.policy {
            Eviction::Lru => (usage.last, 0),
            Eviction::Lfu => (usage.score, usage.last),
            Eviction::Priority => (u64::from(usage.keep), usage.last),
        }
    }

    pub fn evicted(&mut self, usage: &Usage) {
        self.age = self.age.max(usage.score);
    }
}
