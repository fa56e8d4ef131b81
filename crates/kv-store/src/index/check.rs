//! Checks that the index agrees with itself (I6).

use std::collections::{BTreeMap, BTreeSet};

use super::{Index, TIERS, tiers};
use crate::StoreError;

impl Index {
    /// Checks everything, in time linear in the blocks.
    pub fn check(&self) -> Result<(), StoreError> {
        let broken = |what: String| Err(StoreError::Broken(what));
        let mut children = BTreeMap::<_, [u32; TIERS]>::new();
        let (mut orders, mut held, mut pinned) = (<[BTreeSet<_>; TIERS]>::default(), [0; TIERS], 0);
        for (name, node) in &self.nodes {
            for (tier, kept) in node.keeps().into_iter().enumerate().filter(|(_, kept)| *kept > 0) {
                children.entry(node.parent).or_default()[tier] += kept;
            }
            for (tier, free) in self.evictable(*name, node).into_iter().enumerate() {
                if free {
                    orders[tier].insert((self.ranking.rank(&node.usage), *name));
                }
                held[tier] += tiers(node)[tier];
            }
            pinned += u32::from(node.pinned);
            if let Some(copy) = node.host.as_ref().filter(|copy| copy.block.key.groups != node.groups) {
                let (held, here) = (node.groups, copy.block.key.groups);
                return broken(format!("{name:?} has groups {here:#b} in host memory, by the index {held:#b}"));
            }
            if tiers(node) == [0; TIERS] {
                return broken(format!("{name:?} is in the index and in no tier"));
            }
        }
        if children != self.children {
            return broken(format!("children counted {:?}, found {children:?}", self.children));
        }
        if orders != self.orders {
            return broken(format!("order of eviction {:?}, found {orders:?}", self.orders));
        }
        if (held, pinned) != (self.held, self.pinned) {
            return broken(format!(
                "{:?} blocks and {} pins counted, {held:?} and {pinned} found",
                self.held, self.pinned
            ));
        }
        Ok(())
    }
}
