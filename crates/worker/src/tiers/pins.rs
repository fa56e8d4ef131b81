//! Prompts whose KV was asked to be kept (`cache_keep_seconds`): the store evicts none of it until their time is over.
//!
//! A block keeps all blocks before it, so only a prompt's last one is pinned. What is pinned is bounded in blocks (I5); what a tenant may ask for is
//! the router's to say.

use std::collections::HashMap;

use baton_engine::{BlockName, Exchange as Prefix};
use baton_store::KvStore;
use baton_types::Time;

/// Most prompts whose KV is pinned.
const MOST: usize = 1024;

/// A prompt's KV that is to be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kept {
    last: BlockName,
    blocks: u32,
    until: Time,
}

impl Kept {
    /// What is to be kept of a prefix, if anything. `names`: of its blocks.
    pub fn of(prefix: &Prefix, names: impl FnOnce() -> Vec<BlockName>, now: Time) -> Option<Kept> {
        let until = prefix.prefix.keep_until.filter(|until| prefix.prefix.keep > 0 && *until > now)?;
        let names = names();
        Some(Kept { last: *names.last()?, blocks: names.len() as u32, until })
    }
}

/// The last blocks of prompts that are kept, and until when.
#[derive(Debug)]
pub(super) struct Pins {
    kept: HashMap<BlockName, (u32, Time)>,
    /// Blocks of all of them; what two prompts share counts twice.
    blocks: u64,
    most: u64,
}

impl Pins {
    /// None, and at most so many blocks.
    pub fn new(most: u64) -> Pins {
        Pins { kept: HashMap::new(), blocks: 0, most }
    }

    /// Keeps a prompt's KV that is in the store, or keeps it longer. What is too much is not kept.
    pub fn keep(&mut self, store: &KvStore, new: Kept) {
        if let Some((_, until)) = self.kept.get_mut(&new.last) {
            *until = new.until.max(*until);
        } else if self.kept.len() < MOST && self.blocks + u64::from(new.blocks) <= self.most {
            self.kept.insert(new.last, (new.blocks, new.until));
            self.blocks += u64::from(new.blocks);
        } else {
            return;
        }
        // A pin ends with its block: one that was lost and has come again has none.
        store.pin(new.last, true);
    }

    /// Lets go of those whose time is over.
    pub fn expire(&mut self, store: &KvStore, now: Time) {
        for (name, (blocks, _)) in self.kept.extract_if(|_, (_, until)| *until <= now) {
            self.blocks -= u64::from(blocks);
            store.pin(name, false);
        }
    }
}
