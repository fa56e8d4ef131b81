use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use baton_types::hash_bytes;
use proptest::prelude::*;

use super::*;

/// Name of a block of a chain.
fn name(chain: u64, at: u64) -> u64 {
    hash_bytes(chain, &at.to_le_bytes())
}

fn names(chain: u64, blocks: u64) -> Vec<BlockName> {
    (0..blocks).map(|at| BlockName(name(chain, at).into())).collect()
}

/// A worker's cache: blocks of each chain.
#[derive(Clone, Debug, Default)]
struct Cache {
    chains: BTreeMap<u64, u64>,
    number: u64,
}

impl Cache {
    fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        self.all().into_iter().for_each(|name| tally.add(name));
        tally
    }

    fn all(&self) -> Vec<u64> {
        self.chains.iter().flat_map(|(chain, blocks)| (0..*blocks).map(|at| name(*chain, at))).collect()
    }

    fn change(&mut self, stored: Vec<u64>, removed: Vec<u64>) -> KvChange {
        self.number += 1;
        KvChange { number: self.number, afresh: false, stored, removed, tally: Some(self.tally()) }
    }

    /// Caches more of a chain, or evicts its end.
    fn now_holds(&mut self, chain: u64, blocks: u64) -> KvChange {
        let before = self.chains.insert(chain, blocks).unwrap_or(0);
        let stored = (before..blocks).map(|at| name(chain, at)).collect();
        let removed = (blocks..before).rev().map(|at| name(chain, at)).collect();
        self.change(stored, removed)
    }

    fn afresh(&mut self) -> KvChange {
        KvChange { afresh: true, ..self.change(self.all(), Vec::new()) }
    }
}

/// An index and the workers it follows, over a network that loses changes.
#[derive(Debug)]
struct Rig {
    index: KvIndex,
    caches: Vec<Cache>,
    /// Workers that have to tell everything.
    asked: BTreeSet<usize>,
}

impl Rig {
    fn new(most: usize, workers: usize) -> Rig {
        Rig { index: KvIndex::new(most), caches: vec![Cache::default(); workers], asked: (0..workers).collect() }
    }

    fn says(&mut self, worker: usize, change: &KvChange) {
        match self.index.follow(WorkerId(worker as u64 + 1), change) {
            Followed::Yes => {}
            Followed::Gap | Followed::Differs => drop(self.asked.insert(worker)),
        }
    }

    fn tell_what_is_asked(&mut self) {
        for worker in std::mem::take(&mut self.asked) {
            let afresh = self.caches[worker].afresh();
            self.says(worker, &afresh);
        }
        assert!(self.asked.is_empty(), "what begins afresh is never a gap, and never wrong");
    }

    fn holders(&self, chain: u64) -> BTreeMap<u64, u32> {
        let found = self.index.find(&names(chain, 12), 100, 0);
        assert!(found.is_sorted_by_key(|holder| std::cmp::Reverse(holder.blocks)), "{found:?}");
        found.into_iter().map(|holder| (holder.worker.0, holder.blocks)).collect()
    }
}

proptest! {
    /// After any schedule of changes, lost changes, restarts and departures the index is what the workers hold.
    #[test]
    fn the_index_is_the_truth_after_any_schedule(
        schedule in prop::collection::vec((0usize..4, 0u64..3, 0u64..12, 0u8..10), 1..150),
    ) {
        let mut rig = Rig::new(1000, 4);
        for (worker, chain, blocks, what) in schedule {
            rig.tell_what_is_asked();
            match what {
                // The change is lost.
                0 => drop(rig.caches[worker].now_holds(chain, blocks)),
                // The worker restarts with an empty cache, and is another one.
                1 => {
                    rig.index.leave(WorkerId(worker as u64 + 1));
                    rig.caches[worker] = Cache::default();
                    rig.asked.insert(worker);
                }
                // A name is wrong on the way.
                2 => {
                    let mut change = rig.caches[worker].now_holds(chain, blocks);
                    change.stored.iter_mut().take(1).for_each(|name| *name ^= 1);
                    rig.says(worker, &change);
                }
                _ => {
                    let change = rig.caches[worker].now_holds(chain, blocks);
                    rig.says(worker, &change);
                }
            }
        }
        // A change that was lost shows when the next one comes.
        for worker in 0..4 {
            let change = rig.caches[worker].change(Vec::new(), Vec::new());
            rig.says(worker, &change);
        }
        rig.tell_what_is_asked();
        for chain in 0..3 {
            let truth = (1u64..).zip(&rig.caches).filter_map(|(worker, cache)| {
                let blocks = *cache.chains.get(&chain)? as u32;
                (blocks > 0).then_some((worker, blocks))
            });
            prop_assert_eq!(rig.holders(chain), truth.collect::<BTreeMap<u64, u32>>());
        }
        let all: BTreeSet<u64> = rig.caches.iter().flat_map(Cache::all).collect();
        prop_assert_eq!(rig.index.blocks(), all.len());
        for (worker, cache) in (1..).zip(&rig.caches) {
            prop_assert_eq!(rig.index.tally(WorkerId(worker)), Some(cache.tally()));
            rig.index.leave(WorkerId(worker));
        }
        prop_assert_eq!((rig.index.blocks(), rig.index.holders.stored()), (0, 0));
    }

    /// I5: with room for few blocks it forgets, and still knows how much each worker holds.
    #[test]
    fn it_never_has_more_blocks_than_it_may(
        schedule in prop::collection::vec((0usize..5, prop_oneof![0u64..2, 0u64..20], 0u64..12), 1..150),
    ) {
        let mut rig = Rig::new(16, 5);
        rig.tell_what_is_asked();
        for (worker, chain, blocks) in schedule {
            let change = rig.caches[worker].now_holds(chain, blocks);
            rig.says(worker, &change);
            prop_assert!(rig.asked.is_empty());
            prop_assert!(rig.index.blocks() <= 16 && rig.index.holders.stored() <= 16);
        }
    }
}

#[test]
fn what_is_mentioned_stays_and_what_is_not_goes_first() {
    let mut rig = Rig::new(100, 1);
    rig.tell_what_is_asked();
    let change = rig.caches[0].now_holds(7, 10);
    rig.says(0, &change);
    for chain in 100..200 {
        rig.index.mention(&names(7, 10));
        let change = rig.caches[0].now_holds(chain, 5);
        rig.says(0, &change);
    }
    assert_eq!(rig.holders(7), BTreeMap::from([(1, 10)]));
    assert_eq!(rig.holders(100), BTreeMap::new());
    assert_eq!(rig.index.blocks(), 100);
}

#[test]
fn of_many_holders_each_prompt_sees_others() {
    let mut rig = Rig::new(1_000_000, 500);
    rig.tell_what_is_asked();
    for worker in 0..500 {
        let change = rig.caches[worker].now_holds(1, 10);
        rig.says(worker, &change);
    }
    let change = rig.caches[123].now_holds(1, 12);
    rig.says(123, &change);
    let mut seen = BTreeSet::new();
    for turn in 0..500 {
        let found = rig.index.find(&names(1, 12), 8, turn * 7);
        assert_eq!((found.len(), found[0]), (8, Holder { worker: WorkerId(124), blocks: 12 }));
        assert!(found[1..].iter().all(|holder| holder.blocks == 10));
        seen.extend(found.iter().map(|holder| holder.worker));
        assert_eq!(found.iter().map(|holder| holder.worker).collect::<BTreeSet<_>>().len(), 8, "each once");
    }
    assert_eq!(seen.len(), 500);
    assert!(rig.index.holders.stored() <= 500 + 499, "one set for all blocks that have it");
}

#[test]
fn a_worker_is_followed_from_its_first_full_list_on() {
    let (mut index, worker) = (KvIndex::new(10), WorkerId(1));
    let mut change = KvChange { number: 5, stored: vec![9], ..KvChange::default() };
    assert_eq!(index.follow(worker, &change), Followed::Gap);
    assert!(!index.follows(worker) && index.find(&[BlockName(9)], 1, 0).is_empty());
    change.afresh = true;
    assert_eq!(index.follow(worker, &change), Followed::Yes);
    assert!(index.follows(worker));
    assert_eq!(index.follow(worker, &KvChange { number: 7, ..KvChange::default() }), Followed::Gap);
    assert!(!index.follows(worker), "what is known stays, but nothing is added");
    assert_eq!(index.find(&[BlockName(9)], 1, 0).len(), 1);
    assert_eq!(index.follow(worker, &KvChange { number: 6, ..KvChange::default() }), Followed::Gap);
}

#[test]
fn a_stride_visits_each_member_once() {
    for members in 1..300 {
        let step = stride(members);
        let seen: BTreeSet<usize> = (0..members).map(|at| at * step % members).collect();
        assert_eq!(seen.len(), members);
        assert!(members < 8 || (members / 4..members * 3 / 4).contains(&step), "{step} of {members}");
    }
}

#[test]
fn galloping_finds_the_end_and_looks_at_few() {
    for end in 0..70 {
        for so in 0..=end {
            let looks = Cell::new(0);
            let found = gallop(end, |at| {
                looks.set(looks.get() + 1);
                assert!(at < end);
                at < so
            });
            assert_eq!(found, so);
            assert!(looks.get() <= 2 * (so + 2).ilog2() + 2, "{} looks for {so} of {end}", looks.get());
        }
    }
}
