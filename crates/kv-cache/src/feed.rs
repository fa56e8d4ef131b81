//! What a worker tells others of its prefix cache: the names of blocks that entered and left it.
//!
//! [`crate::KvPools`] notes each block that enters or leaves. A [`CacheFeed`] turns these into [`CacheChange`]s, each with the net effect since the
//! one before. It knows what it has told, so that whoever comes later, or has missed something, can be told everything.

use std::collections::BTreeMap;

use crate::BlockName;

/// How many blocks somebody holds, and the wrapping sum of their short names. Two sides that agree on it hold the same, but for a chance of
/// 2⁻⁶⁴.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Number of blocks.
    pub blocks: u64,
    /// Wrapping sum of their names ([`BlockName::short`]).
    pub sum: u64,
}

impl Tally {
    /// Adds a block.
    pub fn add(&mut self, name: u64) {
        self.blocks += 1;
        self.sum = self.sum.wrapping_add(name);
    }

    /// Takes a block away.
    pub fn remove(&mut self, name: u64) {
        self.blocks = self.blocks.saturating_sub(1);
        self.sum = self.sum.wrapping_sub(name);
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Tally) -> Tally {
        Tally { blocks: self.blocks + other.blocks, sum: self.sum.wrapping_add(other.sum) }
    }
}

/// A block entered or left the prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cached {
    /// It entered.
    Stored(BlockName),
    /// It left.
    Removed(BlockName),
}

/// What changed in a prefix cache since the change before.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheChange {
    /// Blocks that entered it.
    pub stored: Vec<BlockName>,
    /// Blocks that left it.
    pub removed: Vec<BlockName>,
    /// What it holds after this.
    pub tally: Tally,
}

impl CacheChange {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.stored.is_empty() && self.removed.is_empty()
    }
}

/// What was told of a prefix cache, and what is still to be told. It has an entry for each block that was told, and for each change since
/// [`CacheFeed::take`] was called (I5). Blocks are told in the order in which they came, each after the one before it in its prompt.
#[derive(Clone, Debug, Default)]
pub struct CacheFeed {
    /// With the number of each, in the order of coming.
    told: BTreeMap<BlockName, u64>,
    next: u64,
    tally: Tally,
    /// Blocks that changed since, and whether they are in the cache now.
    changed: BTreeMap<BlockName, bool>,
    /// The same in the order of their changes. A block may be in it several times.
    order: Vec<BlockName>,
}

impl CacheFeed {
    /// Takes in a change.
    pub fn note(&mut self, change: Cached) {
        let (name, there) = match change {
            Cached::Stored(name) => (name, true),
            Cached::Removed(name) => (name, false),
        };
        self.changed.insert(name, there);
        self.order.push(name);
    }

    /// What changed since the last call.
    pub fn take(&mut self) -> CacheChange {
        let mut change = CacheChange::default();
        for name in std::mem::take(&mut self.order) {
            match (self.changed.remove(&name), self.told.contains_key(&name)) {
                (Some(true), false) => {
                    self.told.insert(name, self.next);
                    self.next += 1;
                    self.tally.add(name.short());
                    change.stored.push(name);
                }
                (Some(false), true) => {
                    self.told.remove(&name);
                    self.tally.remove(name.short());
                    change.removed.push(name);
                }
                _ => {}
            }
        }
        CacheChange { tally: self.tally, ..change }
    }

    /// All blocks that were told and not taken back, in the order of coming.
    pub fn told(&self) -> Vec<BlockName> {
        let mut told: Vec<(u64, BlockName)> = self.told.iter().map(|(name, number)| (*number, *name)).collect();
        told.sort_unstable();
        told.into_iter().map(|(_, name)| name).collect()
    }

    /// The tally of what was told.
    pub fn tally(&self) -> Tally {
        self.tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_from_what_was_told_is_told() {
        let (a, b, c) = (BlockName(3), BlockName(2), BlockName(1));
        let mut feed = CacheFeed::default();
        for change in [Cached::Stored(a), Cached::Stored(b), Cached::Removed(b), Cached::Stored(c)] {
            feed.note(change);
        }
        let change = feed.take();
        assert_eq!((&change.stored[..], change.removed.len()), (&[a, c][..], 0), "b came and went");
        for change in [Cached::Removed(a), Cached::Stored(a), Cached::Removed(c)] {
            feed.note(change);
        }
        let change = feed.take();
        assert_eq!((change.stored.len(), &change.removed[..]), (0, &[c][..]), "a left and came back");
        assert_eq!(change.tally, Tally { blocks: 1, sum: 3 });
        assert!(feed.take().is_empty());
        assert_eq!((feed.told(), feed.tally()), (vec![a], change.tally));
    }
}
