//! The tree itself: nodes, the owners of their blocks, and the order of eviction.
//!
//! The index knows block ids and how many owners a node's blocks have; [`crate::KvPools`] reports changes of owners. It never
//! touches the pools. It keeps two kinds of eviction order:
//!
//! - All *leaves* without owners.
//! - For each layer group with a window, all blocks without owners. They may be evicted from the middle of a chain, since a
//!   sequence further on does not see them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use baton_types::{BlockId, Time};

use super::eviction::{BlockUsage, EvictionRank, Pin, Ranking};
use super::{BlockName, CacheConfig, Prefix};
use crate::Cached;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct NodeId(pub(super) u32);

/// What precedes a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Parent {
    /// Nothing: the block is the first under this seed.
    Root(u64),
    /// A full block.
    Node(NodeId),
}

/// A block to index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    pub tokens: &'a [u32],
    /// Its name, if it is full.
    pub name: Option<BlockName>,
}

/// Most nodes for each block of the pools (I5). When every group has a window, nodes may be left without a block, so the
/// blocks alone do not bound the nodes.
const NODES_PER_BLOCK: u32 = 4;

type Children = BTreeMap<Arc<[u32]>, NodeId>;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) parent: Parent,
    /// The block's tokens. Only the last block of a sequence may be partly full; it has no children.
    pub(super) tokens: Arc<[u32]>,
    /// Its name, if it is full.
    name: Option<BlockName>,
    /// One per layer group. `None` only in a group with a window: the window has passed the block, or it was evicted.
    pub(super) blocks: Box<[Option<BlockId>]>,
    pub(super) children: Children,
    /// Owners of the node's blocks, summed over all groups.
    pub(super) held: u32,
    pub(super) usage: BlockUsage,
    /// Its KV is not what it was, or follows such KV: nobody may find it.
    spoilt: bool,
}

/// The tree of indexed prefixes.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    /// Most nodes.
    pub(super) limit: u32,
    pub(super) max_kept: u32,
    /// Nodes with a `keep` above 0.
    pub(super) kept: u32,
    pub(super) nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    roots: BTreeMap<u64, Children>,
    /// The node of each block, by group.
    pub(super) by_block: Vec<Vec<Option<NodeId>>>,
    /// Digests of blocks that came in verified, by group.
    digests: BTreeMap<(usize, BlockId), u64>,
    /// Leaves whose blocks have no owner, in the order of eviction.
    pub(super) leaves: BTreeSet<(EvictionRank, NodeId)>,
    /// For each group with a window: nodes whose block of this group has no owner, in the order of eviction.
    pub(super) windowed: Vec<Option<BTreeSet<(EvictionRank, NodeId)>>>,
    /// Nodes kept for a limited time, by the time it ends.
    expiring: BTreeSet<(u64, NodeId)>,
    pub(super) ranking: Ranking,
    now: u64,
    /// Blocks that came and went, if somebody wants to know.
    changes: Option<Vec<Cached>>,
}

impl PrefixIndex {
    /// An empty index. `groups` gives each layer group's number of blocks and whether it has a window.
    pub fn new(config: CacheConfig, groups: impl Iterator<Item = (u32, bool)>) -> PrefixIndex {
        let (blocks, windows): (Vec<u32>, Vec<bool>) = groups.unzip();
        let total = blocks.iter().fold(0u32, |sum, blocks| sum.saturating_add(*blocks));
        PrefixIndex {
            limit: config.max_blocks.min(total.saturating_mul(NODES_PER_BLOCK)),
            max_kept: config.max_kept,
            kept: 0,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: BTreeMap::new(),
            by_block: blocks.iter().map(|total| vec![None; *total as usize]).collect(),
            digests: BTreeMap::new(),
            leaves: BTreeSet::new(),
            windowed: windows.iter().map(|windowed| windowed.then(BTreeSet::new)).collect(),
            expiring: BTreeSet::new(),
            ranking: Ranking::new(config.eviction),
            now: 0,
            changes: None,
        }
    }

    /// Whether anything can be indexed.
    pub fn enabled(&self) -> bool {
        self.limit > 0
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Number of nodes that are kept.
    pub fn kept(&self) -> u32 {
        self.kept
    }

    /// The node of a block.
    pub fn node_of(&self, group: usize, block: BlockId) -> Option<NodeId> {
        *self.by_block.get(group)?.get(block.0 as usize)?
    }

    /// A node's block in a group.
    pub fn block(&self, id: NodeId, group: usize) -> Option<BlockId> {
        self.node(id).and_then(|node| node.blocks[group])
    }

    /// The child with exactly these tokens.
    pub fn child(&self, parent: Parent, tokens: &[u32]) -> Option<NodeId> {
        self.children(parent)?.get(tokens).copied()
    }

    /// The child with the longest common beginning with `tokens`, and the length of that beginning in tokens.
    pub fn nearest(&self, parent: Parent, tokens: &[u32]) -> Option<(NodeId, u32)> {
        let children = self.children(parent)?;
        // In lexicographic order, the child with the longest common beginning is next to where `tokens` would be.
        let before = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(tokens))).next_back();
        let after = children.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded)).next();
        let common = |(found, id): (&Arc<[u32]>, &NodeId)| {
            (*id, found.iter().zip(tokens).take_while(|(ours, theirs)| ours == theirs).count() as u32)
        };
        before.into_iter().chain(after).map(common).max_by_key(|(id, common)| (*common, std::cmp::Reverse(*id)))
    }

    /// Adds a node that is not indexed yet. Its `blocks` have `held` owners in all. `None`: the index is full; evict, then
    /// try again.
    pub fn insert(
        &mut self,
        parent: Parent,
        Block { tokens, name }: Block<'_>,
        blocks: Box<[Option<BlockId>]>,
        held: u32,
    ) -> Option<NodeId> {
        debug_assert!(self.child(parent, tokens).is_none(), "indexed twice");
        if self.len() as u64 >= u64::from(self.limit) {
            return None;
        }
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            NodeId(self.nodes.len() as u32 - 1)
        });
        let tokens: Arc<[u32]> = tokens.into();
        match parent {
            Parent::Root(seed) => drop(self.roots.entry(seed).or_default().insert(tokens.clone(), id)),
            Parent::Node(parent) => {
                self.unlist(parent);
                if let Some(node) = self.node_mut(parent) {
                    node.children.insert(tokens.clone(), id);
                }
            }
        }
        for (group, block) in blocks.iter().enumerate() {
            self.map(group, *block, Some(id));
        }
        self.note(name.map(Cached::Stored));
        let (children, usage) = (Children::new(), BlockUsage::default());
        let node = Node { parent, tokens, name, blocks, children, held, usage, spoilt: false };
        self.nodes[id.0 as usize] = Some(node);
        Some(id)
    }

    /// Gives a node a block, with `held` owners, in a group where it has none.
    pub fn donate(&mut self, id: NodeId, group: usize, block: BlockId, held: u32) {
        self.unlist(id);
        self.map(group, Some(block), Some(id));
        if let Some(node) = self.node_mut(id) {
            node.blocks[group] = Some(block);
            node.held += held;
        }
    }

    /// Removes a node without children and returns its blocks, which the caller must dispose of. The parent may become a leaf.
    pub fn remove(&mut self, id: NodeId) -> Box<[Option<BlockId>]> {
        self.unlist(id);
        for group in 0..self.windowed.len() {
            self.unlist_block(group, id);
        }
        let Some(node) = self.nodes.get_mut(id.0 as usize).and_then(Option::take) else { return Box::default() };
        debug_assert!(node.children.is_empty(), "leaves before their parents");
        self.note(node.name.map(Cached::Removed));
        self.vacant.push(id);
        self.kept -= u32::from(node.usage.pin.keep > 0);
        self.expiring.remove(&(node.usage.pin.until, id));
        for (group, block) in node.blocks.iter().enumerate() {
            self.map(group, *block, None);
        }
        match node.parent {
            Parent::Root(seed) => {
                if let Some(children) = self.roots.get_mut(&seed) {
                    children.remove(&node.tokens);
                    if children.is_empty() {
                        self.roots.remove(&seed);
                    }
                }
            }
            Parent::Node(parent) => {
                if let Some(above) = self.node_mut(parent) {
                    above.children.remove(&node.tokens);
                }
                self.list(parent);
            }
        }
        node.blocks
    }

    /// A block gained an owner. `first`: it had none before.
    pub fn held(&mut self, group: usize, block: BlockId, first: bool) {
        let Some(id) = self.node_of(group, block) else { return };
        self.unlist(id);
        if first {
            self.unlist_block(group, id);
        }
        if let Some(node) = self.node_mut(id) {
            node.held += 1;
        }
    }

    /// A block lost an owner. `last`: it has none left.
    pub fn released(&mut self, group: usize, block: BlockId, last: bool) {
        let Some(id) = self.node_of(group, block) else { return };
        let Some(node) = self.node_mut(id) else { return };
        node.held -= 1;
        if node.held == 0 {
            // The node's blocks of other groups may already be in eviction orders; `change` moves them there.
            self.change(id, Ranking::rested);
            self.list(id);
        }
        if last {
            self.list_block(group, id);
        }
    }

    /// Records that a sequence uses the node. The node is kept as the sequence asks, unless it would exceed `max_kept`.
    pub fn touch(&mut self, id: NodeId, prefix: &Prefix) {
        let (now, room) = (self.now, self.kept < self.max_kept);
        self.change(id, |ranking, usage| {
            ranking.used(usage);
            let asked = Pin { keep: prefix.keep, until: prefix.keep_until.map_or(u64::MAX, |time| time.0) };
            if asked.keep > 0 && asked.until > now && (room || usage.pin.keep > 0) {
                usage.pinned(asked); // I5
            }
        });
    }

    /// Sets the current time and ends the pins that expire by then.
    pub fn advance(&mut self, Time(now): Time) {
        self.now = self.now.max(now);
        while let Some(&(until, id)) = self.expiring.first()
            && until <= now
        {
            self.change(id, |_, usage| usage.unpinned());
        }
    }

    /// The leaf to evict next.
    pub fn next_leaf(&self) -> Option<NodeId> {
        self.leaves.first().map(|(_, id)| *id)
    }

    /// Tells the policy that a leaf is evicted.
    pub fn evicted(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get(id.0 as usize).and_then(Option::as_ref) {
            self.ranking.evicted(&node.usage);
        }
    }

    /// Takes the next block to evict, of a group with a window, out of its node. `None`: the group has no window, or no block
    /// without owners. The second value is the node, if it is now a leaf without any block.
    pub fn evict_block(&mut self, group: usize) -> Option<(BlockId, Option<NodeId>)> {
        let (_, id) = self.windowed.get_mut(group)?.as_mut()?.pop_first()?;
        let node = self.nodes[id.0 as usize].as_mut()?;
        let block = node.blocks[group].take()?;
        let empty = node.blocks.iter().all(Option::is_none) && node.children.is_empty();
        self.map(group, Some(block), None);
        Some((block, empty.then_some(id)))
    }

    /// The parent of a removed node, if it is now a leaf that is of no use.
    pub fn useless_parent(&self, parent: Parent) -> Option<NodeId> {
        let Parent::Node(id) = parent else { return None };
        self.is_useless(id).then_some(id)
    }

    /// Whether a node is a leaf without any block, or one that is spoilt and that nobody holds.
    pub fn is_useless(&self, id: NodeId) -> bool {
        let useless = |node: &Node| (node.spoilt && node.held == 0) || node.blocks.iter().all(Option::is_none);
        self.node(id).is_some_and(|node| node.children.is_empty() && useless(node))
    }

    /// Whether nobody may find a node.
    pub fn is_spoilt(&self, id: NodeId) -> bool {
        self.node(id).is_some_and(|node| node.spoilt)
    }

    /// From now on nobody may find a node, nor what continues it. Returns those of them that are useless now.
    pub fn spoil(&mut self, id: NodeId) -> Vec<NodeId> {
        let (mut next, mut useless) = (vec![id], Vec::new());
        while let Some(id) = next.pop() {
            let Some(node) = self.node_mut(id) else { continue };
            node.spoilt = true;
            next.extend(node.children.values());
            useless.extend(self.is_useless(id).then_some(id));
        }
        useless
    }

    /// Notes the digest of an indexed block. It is forgotten when the block leaves the index.
    pub fn vouch(&mut self, group: usize, block: BlockId, digest: u64) {
        if self.node_of(group, block).is_some() {
            self.digests.insert((group, block), digest);
        }
    }

    /// The digest that was noted of a block.
    pub fn digest(&self, group: usize, block: BlockId) -> Option<u64> {
        self.digests.get(&(group, block)).copied()
    }

    /// What precedes a node.
    pub fn parent(&self, id: NodeId) -> Option<Parent> {
        self.node(id).map(|node| node.parent)
    }

    /// A full block's name.
    pub fn name(&self, id: NodeId) -> Option<BlockName> {
        self.node(id)?.name
    }

    /// Names of all full blocks.
    pub fn names(&self) -> impl Iterator<Item = BlockName> {
        self.nodes.iter().flatten().filter_map(|node| node.name)
    }

    /// From now on notes which full blocks come and go.
    pub fn note_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Takes what was noted, in order.
    pub fn take_changes(&mut self) -> impl Iterator<Item = Cached> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default().into_iter()
    }

    fn note(&mut self, change: Option<Cached>) {
        if let (Some(changes), Some(change)) = (&mut self.changes, change) {
            changes.push(change);
        }
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0 as usize)?.as_ref()
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id.0 as usize)?.as_mut()
    }

    fn children(&self, parent: Parent) -> Option<&Children> {
        match parent {
            Parent::Root(seed) => self.roots.get(&seed),
            Parent::Node(id) => self.node(id).map(|node| &node.children),
        }
    }

    fn map(&mut self, group: usize, block: Option<BlockId>, to: Option<NodeId>) {
        if let Some(place) = block.and_then(|b| self.by_block.get_mut(group)?.get_mut(b.0 as usize)) {
            *place = to;
        }
        if let (Some(block), None) = (block, to) {
            self.digests.remove(&(group, block));
        }
    }

    /// Changes a node's usage, and moves the node to its new place in every order it is in.
    fn change(&mut self, id: NodeId, how: impl FnOnce(&mut Ranking, &mut BlockUsage)) {
        let Some(node) = self.nodes.get_mut(id.0 as usize).and_then(Option::as_mut) else { return };
        let (old, before) = (self.ranking.rank(&node.usage), node.usage);
        how(&mut self.ranking, &mut node.usage);
        let (new, after) = (self.ranking.rank(&node.usage), node.usage);
        self.kept = self.kept + u32::from(after.pin.keep > 0) - u32::from(before.pin.keep > 0);
        for order in self.windowed.iter_mut().flatten().chain([&mut self.leaves]) {
            if order.remove(&(old, id)) {
                order.insert((new, id));
            }
        }
        self.expiring.remove(&(before.pin.until, id));
        if after.pin.keep > 0 && after.pin.until != u64::MAX {
            self.expiring.insert((after.pin.until, id));
        }
    }

    fn key(&self, id: NodeId) -> Option<(EvictionRank, NodeId)> {
        self.node(id).map(|node| (self.ranking.rank(&node.usage), id))
    }

    /// Puts a node into the order of eviction, if it is a leaf without owners.
    fn list(&mut self, id: NodeId) {
        let free = self.node(id).is_some_and(|node| node.held == 0 && node.children.is_empty());
        if let Some(key) = self.key(id).filter(|_| free) {
            self.leaves.insert(key);
        }
    }

    fn unlist(&mut self, id: NodeId) {
        if let Some(key) = self.key(id) {
            self.leaves.remove(&key);
        }
    }

    fn list_block(&mut self, group: usize, id: NodeId) {
        if let (Some(key), Some(Some(order))) = (self.key(id), self.windowed.get_mut(group)) {
            order.insert(key);
        }
    }

    fn unlist_block(&mut self, group: usize, id: NodeId) {
        if let (Some(key), Some(Some(order))) = (self.key(id), self.windowed.get_mut(group)) {
            order.remove(&key);
        }
    }
}
