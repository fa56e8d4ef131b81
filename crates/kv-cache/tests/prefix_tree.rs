//! The prefix cache against a naive oracle, and against a model of the memory behind its blocks.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::{BTreeMap, BTreeSet};

use baton_kv_cache::{
    BlockName, BlockState, CacheConfig, CacheFeed, Eviction, HOLE, Hit, KvPools, LentTables, NameChain, NameSecret,
    Need, Prefix, Readers, Tables,
};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PoolGeometry, Time};
use proptest::prelude::*;

/// A group's number of blocks, its window and its sinks (both in tokens).
type Shape = (u32, Option<u32>, u32);

fn pools(block_size: u32, groups: &[Shape], cache: CacheConfig) -> KvPools {
    let group = |(at, (_, window, sinks)): (usize, &Shape)| KvGroup {
        layers: vec![at as u32],
        planes: 2,
        kv_heads: 1,
        head_dim: 4,
        window: *window,
        sinks: *sinks,
    };
    let layout = KvLayout {
        version: 1,
        model: 0,
        dtype: KvDtype::F16,
        block_size,
        groups: groups.iter().enumerate().map(group).collect(),
    };
    KvPools::new(&PoolGeometry { layout, blocks: groups.iter().map(|group| group.0).collect() }, cache).unwrap()
}

struct Live {
    tables: Tables,
    prefix: Prefix,
    tokens: Vec<u32>,
    computed: usize,
}

/// Pools and a model of their memory: the slot of a position holds the hash of all tokens up to it.
struct World {
    pools: KvPools,
    /// Window and sinks by group.
    windows: Vec<(Option<u32>, u32)>,
    memory: BTreeMap<(usize, BlockId), Vec<u64>>,
    live: Vec<Live>,
    /// Everything ever indexed, as seed and tokens. Serves as the oracle while nothing is evicted.
    known: Vec<(u64, Vec<u32>)>,
    /// What others are told of the cache.
    feed: CacheFeed,
}

fn value(prefix: &Prefix, tokens: &[u32]) -> u64 {
    root(prefix.seed).then(tokens).name().short()
}

/// The root of a seed's names.
fn root(seed: u64) -> NameChain {
    NameSecret::of(b"a secret").root(&seed.to_string(), 0)
}

impl World {
    fn new(mut pools: KvPools, windows: Vec<(Option<u32>, u32)>) -> World {
        pools.note_changes();
        let (memory, live, known) = (BTreeMap::new(), Vec::new(), Vec::new());
        World { pools, windows, memory, live, known, feed: CacheFeed::default() }
    }

    fn size(&self) -> usize {
        self.pools.block_size() as usize
    }

    /// Length of the longest prefix of `tokens`, without the last token, that an indexed sequence of the seed begins with.
    fn oracle(&self, prefix: &Prefix, tokens: &[u32]) -> usize {
        let common = |known: &Vec<u32>| known.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let of_seed = self.known.iter().filter(|(seed, _)| *seed == prefix.seed);
        of_seed.map(|(_, known)| common(known)).max().unwrap_or(0).min(tokens.len() - 1)
    }

    fn start(&mut self, prefix: Prefix, tokens: Vec<u32>, whole: bool) {
        let hit = self.pools.lookup(&prefix, &tokens);
        assert!((hit.tokens() as usize) < tokens.len());
        let count = tokens.len() as u32;
        let need = if whole { Need::whole(count) } else { Need::chunks(count, 2) };
        let fits = self.pools.fits(&hit, need, 0).is_ok();
        let seated = self.pools.seat(&hit, Some(prefix), need);
        assert_eq!(seated.is_ok(), fits, "fits tells exactly whether there is room");
        let Ok(mut tables) = seated else { return };
        for copy in tables.copies() {
            let bytes = self.memory[&(copy.group, copy.from)].clone();
            self.memory.insert((copy.group, copy.to), bytes);
        }
        self.pools.copied(&mut tables).unwrap();
        assert!(tables.tokens() >= count.min(hit.tokens() + if whole { count } else { 2 }));
        let live = Live { tables, prefix, computed: hit.tokens() as usize, tokens };
        self.verify(&live);
        self.live.push(live);
    }

    /// Receives KV from a peer: only lent blocks are written, and no lookup finds them before they are accepted.
    fn receive(&mut self, prefix: Prefix, tokens: Vec<u32>, arrives: bool) {
        let hit = self.pools.lookup(&prefix, &tokens).without_copy();
        assert_eq!(hit.tokens(), hit.blocks() * self.pools.block_size());
        let Ok(lent) = self.pools.lend(&hit, Some(prefix), tokens.len() as u32) else { return };
        self.write_lent(&lent, &prefix, &tokens);
        // Lending may have evicted blocks of the prefix found before, so `found` may be shorter than `hit`.
        let found = self.pools.lookup(&prefix, &tokens).without_copy();
        assert!(found.tokens() <= hit.tokens(), "I2: not before it is verified");
        if !arrives {
            let quarantine = self.pools.quarantine(lent).unwrap();
            self.pools.check().unwrap();
            return self.pools.clear_quarantine(quarantine).unwrap();
        }
        let tables = self.pools.accept(lent).unwrap();
        let mut live = Live { tables, prefix, computed: tokens.len(), tokens };
        self.index(&mut live, true);
        self.verify(&live);
        self.live.push(live);
    }

    fn write_lent(&mut self, lent: &LentTables, prefix: &Prefix, tokens: &[u32]) {
        for (group, table) in lent.as_slice().iter().enumerate() {
            for at in lent.shared() as usize..table.blocks().len() {
                let block = table.blocks()[at];
                if block == HOLE {
                    continue;
                }
                assert_eq!(self.pools.group(group).unwrap().state(block), Ok((BlockState::Lent, 1)));
                for position in at * self.size()..tokens.len().min((at + 1) * self.size()) {
                    self.write(group, block, position % self.size(), value(prefix, &tokens[..=position]));
                }
            }
        }
    }

    fn write(&mut self, group: usize, block: BlockId, slot: usize, value: u64) {
        let size = self.size();
        self.memory.entry((group, block)).or_insert_with(|| vec![0; size])[slot] = value;
    }

    /// Checks that attention reads next what these tokens wrote.
    fn verify(&self, live: &Live) {
        for (group, table) in live.tables.as_slice().iter().enumerate() {
            let (window, sinks) = self.windows[group];
            let first = window.map_or(0, |window| (live.computed + 1).saturating_sub(window as usize));
            for position in (0..first.min(sinks as usize)).chain(first..live.computed) {
                let (block, slot) = table.slot(position as u32, self.pools.block_size()).expect("a visible block");
                let stored = self.memory[&(group, block)][slot as usize];
                assert_eq!(stored, value(&live.prefix, &live.tokens[..=position]), "group {group} position {position}");
            }
        }
    }

    fn index(&mut self, live: &mut Live, seal: bool) {
        self.pools.index(&mut live.tables, &live.tokens[..live.computed], Readers::Nobody, seal).unwrap();
        let whole = if seal { live.computed } else { live.computed / self.size() * self.size() };
        self.known.push((live.prefix.seed, live.tokens[..whole].to_vec()));
    }

    fn compute(&mut self, at: usize, count: usize, seal: bool) {
        let mut live = self.live.swap_remove(at);
        let target = (live.computed + count).min(live.tokens.len()) as u32;
        let before = live.tables.tokens();
        let grown = self.pools.grow(&mut live.tables, target).is_ok();
        assert!(grown || live.tables.tokens() == before, "all or nothing");
        for position in live.computed..(target.min(live.tables.tokens()) as usize) {
            for group in 0..self.windows.len() {
                let table = &live.tables.as_slice()[group];
                let (block, slot) = table.slot(position as u32, self.pools.block_size()).unwrap();
                self.write(group, block, slot as usize, value(&live.prefix, &live.tokens[..=position]));
            }
            live.computed = position + 1;
        }
        self.index(&mut live, seal);
        self.pools.trim(&mut live.tables, live.computed as u32).unwrap();
        self.verify(&live);
        self.live.push(live);
    }

    fn append(&mut self, at: usize, token: u32) {
        let live = &mut self.live[at];
        if self.pools.grow(&mut live.tables, live.tokens.len() as u32 + 1).is_ok() {
            live.tokens.push(token);
        }
    }

    fn end(&mut self, at: usize, quarantined: bool) {
        let mut live = self.live.swap_remove(at);
        self.index(&mut live, true);
        if !quarantined {
            return self.pools.free(live.tables).unwrap();
        }
        let quarantine = self.pools.quarantine_used(live.tables).unwrap();
        self.pools.check().unwrap();
        self.pools.clear_quarantine(quarantine).unwrap();
    }

    fn operate(&mut self, (choice, pick, shape, flag): (u8, usize, Vec<u32>, bool)) {
        let prefix = Prefix {
            seed: pick as u64 % 2,
            root: root(pick as u64 % 2),
            keep: (pick % 3) as u8,
            keep_until: flag.then_some(Time(pick as u64 % 50)),
        };
        if choice == 0 || self.live.is_empty() {
            return self.start(prefix, shape, flag && pick.is_multiple_of(3));
        }
        let at = pick % self.live.len();
        match choice {
            1 => self.receive(prefix, shape, flag),
            2 | 3 => self.compute(at, shape.len(), flag),
            4 => self.append(at, shape[0]),
            5 => self.pools.advance(Time(pick as u64 % 60)),
            _ => self.end(at, flag),
        }
    }

    fn check(&mut self) {
        self.pools.check().unwrap();
        self.pools.take_changes().for_each(|change| self.feed.note(change));
        self.feed.take();
        let told: BTreeSet<BlockName> = self.feed.told().into_iter().collect();
        assert_eq!(told, self.pools.block_names().collect(), "others are told what there is");
        self.live.iter().for_each(|live| self.verify(live));
        let counts = self.pools.counts();
        let owned: BTreeSet<_> = self
            .live
            .iter()
            .flat_map(|live| live.tables.as_slice().iter().enumerate())
            .flat_map(|(group, table)| table.blocks().iter().filter(|b| **b != HOLE).map(move |b| (group, *b)))
            .collect();
        assert_eq!(owned.len() as u32, counts.used, "I6: what is used is what somebody has");
    }
}

fn operations() -> impl Strategy<Value = Vec<(u8, usize, Vec<u32>, bool)>> {
    let shape = prop::collection::vec(0u32..2, 1..24);
    prop::collection::vec((0u8..8, 0usize..1000, shape, any::<bool>()), 1..60)
}

fn shape() -> impl Strategy<Value = Shape> {
    (8u32..40, prop::option::of((1u32..12, 0u32..9)))
        .prop_map(|(blocks, seen)| (blocks, seen.map(|(window, _)| window), seen.map_or(0, |(_, sinks)| sinks)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// When nothing is ever evicted, a lookup finds exactly what a search of everything indexed finds.
    #[test]
    fn an_unlimited_cache_finds_what_the_oracle_finds(
        block_size in 1u32..6,
        operations in operations(),
    ) {
        let pools = pools(block_size, &[(4000, None, 0), (4000, None, 0)], CacheConfig::default());
        let mut world = World::new(pools, vec![(None, 0); 2]);
        for operation in operations {
            for seed in 0..2 {
                let prefix = Prefix { seed, ..Prefix::default() };
                let found = world.pools.lookup(&prefix, &operation.2).tokens() as usize;
                prop_assert_eq!(found, world.oracle(&prefix, &operation.2));
                let names: Vec<BlockName> = root(seed).chain(&operation.2, block_size).collect();
                let told: BTreeSet<BlockName> = world.feed.told().into_iter().collect();
                let held = names.iter().take_while(|name| told.contains(name)).count();
                // A lookup leaves the last token out.
                prop_assert_eq!(held.min((operation.2.len() - 1) / block_size as usize), found / block_size as usize);
            }
            world.operate(operation);
            world.check();
        }
        prop_assert_eq!(world.pools.evictions(), 0);
    }

    /// No sequence ever reads another's KV, however small the pool, whatever is evicted, with and without windows.
    #[test]
    fn a_hit_is_always_the_right_kv(
        block_size in 1u32..6,
        groups in prop::collection::vec(shape(), 1..4),
        max_blocks in prop_oneof![Just(0u32), 1u32..10, Just(u32::MAX)],
        max_kept in prop_oneof![Just(0u32), 1u32..10, Just(u32::MAX)],
        eviction in prop_oneof![Just(Eviction::Lru), Just(Eviction::Lfu), Just(Eviction::Priority)],
        operations in operations(),
    ) {
        let pools = pools(block_size, &groups, CacheConfig { max_blocks, max_kept, eviction });
        let windows = groups.iter().map(|group| (group.1, group.2)).collect();
        let mut world = World::new(pools, windows);
        for operation in operations {
            world.operate(operation);
            world.check();
            prop_assert!(world.pools.indexed() as u64 <= u64::from(max_blocks), "I5: the cap holds");
            prop_assert!(world.pools.kept() <= max_kept, "I5: and that on what is kept");
        }
        while !world.live.is_empty() {
            world.end(0, false);
        }
        prop_assert!(world.pools.counts().idle(), "I6");
        world.pools.clear_cache().unwrap();
        world.check();
        prop_assert_eq!((world.pools.counts().free, world.pools.indexed()), (world.pools.counts().total, 0));
    }
}

/// A pool of three one-token blocks, after sequences of one block each were cached one after the other.
fn cached(eviction: Eviction, uses: &[(u32, Prefix)]) -> KvPools {
    cached_within(CacheConfig { eviction, ..CacheConfig::default() }, uses)
}

fn cached_within(cache: CacheConfig, uses: &[(u32, Prefix)]) -> KvPools {
    let mut pools = pools(1, &[(3, None, 0)], cache);
    for (token, prefix) in uses {
        let hit = pools.lookup(prefix, &[*token, 0]);
        let mut tables = pools.seat(&hit.without_copy(), Some(*prefix), Need::whole(1)).unwrap();
        pools.index(&mut tables, &[*token], Readers::Nobody, false).unwrap();
        pools.free(tables).unwrap();
    }
    pools
}

/// Which of the tokens are still cached after one more block was needed.
fn left(pools: &mut KvPools, tokens: &[u32]) -> Vec<u32> {
    let tables = pools.seat(&Hit::default(), None, Need::whole(1)).unwrap();
    let there = |token: &&u32| pools.lookup(&Prefix::default(), &[**token, 0]).tokens() == 1;
    let left = tokens.iter().filter(there).copied().collect();
    pools.free(tables).unwrap();
    left
}

#[test]
fn each_policy_evicts_in_its_own_order() {
    let plain = Prefix::default();
    // 1 is used twice, then 2 and 3 once each.
    let uses = [(1, plain), (1, plain), (2, plain), (3, plain)];
    assert_eq!(left(&mut cached(Eviction::Lru, &uses), &[1, 2, 3]), [2, 3]);
    assert_eq!(left(&mut cached(Eviction::Lfu, &uses), &[1, 2, 3]), [1, 3]);
    let kept = |keep, keep_until| Prefix { keep, keep_until, ..plain };
    let pinned = [(1, kept(9, Some(Time(100)))), (2, kept(3, None)), (3, plain)];
    let mut pools = cached(Eviction::Priority, &pinned);
    assert_eq!(left(&mut pools, &[1, 2, 3]), [1, 2]);
    pools.advance(Time(99));
    assert_eq!(left(&mut cached(Eviction::Priority, &pinned), &[1, 2, 3]), [1, 2]);
    let mut pools =
        cached(Eviction::Priority, &[(1, kept(9, Some(Time(100)))), (2, kept(3, None)), (3, kept(1, None))]);
    pools.advance(Time(100));
    assert_eq!(left(&mut pools, &[1, 2, 3]), [2, 3], "its time is over");
}

/// I5: at most `max_kept` blocks are kept, each until its time ends. The rest are evicted like any other block.
#[test]
fn no_more_is_kept_than_may_be() {
    let kept = |keep_until| Prefix { keep: 1, keep_until, ..Prefix::default() };
    let cache = CacheConfig { max_kept: 2, eviction: Eviction::Priority, ..CacheConfig::default() };
    // The limit is reached, so the third is not kept. It is evicted first, though it was used last.
    let uses = [(1, kept(Some(Time(100)))), (2, kept(Some(Time(200)))), (3, kept(None))];
    let mut pools = cached_within(cache, &uses);
    assert_eq!((pools.kept(), left(&mut pools, &[1, 2, 3])), (2, vec![1, 2]));
    // A block that is kept already may be kept for longer. When a pin ends, another block may be kept.
    let mut pools = cached_within(cache, &[uses[0], uses[1], (1, kept(Some(Time(300)))), uses[2]]);
    pools.advance(Time(200));
    assert_eq!((pools.kept(), left(&mut pools, &[1, 2, 3])), (1, vec![1, 3]));
    // An eviction makes room for another kept block too.
    let mut pools = cached_within(cache, &uses[..2]);
    let tables = pools.allocate(2).unwrap();
    assert_eq!(pools.kept(), 1);
    pools.free(tables).unwrap();
    pools.check().unwrap();
}

/// A block that was popular once does not stay for ever.
#[test]
fn the_least_frequently_used_age() {
    let plain = Prefix::default();
    let mut uses = vec![(1, plain); 4];
    // A stream of new tokens, each used twice, passes through the other two blocks.
    uses.extend((10..40).flat_map(|token| [(token, plain), (token, plain)]));
    let pools = cached(Eviction::Lfu, &uses);
    assert_eq!(pools.lookup(&plain, &[1, 0]).tokens(), 0);
}

/// A leaf is evicted before its parent, however long ago the parent was used.
#[test]
fn leaves_go_before_their_parents() {
    let mut pools = pools(1, &[(4, None, 0)], CacheConfig::default());
    let prefix = Prefix::default();
    let mut tables = pools.seat(&Hit::default(), Some(prefix), Need::whole(4)).unwrap();
    pools.index(&mut tables, &[1, 2, 3, 4], Readers::Nobody, false).unwrap();
    pools.free(tables).unwrap();
    for gone in 1..=3 {
        let tables = pools.allocate(gone).unwrap();
        assert_eq!(pools.lookup(&prefix, &[1, 2, 3, 4, 5]).tokens(), 4 - gone);
        pools.free(tables).unwrap();
    }
    assert_eq!(pools.evictions(), 3);
}

/// A block that two sequences have computed is kept once.
#[test]
fn the_same_block_computed_twice_is_merged_unless_somebody_reads_it() {
    for readers in [Readers::Nobody, Readers::Step, Readers::Transfer] {
        let exposed = readers != Readers::Nobody;
        let mut pools = pools(2, &[(8, None, 0)], CacheConfig::default());
        let prefix = Prefix::default();
        let mut seat = || pools.seat(&Hit::default(), Some(prefix), Need::whole(4)).unwrap();
        let (mut one, mut two) = (seat(), seat());
        pools.index(&mut one, &[1, 2, 3, 4], Readers::Nobody, false).unwrap();
        let before = two.as_slice()[0].blocks().to_vec();
        pools.index(&mut two, &[1, 2, 3, 4], readers, false).unwrap();
        pools.check().unwrap();
        assert_eq!(two.as_slice()[0].blocks() == one.as_slice()[0].blocks(), !exposed);
        assert_eq!(two.as_slice()[0].blocks() == before, exposed);
        assert_eq!(pools.counts().used, if exposed { 4 } else { 2 });
        // After a step, the next call merges the blocks. After a transfer, nothing more is indexed.
        pools.index(&mut two, &[1, 2, 3, 4], Readers::Nobody, false).unwrap();
        let merged = readers != Readers::Transfer;
        assert_eq!(two.as_slice()[0].blocks() == one.as_slice()[0].blocks(), merged);
        assert_eq!(pools.counts().used, if merged { 2 } else { 4 });
        pools.free(one).unwrap();
        pools.free(two).unwrap();
        assert_eq!((pools.counts().cached, pools.indexed()), (2, 2));
    }
}

/// When every group has a window, blocks that the window has passed may be evicted from the middle of a chain. The last full
/// block stays with its owner, so that later blocks are found under it.
#[test]
fn the_last_full_block_keeps_its_chain() {
    let mut pools = pools(4, &[(3, Some(1), 0)], CacheConfig::default());
    let (prefix, tokens) = (Prefix::default(), (1..20).collect::<Vec<u32>>());
    let mut tables = pools.seat(&Hit::default(), Some(prefix), Need::whole(8)).unwrap();
    pools.index(&mut tables, &tokens[..8], Readers::Nobody, false).unwrap();
    pools.trim(&mut tables, 8).unwrap();
    assert_eq!((tables.as_slice()[0].holes(), pools.counts().cached), (1, 1));
    let other = pools.allocate(8).unwrap();
    assert_eq!((pools.counts().cached, pools.evictions(), pools.indexed()), (0, 1, 2));
    pools.free(other).unwrap();
    pools.free(tables).unwrap();
    // Everything but the last full block is evicted to make room for the new sequence.
    let hit = pools.lookup(&prefix, &tokens[..13]);
    assert_eq!(hit.tokens(), 8);
    let mut tables = pools.seat(&hit, Some(prefix), Need::whole(13)).unwrap();
    pools.check().unwrap();
    pools.index(&mut tables, &tokens[..12], Readers::Nobody, false).unwrap();
    pools.trim(&mut tables, 12).unwrap();
    pools.check().unwrap();
    assert_eq!(pools.lookup(&prefix, &tokens[..13]).tokens(), 12);
    pools.free(tables).unwrap();
    assert!(pools.counts().idle());
}

/// Nobody finds a spoilt block, nor what continues it. What nobody holds is free at once, the rest when it is given back; the same tokens can be cached
/// again then.
#[test]
fn what_is_spoilt_is_found_by_nobody() {
    for held in [false, true] {
        let mut pools = pools(2, &[(8, None, 0), (8, Some(4), 0)], CacheConfig::default());
        let (prefix, tokens) = (Prefix::default(), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let cache = |pools: &mut KvPools, tokens: &[u32]| {
            let hit = pools.lookup(&prefix, tokens).without_copy();
            let mut tables = pools.seat(&hit, Some(prefix), Need::whole(tokens.len() as u32)).unwrap();
            pools.index(&mut tables, tokens, Readers::Nobody, false).unwrap();
            tables
        };
        let tables = cache(&mut pools, &tokens[..8]);
        let block = tables.as_slice()[0].blocks()[1];
        pools.vouch(0, block, 77);
        pools.vouch(0, BlockId(7), 78);
        assert_eq!((pools.digest(0, block), pools.digest(1, block)), (Some(77), None));
        assert_eq!(pools.digest(0, BlockId(7)), None, "it is not in the cache");
        let mut tables = Some(tables);
        if !held {
            pools.free(tables.take().unwrap()).unwrap();
        }
        assert_eq!(pools.lookup(&prefix, &tokens).tokens(), 8);
        pools.spoilt(0, block).unwrap();
        pools.check().unwrap();
        assert_eq!(pools.lookup(&prefix, &tokens).tokens(), 2, "what comes before it is as it was");
        if let Some(mut tables) = tables {
            pools.index(&mut tables, &tokens[..8], Readers::Nobody, false).unwrap();
            let other = cache(&mut pools, &tokens[..8]);
            assert_eq!(pools.lookup(&prefix, &tokens).tokens(), 2, "while it is there, its place is not taken");
            pools.check().unwrap();
            pools.free(other).unwrap();
            pools.free(tables).unwrap();
        }
        pools.check().unwrap();
        assert_eq!((pools.indexed(), pools.digest(0, block)), (1, None));
        let again = cache(&mut pools, &tokens[..8]);
        assert_eq!(pools.lookup(&prefix, &tokens).tokens(), 8);
        pools.free(again).unwrap();
        pools.clear_cache().unwrap();
        assert_eq!((pools.counts().free, pools.indexed()), (pools.counts().total, 0));
    }
}
