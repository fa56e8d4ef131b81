//! Checks that the index and the pools agree (I6).

use std::collections::BTreeSet;

use super::Parent;
use super::index::{Node, NodeId, PrefixIndex};
use crate::{BlockPool, BlockState, KvError};

impl PrefixIndex {
    /// Checks the whole index against the pools. Takes time linear in nodes and blocks.
    pub fn check(&self, pools: &[BlockPool]) -> Result<(), KvError> {
        let broken = |what: String| Err(KvError::Index(what));
        let (mut leaves, mut windowed) = (BTreeSet::new(), vec![BTreeSet::new(); pools.len()]);
        let (mut indexed, mut kept) = (vec![0; pools.len()], 0);
        for (at, node) in self.nodes.iter().enumerate().filter_map(|(at, node)| Some((at, node.as_ref()?))) {
            let id = NodeId(at as u32);
            self.check_links(id, node)?;
            kept += u32::from(node.usage.pin.keep > 0);
            let rank = self.ranking.rank(&node.usage);
            let mut held = 0;
            for (group, pool) in pools.iter().enumerate() {
                let Some(block) = node.blocks[group] else {
                    if self.windowed[group].is_none() {
                        return broken(format!("{id:?} has no block in group {group}, which has no window"));
                    }
                    continue;
                };
                let (state, refs) = pool.state(block)?;
                indexed[group] += 1;
                held += refs;
                if self.node_of(group, block) != Some(id) || !matches!(state, BlockState::Used | BlockState::Cached) {
                    return broken(format!("block {block} of group {group} of {id:?} is {state:?} or another's"));
                }
                if state == BlockState::Cached && self.windowed[group].is_some() {
                    windowed[group].insert((rank, id));
                }
            }
            if held != node.held {
                return broken(format!("{id:?} counts {} owners, has {held}", node.held));
            }
            if held == 0 && node.children.is_empty() {
                leaves.insert((rank, id));
            }
        }
        if kept != self.kept || kept > self.max_kept {
            return broken(format!("{} blocks counted as kept, {kept} found, {} allowed", self.kept, self.max_kept));
        }
        if leaves != self.leaves {
            return broken(format!("leaves in order {:?}, found {leaves:?}", self.leaves));
        }
        for (group, pool) in pools.iter().enumerate() {
            if self.windowed[group].as_ref().is_some_and(|order| *order != windowed[group]) {
                return broken(format!("blocks of group {group} in order are not those nobody holds"));
            }
            let mapped = self.by_block[group].iter().enumerate().filter(|(_, node)| node.is_some());
            if mapped.count() != indexed[group] || (pool.counts().cached as usize) > indexed[group] {
                return broken(format!("group {group}: blocks are mapped to nodes that do not have them"));
            }
        }
        if self.len() as u64 > u64::from(self.limit) {
            return broken(format!("{} blocks indexed, {} allowed", self.len(), self.limit));
        }
        Ok(())
    }

    fn check_links(&self, id: NodeId, node: &Node) -> Result<(), KvError> {
        if self.child(node.parent, &node.tokens) != Some(id) {
            return Err(KvError::Index(format!("{id:?} is not its parent's child")));
        }
        if node.blocks.iter().all(Option::is_none) && node.children.is_empty() {
            return Err(KvError::Index(format!("{id:?} holds nothing")));
        }
        if node.children.values().any(|child| self.parent(*child) != Some(Parent::Node(id))) {
            return Err(KvError::Index(format!("a child of {id:?} has another parent")));
        }
        Ok(())
    }
}
