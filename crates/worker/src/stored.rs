//! Notes which blocks a worker's own store holds, for those who follow the worker.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_engine::{BlockName, Cached};
use baton_kv_store::Tier;
use baton_store::{Event, KvStore};

use crate::news::WorkerNews;

/// How often the store is asked what changed.
const EVERY: Duration = Duration::from_millis(100);

/// Starts a thread that notes what comes to the store and leaves it, until the store or who is told is gone.
pub(crate) fn follow(store: &Arc<KvStore>, news: &Arc<WorkerNews>) -> std::io::Result<()> {
    news.has_store();
    let (store, news) = (Arc::downgrade(store), Arc::downgrade(news));
    let run = move || {
        let mut stored = Stored::default();
        while note(&store, &news, &mut stored).is_some() {
            std::thread::sleep(EVERY);
        }
    };
    std::thread::Builder::new().name("kv-news".to_owned()).spawn(run).map(drop)
}

fn note(store: &Weak<KvStore>, news: &Weak<WorkerNews>, stored: &mut Stored) -> Option<()> {
    let (store, news) = (store.upgrade()?, news.upgrade()?);
    let changes: Vec<Cached> = match store.events() {
        // Some were lost. They are not waited for: the store has all at once.
        events if events.contains(&Event::Gap) => stored.afresh(&store.snapshot()),
        events => events.into_iter().filter_map(|event| stored.change(event)).collect(),
    };
    news.note_stored(changes.into_iter());
    Some(())
}

/// The blocks of a store, each with the tiers that it is in, one bit each.
#[derive(Debug, Default)]
struct Stored(HashMap<BlockName, u8>);

impl Stored {
    /// What a change of one tier means for the store as a whole.
    fn change(&mut self, event: Event) -> Option<Cached> {
        match event {
            Event::Stored(name, tier) => {
                let tiers = self.0.entry(name).or_default();
                let new = *tiers == 0;
                *tiers |= bit(tier);
                new.then_some(Cached::Stored(name))
            }
            Event::Removed(name, tier) => {
                let tiers = self.0.get_mut(&name)?;
                *tiers &= !bit(tier);
                let gone = *tiers == 0;
                if gone {
                    self.0.remove(&name);
                }
                gone.then_some(Cached::Removed(name))
            }
            Event::Gap => None,
        }
    }

    /// What changed, where these blocks are all that the store holds.
    fn afresh(&mut self, all: &[(BlockName, Tier)]) -> Vec<Cached> {
        let before = std::mem::take(&mut self.0);
        let mut changes = Vec::new();
        for (name, tier) in all {
            if self.change(Event::Stored(*name, *tier)).is_some() && !before.contains_key(name) {
                changes.push(Cached::Stored(*name));
            }
        }
        changes.extend(before.into_keys().filter(|name| !self.0.contains_key(name)).map(Cached::Removed));
        changes
    }
}

fn bit(tier: Tier) -> u8 {
    match tier {
        Tier::Host => 1,
        Tier::Disk => 2,
        Tier::Object => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BlockName = BlockName(1);
    const B: BlockName = BlockName(2);

    #[test]
    fn a_block_is_in_the_store_while_it_is_in_any_tier() {
        let mut stored = Stored::default();
        let mut told = |event| stored.change(event);
        assert_eq!(told(Event::Stored(A, Tier::Host)), Some(Cached::Stored(A)));
        assert_eq!(told(Event::Stored(A, Tier::Disk)), None);
        assert_eq!(told(Event::Stored(A, Tier::Object)), None);
        assert_eq!(told(Event::Removed(A, Tier::Host)), None, "it is still on disk");
        assert_eq!(told(Event::Removed(A, Tier::Disk)), None, "it is still in the object store");
        assert_eq!(told(Event::Removed(A, Tier::Object)), Some(Cached::Removed(A)));
        assert_eq!(told(Event::Removed(B, Tier::Disk)), None, "nobody was told of it");
        assert!(stored.0.is_empty(), "what is gone takes no memory");
    }

    #[test]
    fn after_a_gap_only_what_differs_is_told() {
        let mut stored = Stored::default();
        stored.change(Event::Stored(A, Tier::Host));
        let now = [(B, Tier::Host), (B, Tier::Disk)];
        assert_eq!(stored.afresh(&now), [Cached::Stored(B), Cached::Removed(A)]);
        assert_eq!(stored.afresh(&now), []);
        assert_eq!(stored.change(Event::Removed(B, Tier::Host)), None, "it is still on disk");
    }
}
