//! Which blocks are stored, in which tiers, and which is evicted next.
//!
//! A block is reached only through all blocks before it, so one without its parent is worth nothing. A tier therefore evicts leaves first:
//! blocks that none of its other blocks follows. From a slower tier a block also stays while a
//! block in a faster one follows it.
//! A parent may be missing all the same: it may still be in a pool, or was found damaged.

mod check;
mod rank;

use std::collections::{BTreeMap, BTreeSet};

use baton_kv_cache::BlockName;

pub use rank::Policy;
pub(crate) use rank::{Rank, Ranking, Usage};

use crate::{Block, Buffer, Place};

/// A tier of the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// Host memory.
    Host,
    /// Local disk.
    Disk,
    /// Object store.
    Object,
}

/// Number of tiers.
const TIERS: usize = Tier::ALL.len();

baton_types::words!(Tier { Host = "host", Disk = "disk", Object = "object" });

/// A block's copy in host memory.
#[derive(Clone, Debug)]
pub(crate) struct HostCopy {
    pub buffer: Buffer,
    pub block: Block,
    /// Somebody reads it.
    pub busy: bool,
    /// It is being written to disk. Then it does not keep its parent, which can be written at the same time.
    pub writing: bool,
}

/// A stored block.
#[derive(Debug)]
pub(crate) struct Node {
    pub parent: BlockName,
    /// The layer groups that each of its copies has.
    pub groups: u32,
    pub usage: Usage,
    pub pinned: bool,
    pub host: Option<HostCopy>,
    pub disk: Option<Place>,
    /// Whether it is in the object store.
    pub object: bool,
}

impl Node {
    pub fn new(parent: BlockName, groups: u32, usage: Usage) -> Node {
        Node { parent, groups, usage, pinned: false, host: None, disk: None, object: false }
    }

    /// Whether it keeps its parent, by tier.
    fn keeps(&self) -> [u32; TIERS] {
        let host = self.host.as_ref().is_some_and(|copy| !copy.writing);
        [host, self.disk.is_some(), self.object].map(u32::from)
    }
}

/// All stored blocks. Its size is bounded by the buffers and records of the tiers, and so is what it knows of parents.
#[derive(Debug)]
pub(crate) struct Index {
    nodes: BTreeMap<BlockName, Node>,
    /// For each parent, here or not: how many blocks keep it, by tier.
    children: BTreeMap<BlockName, [u32; TIERS]>,
    /// What may be evicted from each tier, in order.
    orders: [BTreeSet<(Rank, BlockName)>; TIERS],
    held: [u64; TIERS],
    pub pinned: u32,
    pub ranking: Ranking,
}

impl Index {
    pub fn new(policy: Policy) -> Index {
        Index {
            nodes: BTreeMap::new(),
            children: BTreeMap::new(),
            orders: Default::default(),
            held: [0; TIERS],
            pinned: 0,
            ranking: Ranking::new(policy),
        }
    }

    pub fn get(&self, name: BlockName) -> Option<&Node> {
        self.nodes.get(&name)
    }

    /// Blocks in a tier.
    pub fn held(&self, tier: Tier) -> u64 {
        self.held[tier as usize]
    }

    /// All blocks and where they are, by name.
    pub fn all(&self) -> impl Iterator<Item = (BlockName, &Node)> {
        self.nodes.iter().map(|(name, node)| (*name, node))
    }

    /// What a tier may evict, in order.
    pub fn victims(&self, tier: Tier) -> impl Iterator<Item = BlockName> {
        self.orders[tier as usize].iter().map(|(_, name)| *name)
    }

    /// Changes a block; makes it first if it is not there. A block that is in no tier after it is forgotten.
    pub fn change(&mut self, name: BlockName, fresh: impl FnOnce() -> Node, how: impl FnOnce(&mut Node, &mut Ranking)) {
        let mut node = self.nodes.remove(&name).unwrap_or_else(fresh);
        let (rank, before, held, pinned) = (self.ranking.rank(&node.usage), node.keeps(), tiers(&node), node.pinned);
        for order in &mut self.orders {
            order.remove(&(rank, name));
        }
        how(&mut node, &mut self.ranking);
        let gone = tiers(&node) == [0; TIERS];
        node.pinned &= !gone;
        let (parent, after) = (node.parent, node.keeps());
        for (tier, now) in tiers(&node).into_iter().enumerate() {
            self.held[tier] = self.held[tier] + now - held[tier];
        }
        self.pinned = self.pinned + u32::from(node.pinned) - u32::from(pinned);
        if !gone {
            self.nodes.insert(name, node);
            self.list(name);
        }
        if before != after {
            let kept = self.children.entry(parent).or_default();
            *kept = std::array::from_fn(|tier| kept[tier] + after[tier] - before[tier]);
            if *kept == [0; TIERS] {
                self.children.remove(&parent);
            }
            self.list(parent);
        }
    }

    /// [`Index::change`] of a block that is there; nothing if it is not.
    pub fn update(&mut self, name: BlockName, how: impl FnOnce(&mut Node)) {
        if let Some(node) = self.nodes.get(&name) {
            let (parent, groups) = (node.parent, node.groups);
            self.change(name, || Node::new(parent, groups, Usage::default()), |node, _| how(node));
        }
    }

    /// Counts a use.
    pub fn touch(&mut self, name: BlockName) {
        if let Some(node) = self.nodes.get(&name) {
            let (parent, groups) = (node.parent, node.groups);
            self.change(
                name,
                || Node::new(parent, groups, Usage::default()),
                |node, ranking| ranking.used(&mut node.usage),
            );
        }
    }

    /// Puts a block into the orders of the tiers that may evict it, and takes it out of the others.
    fn list(&mut self, name: BlockName) {
        let Some(node) = self.nodes.get(&name) else { return };
        let key = (self.ranking.rank(&node.usage), name);
        for (tier, free) in self.evictable(name, node).into_iter().enumerate() {
            match free {
                true => self.orders[tier].insert(key),
                false => self.orders[tier].remove(&key),
            };
        }
    }

    /// Whether each tier may evict a block: one that no block of this tier or a faster one follows.
    fn evictable(&self, name: BlockName, node: &Node) -> [bool; TIERS] {
        let kept = self.children.get(&name).copied().unwrap_or_default();
        let host = node.host.as_ref().is_some_and(|copy| !copy.busy && !copy.writing);
        let here = [host, node.disk.is_some(), node.object];
        std::array::from_fn(|tier| here[tier] && !node.pinned && kept[..=tier].iter().all(|kept| *kept == 0))
    }
}

/// Copies by tier.
fn tiers(node: &Node) -> [u64; TIERS] {
    [node.host.is_some(), node.disk.is_some(), node.object].map(u64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block, key, shape};

    fn stored(policy: Policy, chain: &[(u32, Option<u32>)]) -> Index {
        let (mut index, shape) = (Index::new(policy), shape());
        for (number, parent) in chain {
            let (key, block) = (key(*number, *parent), block(&shape, *number));
            let copy = HostCopy { buffer: Buffer(*number), block, busy: false, writing: false };
            let fresh = || Node::new(key.parent, key.groups, Usage::default());
            index.change(key.name, fresh, |node, ranking| {
                node.host = Some(copy);
                ranking.used(&mut node.usage);
            });
            index.check().unwrap();
        }
        index
    }

    fn evict(index: &mut Index, tier: Tier) -> Option<BlockName> {
        let name = index.victims(tier).next()?;
        index.change(
            name,
            || unreachable!(),
            |node, ranking| {
                ranking.evicted(&node.usage);
                match tier {
                    Tier::Host => node.host = None,
                    Tier::Disk => node.disk = None,
                    Tier::Object => node.object = false,
                }
            },
        );
        index.check().unwrap();
        Some(name)
    }

    #[test]
    fn leaves_go_before_their_parents() {
        // 1 ── 2 ── 3, and 1 ── 4; 1 is the oldest.
        let mut index = stored(Policy::Lru, &[(1, None), (2, Some(1)), (3, Some(2)), (4, Some(1))]);
        let order: Vec<_> = std::iter::from_fn(|| evict(&mut index, Tier::Host)).collect();
        assert_eq!(order, [3, 2, 4, 1].map(|number| key(number, None).name));
        assert_eq!((index.held(Tier::Host), index.children.len()), (0, 0), "nothing is left behind");
    }

    #[test]
    fn a_child_may_come_before_its_parent() {
        let mut index = stored(Policy::Lru, &[(2, Some(1)), (1, None)]);
        let order: Vec<_> = std::iter::from_fn(|| evict(&mut index, Tier::Host)).collect();
        assert_eq!(order, [2, 1].map(|number| key(number, None).name));
    }

    #[test]
    fn frequency_is_told_from_recency() {
        for (policy, first) in [(Policy::Lru, 1), (Policy::Lfu, 2)] {
            let mut index = stored(policy, &[(1, None)]);
            (0..3).for_each(|_| index.touch(key(1, None).name));
            let more = stored(policy, &[(2, None)]);
            let copy = more.get(key(2, None).name).unwrap().host.clone();
            let fresh = || Node::new(key(2, None).parent, 3, Usage::default());
            index.change(key(2, None).name, fresh, |node, ranking| {
                node.host = copy;
                ranking.used(&mut node.usage);
            });
            assert_eq!(index.victims(Tier::Host).next(), Some(key(first, None).name), "{policy}");
        }
    }

    #[test]
    fn what_is_pinned_or_in_use_stays_and_keeps_what_is_before_it() {
        let mut index = stored(Policy::Lru, &[(1, None), (2, Some(1)), (3, None), (4, None)]);
        index.update(key(2, None).name, |node| node.pinned = true);
        index.update(key(3, None).name, |node| node.host.as_mut().unwrap().busy = true);
        assert_eq!(index.pinned, 1);
        assert_eq!(evict(&mut index, Tier::Host), Some(key(4, None).name));
        assert_eq!(evict(&mut index, Tier::Host), None);
        index.update(key(2, None).name, |node| node.host = None);
        assert_eq!(index.pinned, 0, "a pin ends with its block");
        index.check().unwrap();
    }

    #[test]
    fn the_disk_keeps_what_a_block_in_host_memory_follows() {
        let mut index = stored(Policy::Lru, &[(1, None), (2, Some(1))]);
        let place = Place { segment: 0, index: 0, generation: 1 };
        index.update(key(1, None).name, |node| (node.disk, node.host) = (Some(place), None));
        assert_eq!(evict(&mut index, Tier::Disk), None);
        index.update(key(2, None).name, |node| node.host.as_mut().unwrap().writing = true);
        assert_eq!(index.victims(Tier::Host).next(), None);
        index.update(key(2, None).name, |node| node.host = None);
        assert_eq!(evict(&mut index, Tier::Disk), Some(key(1, None).name));
    }
}
