//! How much of a workload's prompts is found again in a pool, in host memory, on disk and in an object store: pool and store are the real ones,
//! over memory, a disk and objects without bytes and without delay. The object store may be slow, away, or have lost or changed objects.
//!
//! One block stands for the [`NAMED`] tokens that share a name. Requests come one after the other. Each looks its prompt up in the pool, loads
//! from the store what follows there, and computes the rest. What the pool evicts is offered to the store.

mod objects;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use baton_kv_cache::{BlockName, CacheConfig, Cached, KvPools, Need, Prefix, Readers};
use baton_kv_store::{
    Block, BlockKey, Counters, DiskConfig, Effect, Head, Identity, Input, ObjectConfig, Place, Shape, Store,
    StoreConfig, Tier,
};
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry, Time};

use crate::serving::{NAMED, Prompt};
use objects::Objects;

pub use baton_kv_store::Policy;
pub use objects::ObjectFaults;

/// Records of a segment.
const RECORDS: u32 = 32;

/// Sizes in blocks, and what decides which blocks stay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizes {
    /// Blocks of the pool.
    pub pool: u32,
    /// Buffers in host memory.
    pub host: u32,
    /// Records on disk; a part of them is kept free to reclaim segments.
    pub disk: u32,
    /// Most objects; 0: there is no object store.
    pub object: u32,
    /// Which blocks stay in the store.
    pub policy: Policy,
    /// Blocks asked for less often are neither written to disk nor uploaded.
    pub min_uses: u8,
}

/// What came of it, in tokens.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Found {
    /// Of all prompts.
    pub asked: u64,
    /// In the pool.
    pub pool: u64,
    /// In host memory.
    pub host: u64,
    /// On disk.
    pub disk: u64,
    /// In the object store.
    pub object: u64,
    /// Written to disk from host memory.
    pub demoted: u64,
    /// Written to disk again, to reclaim segments.
    pub moved: u64,
    /// What the store counted.
    pub counters: Counters,
    /// Faults of the object store that were played, a number each: slow, lost, wrong, away.
    pub faults: [u64; 4],
}

impl Found {
    /// Found in any tier.
    pub fn all(&self) -> u64 {
        self.pool + self.host + self.disk + self.object
    }
}

/// Tokens of all prompts that are found when nothing is ever evicted.
pub fn unlimited(prompts: &[Prompt]) -> u64 {
    let (mut seen, mut found) = (BTreeSet::<u64>::new(), 0);
    for prompt in prompts {
        let leading = prompt.names.iter().take_while(|name| seen.contains(*name)).count();
        found += (0..leading).map(|at| tokens_of(prompt, at)).sum::<u64>();
        seen.extend(&prompt.names);
    }
    found
}

/// Plays all prompts.
pub fn play(sizes: Sizes, prompts: &[Prompt]) -> Found {
    play_with(sizes, ObjectFaults::default(), prompts)
}

/// The same, with faults of the object store. Panics if a block is handed out that is not the one that was wanted, if the store's accounts are
/// wrong, or if there are more objects than may be.
pub fn play_with(sizes: Sizes, faults: ObjectFaults, prompts: &[Prompt]) -> Found {
    let mut tiers = Tiers::new(sizes, faults);
    prompts.iter().for_each(|prompt| tiers.serve(prompt));
    tiers.store.check().expect("the store's accounts");
    let record = tiers.shape.stride() as u64;
    let counters = *tiers.store.counters();
    let [demoted, moved] = counters.written_bytes.map(|bytes| bytes / record * u64::from(NAMED));
    Found { demoted, moved, counters, faults: tiers.objects.played, ..tiers.found }
}

fn tokens_of(prompt: &Prompt, at: usize) -> u64 {
    u64::from(prompt.input.saturating_sub(at as u32 * NAMED).min(NAMED))
}

struct Tiers {
    pools: KvPools,
    store: Store,
    shape: Shape,
    prefix: Prefix,
    /// What follows what, of all blocks that were ever seen.
    keys: BTreeMap<BlockName, BlockKey>,
    disk: BTreeMap<(u32, u32), Block>,
    objects: Objects,
    most_objects: u64,
    next: u64,
    /// In microseconds.
    now: u64,
    found: Found,
}

impl Tiers {
    fn new(sizes: Sizes, faults: ObjectFaults) -> Tiers {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let version = PROTOCOL_VERSION;
        let layout = KvLayout { version, model: 1, dtype: KvDtype::F16, block_size: 1, groups: vec![group] };
        let shape = Shape::new(&layout).expect("a small shape");
        let mut pools =
            KvPools::new(&PoolGeometry::uniform(layout, sizes.pool), CacheConfig::default()).expect("a pool");
        pools.note_changes();
        let disk = (sizes.disk > 0).then_some(DiskConfig { segments: sizes.disk / RECORDS, records: RECORDS });
        let mut config = StoreConfig::new(shape.clone(), Identity::default(), sizes.host, disk);
        (config.policy, config.min_uses) = (sizes.policy, sizes.min_uses);
        let most_objects = u64::from(sizes.object);
        config.object = (most_objects > 0).then_some(ObjectConfig { most: most_objects });
        let store = Store::new(config).expect("sizes that can work");
        let prefix = Prefix { root: BlockName::root("", 1), ..Prefix::default() };
        let (keys, disk, objects) = (BTreeMap::new(), BTreeMap::new(), Objects::new(faults));
        let found = Found::default();
        let mut tiers =
            Tiers { pools, store, shape, prefix, keys, disk, objects, most_objects, next: 0, now: 0, found };
        tiers.carry_out();
        tiers
    }

    fn serve(&mut self, prompt: &Prompt) {
        let tokens: Vec<u32> = prompt.names.iter().map(|name| *name as u32).collect();
        let names: Vec<BlockName> = self.prefix.root.chain(&tokens, 1).collect();
        self.learn(&tokens, &names);
        self.found.asked += u64::from(prompt.input);
        self.now = prompt.at;
        for answer in self.objects.take_late() {
            self.feed(answer);
        }
        self.feed(Input::Seen(names.clone()));
        // A lookup leaves out the last token, here the last block; one more stands in for it.
        let longer: Vec<u32> = tokens.iter().copied().chain([u32::MAX]).collect();
        let hit = self.pools.lookup(&self.prefix, &longer).without_copy();
        let pooled = hit.blocks() as usize;
        self.found.pool += (0..pooled).map(|at| tokens_of(prompt, at)).sum::<u64>();
        for (at, name) in names.iter().enumerate().skip(pooled) {
            match self.load(*name) {
                Some(Tier::Host) => self.found.host += tokens_of(prompt, at),
                Some(Tier::Disk) => self.found.disk += tokens_of(prompt, at),
                Some(Tier::Object) => self.found.object += tokens_of(prompt, at),
                None => break,
            }
        }
        // A prompt that the pool cannot hold is computed and forgotten.
        let Ok(mut tables) = self.pools.seat(&hit, Some(self.prefix), Need::whole(tokens.len() as u32)) else { return };
        self.pools.index(&mut tables, &tokens, Readers::Nobody, false).expect("blocks of its own");
        self.pools.free(tables).expect("blocks of its own");
        let gone: Vec<Cached> = self.pools.take_changes().collect();
        for change in gone {
            if let Cached::Removed(name) = change {
                self.offer(name);
            }
        }
    }

    fn learn(&mut self, tokens: &[u32], names: &[BlockName]) {
        let parents = [self.prefix.root.name()].into_iter().chain(names.iter().copied());
        for ((name, parent), token) in names.iter().zip(parents).zip(tokens) {
            let key = || BlockKey { name: *name, parent, tokens: Arc::from([*token]), groups: 1 };
            self.keys.entry(*name).or_insert_with(key);
        }
    }

    fn load(&mut self, name: BlockName) -> Option<Tier> {
        let (ticket, key) = (self.ticket(), self.keys[&name].clone());
        let tier = self.feed(Input::Get(ticket, key));
        // Who has not got it by now computes it.
        self.feed(if tier.is_some() { Input::Done(ticket, true) } else { Input::Cancel(ticket) });
        tier
    }

    fn offer(&mut self, name: BlockName) {
        let (ticket, key) = (self.ticket(), self.keys[&name].clone());
        self.feed(Input::Put(ticket, key));
        self.feed(Input::Filled(ticket, Some(Arc::from([0]))));
    }

    fn ticket(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn feed(&mut self, input: Input) -> Option<Tier> {
        self.store.feed(input, self.time());
        self.carry_out()
    }

    fn time(&self) -> Time {
        Time(self.now * 1000)
    }

    /// Carries out all effects. Returns the tier of a block that was handed out.
    fn carry_out(&mut self) -> Option<Tier> {
        let mut tier = None;
        while let Some(effect) = self.store.next_effect() {
            let at = |place: Place| (place.segment, place.index);
            let answer = match effect {
                Effect::Scan(segment) => Input::Scanned(segment, Some(Vec::new())),
                Effect::Read { job, place, .. } => Input::Read(job, Ok(self.disk[&at(place)].clone())),
                Effect::Write { job, place, head, .. } => {
                    let head = Head::parse(&self.shape, &head).expect("a head");
                    self.disk.insert(at(place), head.block);
                    Input::Written(job, true)
                }
                Effect::Ready(_, _, block, from) => {
                    assert_eq!(block.key, self.keys[&block.key.name], "another block than was wanted");
                    tier = Some(from);
                    continue;
                }
                call => match self.objects.call(call, &self.shape, self.now) {
                    Some(answer) => answer,
                    None => continue,
                },
            };
            self.store.feed(answer, self.time());
        }
        assert!(self.objects.count() <= self.most_objects, "{} objects", self.objects.count());
        tier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(names: &[u64]) -> Prompt {
        Prompt { at: 0, input: names.len() as u32 * NAMED, output: 1, names: names.to_vec() }
    }

    /// Conversations come again after so many others that only the next tier still has them.
    #[test]
    fn each_tier_finds_what_the_one_before_has_lost() {
        let rounds = |count: u64| -> Vec<Prompt> {
            (0..4).flat_map(|_| (0..count).map(|at| prompt(&[10 * at, 10 * at + 1, 10 * at + 2]))).collect()
        };
        let sizes = Sizes { pool: 20, host: 100, disk: 32 * 40, object: 4000, policy: Policy::Lru, min_uses: 1 };
        for (count, tier) in [(5, 0), (25, 1), (200, 2), (1000, 3)] {
            let prompts = rounds(count);
            let found = play(sizes, &prompts);
            let by_tier = [found.pool, found.host, found.disk, found.object];
            assert_eq!(found.all(), unlimited(&prompts), "{count} conversations: {found:?}");
            assert!(by_tier[tier] > 9 * found.all() / 10, "{count} conversations: {found:?}");
        }
        let none = play(Sizes { disk: 0, object: 0, host: 1, ..sizes }, &rounds(200));
        assert_eq!(none.all(), 0, "each is gone before it comes again");
    }

    #[test]
    fn what_comes_once_is_not_written() {
        let prompts: Vec<Prompt> = (0..400).map(|at| prompt(&[3 * at, 3 * at + 1, 3 * at + 2])).collect();
        let sizes = Sizes { pool: 20, host: 100, disk: 32 * 40, object: 4000, policy: Policy::Sketch, min_uses: 2 };
        let found = play(sizes, &prompts);
        assert_eq!((found.demoted, found.counters.uploaded_bytes), (0, 0));
        assert!(play(Sizes { min_uses: 1, ..sizes }, &prompts).demoted > 1000 * u64::from(NAMED));
    }

    /// Whatever the object store does costs what is computed instead: no wrong block, no lost account, and what fails is counted.
    #[test]
    fn an_object_store_that_is_slow_or_away_or_has_lost_or_changed_objects_costs_only_what_is_computed() {
        let rounds = |count: u64| -> Vec<Prompt> {
            let one =
                |round, at| Prompt { at: 1000 * (count * round + at), ..prompt(&[10 * at, 10 * at + 1, 10 * at + 2]) };
            (0..6).flat_map(|round| (0..count).map(move |at| one(round, at))).collect()
        };
        let prompts = rounds(1000);
        for disk in [0, 32 * 10] {
            let sizes = Sizes { pool: 20, host: 100, disk, object: 4000, policy: Policy::Sketch, min_uses: 1 };
            let whole = play(sizes, &prompts);
            assert_eq!(whole.all(), unlimited(&prompts));
            let away = 2_000_000..3_000_000;
            let faults = [
                ObjectFaults { slow: 10, ..Default::default() },
                ObjectFaults { lost: 10, ..Default::default() },
                ObjectFaults { wrong: 10, ..Default::default() },
                ObjectFaults { away: away.clone(), ..Default::default() },
                ObjectFaults { slow: 7, lost: 11, wrong: 13, away },
            ];
            for faults in faults {
                let found = play_with(sizes, faults.clone(), &prompts);
                let [slow, lost, wrong, away] = found.faults;
                assert!(found.faults.iter().sum::<u64>() > 0, "{faults:?}: none was played");
                assert_eq!(found.counters.verify_failures, [0, 0, wrong], "{faults:?}");
                assert_eq!(found.counters.object_errors, away, "{faults:?}");
                assert!(found.all() < whole.all() && found.all() > whole.all() / 5, "{faults:?}: {found:?}");
                // While it is away, it rests: 1,000 prompts of three blocks come.
                assert!(away <= 20 && (slow + lost == 0 || slow + lost > 100), "{faults:?}: {:?}", found.faults);
            }
        }
    }
}
