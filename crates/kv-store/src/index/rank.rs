//! The order of eviction.

/// Which block of a tier is evicted first, among those that no other block of the tier follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// Least recently used.
    Lru,
    /// Least frequently used, with dynamic aging (LFU-DA: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000).
    Lfu,
    /// Least recently used; but a block replaces another one on disk only if it was asked for more often, by the [`crate::Sketch`] (Einziger,
    /// Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017).
    TinyLfu,
    /// Of a few least recently used, the one that was asked for least often, by the [`crate::Sketch`].
    #[default]
    Sketch,
}

baton_types::words!(Policy { Lru = "lru", Lfu = "lfu", TinyLfu = "tinylfu", Sketch = "sketch" });

/// A block's place in the order: lowest first.
pub(crate) type Rank = (u64, u64);

/// How a block was used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// When it was used last, in ticks of the index.
    pub last: u64,
    uses: u64,
    /// LFU-DA: `uses` plus the age of the cache at the last use.
    score: u64,
}

/// A policy with its state.
#[derive(Debug)]
pub(crate) struct Ranking {
    policy: Policy,
    tick: u64,
    /// Highest score evicted so far (LFU-DA's cache age).
    age: u64,
}

impl Ranking {
    pub fn new(policy: Policy) -> Ranking {
        Ranking { policy, tick: 0, age: 0 }
    }

    pub fn used(&mut self, usage: &mut Usage) {
        self.tick += 1;
        usage.last = self.tick;
        usage.uses += 1;
        usage.score = self.age + usage.uses;
    }

    /// Usage of a block that was last used at `tick`, in the life of a process before this one.
    pub fn before(&mut self, tick: u64) -> Usage {
        self.tick = self.tick.max(tick);
        Usage { last: tick, ..Usage::default() }
    }

    pub fn rank(&self, usage: &Usage) -> Rank {
        match self.policy {
            Policy::Lru | Policy::TinyLfu | Policy::Sketch => (usage.last, 0),
            Policy::Lfu => (usage.score, usage.last),
        }
    }

    pub fn evicted(&mut self, usage: &Usage) {
        self.age = self.age.max(usage.score);
    }
}
