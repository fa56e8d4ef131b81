//! What requests asked to keep (`cache_keep_seconds`), prompts with their answers: the store evicts none of it until its time is over.
//!
//! A block keeps all blocks before it, so only the last one is pinned. What is kept is bounded in blocks, each counted once (I5); what a tenant may
//! ask for is the router's to say.

use std::collections::HashMap;

use baton_engine::BlockName;
use baton_kv_store::StoreLimits;
use baton_store::KvStore;
use baton_types::Time;

/// What is kept, and until when.
#[derive(Debug)]
pub(super) struct Pins {
    /// By the name of the last block.
    until: HashMap<BlockName, Time>,
    /// All blocks that are kept, each with the one before it, and how many it is kept for: blocks right after it, and itself as a last one.
    blocks: HashMap<BlockName, (Option<BlockName>, u32)>,
    /// Most blocks.
    most: usize,
}

impl Pins {
    /// None, and at most so many blocks.
    pub fn new(most: usize) -> Pins {
        Pins { until: HashMap::new(), blocks: HashMap::new(), most }
    }

    /// Keeps blocks that the store holds, or keeps them longer; `names`: of all from the first on. What is too much is not kept.
    pub fn keep(&mut self, store: &KvStore, names: &[BlockName], until: Time) {
        let Some(last) = names.last() else { return };
        if let Some(known) = self.until.get_mut(last) {
            *known = until.max(*known);
        } else {
            let new = names.iter().filter(|name| !self.blocks.contains_key(*name)).count();
            if self.until.len() >= StoreLimits::default().pinned as usize || self.blocks.len() + new > self.most {
                return;
            }
            self.until.insert(*last, until);
            self.count(names);
        }
        // A pin ends with its block: one that was lost and has come again has none.
        store.pin(*last, true);
    }

    /// Lets go of what was kept long enough.
    pub fn expire(&mut self, store: &KvStore, now: Time) {
        let over: Vec<BlockName> = self.until.extract_if(|_, until| *until <= now).map(|(last, _)| last).collect();
        for last in over {
            store.pin(last, false);
            self.forget(last);
        }
    }

    fn count(&mut self, names: &[BlockName]) {
        let mut before = None;
        for name in names {
            if !self.blocks.contains_key(name) {
                self.blocks.insert(*name, (before, 0));
                self.add(before);
            }
            before = Some(*name);
        }
        self.add(before);
    }

    fn add(&mut self, name: Option<BlockName>) {
        if let Some((_, count)) = name.and_then(|name| self.blocks.get_mut(&name)) {
            *count += 1;
        }
    }

    /// Takes one away from a block's count, and from that of the one before it if nothing keeps this one any more.
    fn forget(&mut self, last: BlockName) {
        let mut next = Some(last);
        while let Some(name) = next.take()
            && let Some((before, count)) = self.blocks.get_mut(&name)
        {
            *count -= 1;
            if *count == 0 {
                next = *before;
                self.blocks.remove(&name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_store::{Identity, Shape, StoreConfig};

    use super::*;

    /// Prompts that begin alike, answers that differ: each block counts once, and all are let go of.
    #[test]
    fn what_two_have_in_common_counts_once() {
        let shape = Shape::new(&baton_engine::fake::tiny_layout(4)).unwrap();
        let store = KvStore::over(None, None, StoreConfig::new(shape, Identity::default(), 4, None), 0, None).unwrap();
        let names = |last: u32| -> Vec<BlockName> {
            let tokens: Vec<u32> = (0..8).chain(last..last + 4).collect();
            BlockName::root("", 4).chain(&tokens, 4).collect()
        };
        let mut pins = Pins::new(5);
        for (last, until, blocks) in [(10, 50, 3), (20, 60, 4), (10, 40, 4), (30, 70, 5), (40, 80, 5)] {
            pins.keep(&store, &names(last), Time(until));
            assert_eq!(pins.blocks.len(), blocks, "with {last}");
        }
        // A part of what is kept, for longer.
        pins.keep(&store, &names(10)[..2], Time(90));
        for (now, blocks) in [(49, 5), (50, 4), (60, 3), (89, 2), (90, 0)] {
            pins.expire(&store, Time(now));
            assert_eq!(pins.blocks.len(), blocks, "at {now}");
        }
        assert!(pins.until.is_empty());
        let many: Vec<Vec<BlockName>> = (0..2000).map(|at| names(100 + at)[..3].to_vec()).collect();
        let mut pins = Pins::new(usize::MAX);
        many.iter().for_each(|names| pins.keep(&store, names, Time(100)));
        assert_eq!(pins.until.len(), StoreLimits::default().pinned as usize);
    }
}
