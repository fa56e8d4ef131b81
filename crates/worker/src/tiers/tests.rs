//! Blocks are copied between a pool and the store, and back into another pool.

use std::os::fd::BorrowedFd;

use baton_engine::HOLE;
use baton_engine::fake::tiny_layout;
use baton_kv_store::{BlockKey, Decline};
use baton_transfer::conformance::{Broken, memory_over};
use baton_transfer::{DeviceError, DeviceMemory, DeviceQueue, JobDone, Moving, Pool, Registrable, Segment};
use baton_types::{BlockId, OpenedBy, PoolGeometry, PoolHandle, RequestId, Time};

use super::copier::Copier;
use super::courtesy::Courtesy;
use super::memory::Memory;
use super::*;

const BLOCKS: u32 = 8;

/// A pool in host memory whose bytes are all different from block to block, and a store for its blocks.
fn copier(first: u8, store: &Arc<KvStore>) -> Pair {
    pair(first, store, |segment| Pool::Host(Arc::clone(segment)))
}

/// The same with a pool in a device's memory.
fn on_device(first: u8, store: &Arc<KvStore>) -> Pair {
    pair(first, store, |segment| Pool::Device(memory_over(segment)))
}

/// The same with blocks that are copied layer by layer.
fn by_layer(first: u8, store: &Arc<KvStore>) -> Pair {
    layered(copier(first, store))
}

fn on_device_by_layer(first: u8, store: &Arc<KvStore>) -> Pair {
    layered(on_device(first, store))
}

fn layered(mut pair: Pair) -> Pair {
    pair.copier.together = 8;
    pair
}

/// What copies, and the memory that it copies from and to.
struct Pair {
    copier: Copier,
    segment: Arc<Segment>,
}

fn pair(first: u8, store: &Arc<KvStore>, pool: impl Fn(&Arc<Segment>) -> Pool) -> Pair {
    let geometry = PoolGeometry::uniform(tiny_layout(4), BLOCKS);
    let segment = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
    let bytes: Vec<u8> = (0..geometry.bytes()).map(|at| first.wrapping_add((at / 3) as u8)).collect();
    // SAFETY: nobody else has the segment.
    unsafe { segment.write(0, &bytes) };
    let (memory, store) = (Memory::of(&pool(&segment)).unwrap(), Arc::clone(store));
    Pair {
        copier: Copier {
            store,
            memory,
            geometry,
            ahead: 2,
            together: 0,
            layered: Arc::default(),
            garbled: Arc::default(),
            courtesy: Courtesy::default(),
            digests: Vec::new(),
        },
        segment,
    }
}

fn store() -> Arc<KvStore> {
    let shape = Shape::new(&tiny_layout(4)).unwrap();
    Arc::new(KvStore::over(None, None, StoreConfig::new(shape, Identity::default(), 16, None), 0, None).unwrap())
}

/// Two blocks of a prefix, from block 1 of its prompt on; these blocks of the pool by group.
fn what(blocks: [[BlockId; 2]; 2]) -> Move {
    let (request_id, prefix, deadline) = (RequestId("r".into()), Default::default(), Time(0));
    let prefix = Prefix { request_id, tokens: (0..13).collect(), prefix, deadline };
    Move { seq: SeqId(1), prefix, first: 1, blocks: blocks.map(|list| list.to_vec()).to_vec(), known: vec![] }
}

fn load(to: &mut Pair, what: &Move) -> bool {
    let (paces, loading) = (Paces::new(), Loading::default());
    to.copier.load(what, &loading, &|| (), &paces).is_some()
}

/// Whatever is copied, in whichever way, counts for when the thread gives way.
#[test]
fn copies_give_way() {
    let store = store();
    let (mut from, mut to, mut layers) = (copier(1, &store), copier(99, &store), by_layer(99, &store));
    let gives = |pair: &mut Pair, copies: &mut dyn FnMut(&mut Pair)| {
        let before = pair.copier.courtesy.times();
        pair.copier.courtesy.nearly();
        copies(pair);
        pair.copier.courtesy.times() > before
    };
    let blocks = || what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    assert!(gives(&mut from, &mut |pair| assert_eq!(pair.copier.save(&blocks()), None)), "a save");
    assert!(gives(&mut to, &mut |pair| assert!(load(pair, &blocks()))), "a load, block by block");
    assert!(gives(&mut layers, &mut |pair| assert!(load(pair, &blocks()))), "a load, layer by layer");
}

/// The bytes of a block in all layers of its group.
fn bytes(of: &Pair, group: usize, block: BlockId) -> Vec<u8> {
    let geometry = &of.copier.geometry;
    let layers = geometry.layout.groups[group].layers.len();
    let ranges = (0..layers).map(|layer| geometry.block_range(group, layer, block));
    // SAFETY: nobody writes to the segment now.
    ranges.flat_map(|range| unsafe { of.segment.read(range.start, range.len()) }).collect()
}

/// Between host memory and devices, whose reads and writes are done as late as is allowed.
#[test]
fn what_is_saved_from_one_pool_is_loaded_into_another() {
    for (source, target) in [
        (copier as fn(_, &_) -> _, copier as fn(_, &_) -> _),
        (on_device, on_device),
        (copier, on_device),
        (copier, by_layer),
        (on_device, on_device_by_layer),
    ] {
        let store = store();
        let (mut from, mut to) = (source(1, &store), target(99, &store));
        // The second group's window has passed the first block.
        from.copier.save(&what([[BlockId(3), BlockId(0)], [HOLE, BlockId(5)]]));
        let untouched = bytes(&to, 0, BlockId(7));
        assert!(load(&mut to, &what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]])));
        for (group, source, target) in [(0, 3, 6), (0, 0, 2), (1, 5, 4)] {
            assert_eq!(bytes(&to, group, BlockId(target)), bytes(&from, group, BlockId(source)), "group {group}");
        }
        assert_eq!(bytes(&to, 0, BlockId(7)), untouched);
        let lacks = what([[BlockId(6), BlockId(2)], [BlockId(1), BlockId(4)]]);
        assert!(!load(&mut to, &lacks), "a layer group is not there");
        let mut other = what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]]);
        other.prefix.tokens[1] = 77;
        assert!(!load(&mut to, &other), "another prompt");
    }
}

/// I2: what a load was verified with is what a save of the same blocks is compared with; a bit that has flipped since is not stored as right.
#[test]
fn what_has_changed_in_a_pool_since_it_came_is_not_saved() {
    for pool in [copier as fn(_, &_) -> _, on_device] {
        let (first, second) = (store(), store());
        let (mut from, mut to) = (copier(1, &first), pool(99, &first));
        let blocks = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
        from.copier.save(&blocks);
        assert!(load(&mut to, &blocks));
        let known = std::mem::take(&mut to.copier.digests);
        assert_eq!(known.len(), 4, "{known:?}");
        let held = |store: &KvStore| store.blocks(Tier::Host);
        to.copier.store = Arc::clone(&second);
        let saved = Move { known, ..blocks };
        // A bit of the second block of the second group.
        let at = to.copier.geometry.block_range(1, 0, BlockId(5)).start + 7;
        // SAFETY: nobody else writes to the segment.
        let flip = || unsafe { to.segment.write(at, &[to.segment.read(at, 1)[0] ^ 1]) };
        flip();
        assert_eq!(to.copier.save(&saved), Some((1, BlockId(5))));
        assert!(second.settled(Duration::from_secs(60)) && held(&second) == 1, "{} blocks", held(&second));
        flip();
        assert_eq!(to.copier.save(&saved), None);
        assert!(second.settled(Duration::from_secs(60)) && held(&second) == 2, "{} blocks", held(&second));
    }
}

/// A block was saved when its window still saw it, and is loaded when it sees it no more.
#[test]
fn what_the_store_has_and_nobody_wants_stays_there() {
    for target in [copier as fn(_, &_) -> _, on_device, by_layer, on_device_by_layer] {
        let store = store();
        let (mut from, mut to) = (copier(1, &store), target(99, &store));
        from.copier.save(&what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
        assert!(load(&mut to, &what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]])));
        for (group, source, target) in [(0, 3, 6), (0, 0, 2), (1, 5, 4)] {
            assert_eq!(bytes(&to, group, BlockId(target)), bytes(&from, group, BlockId(source)), "group {group}");
        }
        let nothing = what([[HOLE, BlockId(2)], [HOLE, BlockId(4)]]);
        assert!(load(&mut to, &nothing), "nothing of the first block is wanted");
        let second = what([[HOLE, BlockId(7)], [BlockId(1), BlockId(6)]]);
        assert!(load(&mut to, &second), "the second layer group of the first block alone");
        assert_eq!(bytes(&to, 1, BlockId(1)), bytes(&from, 1, BlockId(2)));
    }
}

/// I3: also where a load fails, nothing is on its way to the blocks once it is over.
#[test]
fn what_was_on_its_way_to_a_device_has_arrived_when_a_load_fails() {
    let store = store();
    let (mut from, mut to) = (copier(1, &store), on_device(99, &store));
    let saved = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    // The second block is not there.
    let first = saved.blocks.iter().map(|list| list[..1].to_vec()).collect();
    from.copier.save(&Move { blocks: first, ..saved });
    assert!(!load(&mut to, &what([[BlockId(6), BlockId(2)], [BlockId(1), BlockId(4)]])));
    let now = bytes(&to, 0, BlockId(6));
    assert_eq!(now, bytes(&from, 0, BlockId(3)), "it is not used, but it is no longer on its way");
    assert!(load(&mut to, &what([[HOLE, HOLE], [HOLE, HOLE]])), "the queue goes on");
}

/// I2: a step that waits for a layer gets it only when it is there and as it was stored; after a damaged one it gets none.
#[test]
fn layers_are_told_of_in_order_and_once_they_are_verified() {
    for target in [by_layer as fn(_, &_) -> _, on_device_by_layer] {
        let (store, blocks) = (store(), what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
        let (source, mut to) = (copier(1, &store), target(99, &store));
        for (at, (key, _)) in source.copier.keys(&blocks).into_iter().enumerate() {
            let mut filling = store.put(key.clone()).unwrap();
            filling.data().fill(7);
            let digests = store.shape().digests(key.groups, filling.data());
            // Of the second block a byte of the last layer is another one.
            let damaged = store.shape().parts(key.groups).nth(1).unwrap().range;
            filling.data()[damaged.start] ^= at as u8;
            filling.done(digests);
        }
        let (loading, streamed) = (Loading::default(), std::cell::Cell::new(0));
        let wanted = what([[BlockId(6), BlockId(2)], [BlockId(1), BlockId(4)]]);
        let streams = || streamed.set(streamed.get() + 1);
        assert_eq!(to.copier.load(&wanted, &loading, &streams, &Paces::new()), None);
        assert_eq!((tiny_layout(4).layers(), streamed.get(), loading.layers()), (3, 1, 2), "all before it");
        assert!(bytes(&to, 1, BlockId(4)).iter().all(|byte| *byte == 7));
        let first = bytes(&to, 0, BlockId(2));
        assert!(first[..first.len() / 2].iter().all(|byte| *byte == 7));
        // The next ones are copied block by block for a while: they cannot fail a step.
        copier(1, &store).copier.save(&blocks);
        assert!(to.copier.load(&wanted, &Loading::default(), &streams, &Paces::new()).is_some());
        assert_eq!(streamed.get(), 1);
        assert!(to.copier.layered.forget());
        assert!(to.copier.load(&wanted, &Loading::default(), &streams, &Paces::new()).is_some());
        assert_eq!(streamed.take(), 2);
        // Given up before the first: nothing is begun.
        let given_up = Loading::default();
        given_up.give_up();
        assert_eq!(to.copier.load(&wanted, &given_up, &streams, &Paces::new()), None);
        assert_eq!((streamed.get(), given_up.layers()), (0, 0));
    }
}

/// I2: what came to be in a device's memory is looked at there.
#[test]
fn a_device_that_garbles_what_it_takes_is_noticed() {
    let store = store();
    let mut from = copier(1, &store);
    from.copier.save(&what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    let wanted = what([[BlockId(6), BlockId(2)], [BlockId(1), BlockId(4)]]);
    for device in [on_device as fn(_, &_) -> _, on_device_by_layer] {
        let mut to = device(99, &store);
        let Memory::Device(device) = &mut to.copier.memory else { panic!("a device") };
        device.queue = device.queue.take().map(|queue| Box::new(Odd { queue, beside: 1, reads: 99 }) as _);
        let loading = Loading::default();
        assert_eq!(to.copier.load(&wanted, &loading, &|| (), &Paces::new()), None);
        assert_eq!((to.copier.garbled.load(Ordering::Relaxed), loading.layers()), (1, 0), "no layer is told of");
    }
    let broken = |_: &_| Pool::Device(Arc::new(Broken { bytes: 1 << 20 }));
    let mut broken = pair(99, &store, broken);
    assert!(!load(&mut broken, &wanted), "nothing can be written");
    broken.copier.save(&what([[BlockId(1), BlockId(2)], [BlockId(3), BlockId(4)]]));
    assert!(load(&mut on_device(99, &store), &wanted));
}

/// I1, I2: what a save that failed has left under way is never taken for another block's KV.
#[test]
fn a_save_that_failed_leaves_nothing_to_the_next() {
    let store = store();
    let mut from = on_device(1, &store);
    let Memory::Device(device) = &mut from.copier.memory else { panic!("a device") };
    device.queue = device.queue.take().map(|queue| Box::new(Odd { queue, beside: 0, reads: 1 }) as _);
    // No new queue can be opened at first.
    let whole = std::mem::replace(&mut device.memory, Arc::new(NoQueue));
    from.copier.save(&what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    from.copier.save(&what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    assert_eq!(store.blocks(Tier::Host), 0);
    let Memory::Device(device) = &mut from.copier.memory else { panic!("a device") };
    device.memory = whole;
    let mut other = what([[BlockId(6), BlockId(1)], [BlockId(1), BlockId(4)]]);
    other.prefix.tokens[0] = 55;
    from.copier.save(&other);
    let mut to = on_device(99, &store);
    other.blocks = vec![vec![BlockId(2), BlockId(3)], vec![BlockId(6), BlockId(7)]];
    assert!(load(&mut to, &other));
    assert_eq!(bytes(&to, 0, BlockId(2)), bytes(&from, 0, BlockId(6)));
}

/// Memory to which no queue can be opened.
struct NoQueue;

impl DeviceMemory for NoQueue {
    fn bytes(&self) -> usize {
        1 << 20
    }
    fn mark(&self) -> u64 {
        7
    }
    fn export(&self) -> Result<PoolHandle, DeviceError> {
        Err(DeviceError("not asked for".into()))
    }
    fn registrable(&self) -> Result<Registrable, DeviceError> {
        Err(DeviceError("not asked for".into()))
    }
    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        Err(DeviceError("no memory".into()))
    }
}

/// A queue that writes so many bytes beside where it should, and fails after so many reads.
struct Odd {
    queue: Box<dyn DeviceQueue>,
    beside: usize,
    reads: u32,
}

impl DeviceQueue for Odd {
    fn open(&mut self, handle: PoolHandle, bytes: usize) -> Result<OpenedBy, DeviceError> {
        self.queue.open(handle, bytes)
    }
    fn read(&mut self, after: u64, ranges: &[(usize, usize)]) -> Result<(), DeviceError> {
        self.reads = self.reads.checked_sub(1).ok_or_else(|| DeviceError("no more".into()))?;
        self.queue.read(after, ranges)
    }
    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError> {
        self.queue.copy(after, runs, bytes)
    }
    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError> {
        self.queue.digest(after, runs, bytes)
    }
    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        self.queue.poll()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd()
    }
    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        self.queue.stage(bytes)
    }
    fn write(&mut self, ranges: &[(usize, usize)]) -> Result<(), DeviceError> {
        let mut shifted = ranges.to_vec();
        shifted[0].0 ^= self.beside;
        self.queue.write(&shifted)
    }
    fn settle(&mut self) -> Result<(), DeviceError> {
        self.queue.settle()
    }
    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        self.queue.digests(runs, bytes)
    }
}

/// I2
#[test]
fn a_block_that_is_not_as_it_was_stored_is_not_loaded() {
    let store = store();
    let mut own = copier(1, &store);
    let blocks = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    for (at, (key, _)) in own.copier.keys(&blocks).into_iter().enumerate() {
        let mut filling = store.put(key.clone()).unwrap();
        let digests = store.shape().digests(key.groups, filling.data());
        // Of the second block one byte is another one.
        filling.data()[17] ^= at as u8;
        filling.done(digests);
    }
    assert!(!load(&mut own, &blocks));
    let first = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    let first = Move { blocks: first.blocks.iter().map(|list| list[..1].to_vec()).collect(), ..first };
    assert!(load(&mut own, &first), "the first one is right");
}

#[test]
fn a_load_that_is_given_up_ends() {
    let store = store();
    let mut own = copier(1, &store);
    let blocks = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    own.copier.save(&blocks);
    let (paces, loading) = (Paces::new(), Loading::default());
    loading.give_up();
    assert_eq!(own.copier.load(&blocks, &loading, &|| (), &paces), None);
    assert!(load(&mut own, &blocks));
}

/// Nobody finds what comes after a block that there was no room for.
#[test]
fn a_save_ends_where_the_store_has_no_room() {
    let copier = copier(1, &store()).copier;
    let mut long = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    long.first = 0;
    long.blocks = vec![[3, 0, 1].map(BlockId).to_vec(), [2, 5, 4].map(BlockId).to_vec()];
    let keys = copier.keys(&long);
    let names: Vec<BlockName> = keys.iter().map(|(key, _)| key.name).collect();
    let saved = |answers: [Result<(), Decline>; 3]| {
        let offer =
            |key: BlockKey| answers[names.iter().position(|name| *name == key.name).unwrap()].map(|()| key.name);
        copier::taken(keys.clone(), offer).map(|(name, ..)| name).collect::<Vec<_>>()
    };
    assert_eq!(saved([Err(Decline::Held), Ok(()), Ok(())]), names[1..], "what it has is no gap");
    assert_eq!(saved([Ok(()), Err(Decline::Busy), Ok(())]), names[..1]);
}

/// A kept prompt stays in the store, with all of its blocks, whatever else comes, until its time is over.
#[test]
fn what_is_kept_is_not_evicted_before_its_time_is_over() {
    let shape = Shape::new(&tiny_layout(4)).unwrap();
    let config = StoreConfig::new(shape, Identity::default(), 4, None);
    let store = Arc::new(KvStore::over(None, None, config, 0, None).unwrap());
    let mut pool = copier(1, &store);
    let prompt = |first: u32| {
        let mut what = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
        (what.first, what.prefix.tokens) = (0, (first..first + 9).collect());
        let names: Vec<_> = what.prefix.prefix.root.chain(&what.prefix.tokens[..8], 4).collect();
        (what, names)
    };
    let (what, names) = prompt(1000);
    let mut others = (1..100).map(|other| prompt(other * 2000).0);
    let mut come = |pool: &mut Pair, count| others.by_ref().take(count).all(|other| pool.copier.save(&other).is_none());
    for (most, stays) in [(1, 0), (2, 2)] {
        let mut pins = Pins::new(most);
        pool.copier.save(&what);
        pins.keep(&store, &names, Time(50));
        come(&mut pool, 9);
        pins.expire(&store, Time(49));
        come(&mut pool, 9);
        assert_eq!(store.held(&names).len(), stays, "{most} blocks may be kept");
        pins.keep(&store, &names, Time(60));
        pins.expire(&store, Time(59));
        come(&mut pool, 9);
        assert_eq!(store.held(&names).len(), stays, "kept longer");
        pins.expire(&store, Time(60));
        come(&mut pool, 9);
        assert_eq!(store.held(&names).len(), 0);
    }
    store.check().unwrap();
}

/// What is measured of a load from one tier says nothing of the other one.
#[test]
fn the_pace_of_a_device_is_that_of_the_tier() {
    let store = store();
    let (mut from, mut to) = (copier(1, &store), on_device(99, &store));
    let all = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    from.copier.save(&all);
    let paces = Paces::from(1e9);
    assert_eq!(to.copier.load(&all, &Loading::default(), &|| (), &paces), Some(Tier::Host));
    let now = Tier::ALL.map(|tier| paces.of(tier));
    assert!(now[0] < 0.9e9 && now[1] > 0.9e9 && now[2] > 0.9e9, "{now:?}");
}

/// What is in an object store that hangs: the load ends, and the next one knows that the store is slow.
#[test]
fn a_load_that_is_given_up_says_how_slow_the_tier_is_at_least() {
    let (folder, shape) = (tempfile::tempdir().unwrap(), Shape::new(&tiny_layout(4)).unwrap());
    let open = || {
        let object = ObjectConfig::of_size(1 << 20, &shape).ok();
        let config = StoreConfig { object, ..StoreConfig::new(shape.clone(), Identity::default(), 16, None) };
        let objects = Objects::open(&format!("file://{}", folder.path().display())).ok();
        let store = Arc::new(KvStore::over(None, objects, config, 0, None).unwrap());
        assert!(store.settled(Duration::from_secs(60)));
        store
    };
    let (store, blocks) = (open(), what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    copier(1, &store).copier.save(&blocks);
    assert!(store.flush(Duration::from_secs(60)));
    let told: Vec<_> = told(&store).into_iter().map(|tier| (tier.tier, tier.blocks, tier.written_bytes > 0)).collect();
    assert_eq!(told, [("host".to_owned(), 2, false), ("object".to_owned(), 2, true)]);
    let store = open();
    assert_eq!(lowest(store.limit_bytes()), Tier::Object);
    for object in std::fs::read_dir(std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path()).unwrap()
    {
        let path = object.unwrap().path();
        std::fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    let (mut to, paces, loading) = (copier(9, &store), Paces::new(), Loading::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            loading.give_up();
        });
        assert_eq!(to.copier.load(&blocks, &loading, &|| (), &paces), None);
    });
    let least = 0.2 * 3e8 / shape.data_bytes() as f64;
    assert!(paces.of(Tier::Object) > least, "{} of {least}", paces.of(Tier::Object));
    assert!(paces.of(Tier::Host) < 0.1);
}

/// A store whose blocks lie among the objects in a folder, and that fetches one at a time.
fn over_objects(folder: &std::path::Path) -> Arc<KvStore> {
    let shape = Shape::new(&tiny_layout(4)).unwrap();
    let object = ObjectConfig::of_size(1 << 20, &shape).ok();
    let mut config = StoreConfig { object, ..StoreConfig::new(shape, Identity::default(), 16, None) };
    config.limits.fetches = 1;
    let objects = Objects::open(&format!("file://{}", folder.display())).ok();
    let store = Arc::new(KvStore::over(None, objects, config, 0, None).unwrap());
    assert!(store.settled(Duration::from_secs(60)));
    store
}

/// Others may have all that the store reads at a time.
#[test]
fn a_load_waits_while_the_store_reads_as_much_as_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let (store, blocks) = (over_objects(folder.path()), what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    copier(1, &store).copier.save(&blocks);
    assert!(store.flush(Duration::from_secs(60)));
    drop(store);
    let mut to = copier(9, &over_objects(folder.path()));
    assert_eq!(to.copier.ahead, 2);
    assert_eq!(to.copier.load(&blocks, &Loading::default(), &|| (), &Paces::new()), Some(Tier::Object));
}

#[test]
fn what_has_no_room_in_the_pool_comes_to_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let seats = [[0, 1, 2], [3, 4, 5]].map(|list| list.map(BlockId).to_vec()).to_vec();
    let all = Move { first: 0, blocks: seats, ..what([[BlockId(0); 2]; 2]) };
    let store = over_objects(folder.path());
    let mut from = copier(1, &store);
    from.copier.save(&all);
    let names: Vec<_> = from.copier.keys(&all).into_iter().map(|(key, _)| key.name).collect();
    assert!(store.flush(Duration::from_secs(60)));
    drop((from, store));
    let store = over_objects(folder.path());
    let tiers = || store.held_groups(&names).into_iter().map(|(tier, _)| tier).collect::<Vec<_>>();
    assert_eq!(tiers(), [Tier::Object; 3]);
    let warms = warm::start(Arc::clone(&store), 2, 8).unwrap();
    // The first block is in the pool.
    warms.send((Box::new(all.prefix), 4)).unwrap();
    let begun = Instant::now();
    while tiers() != [Tier::Object, Tier::Host, Tier::Host] {
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", tiers());
        std::thread::sleep(Duration::from_millis(5));
    }
    store.check().unwrap();
}

#[test]
fn the_status_tells_of_the_tiers_that_there_are() {
    let (store, blocks) = (store(), [[BlockId(1), BlockId(2)], [BlockId(3), BlockId(4)]]);
    copier(1, &store).copier.save(&what(blocks));
    let stride = store.shape().stride() as u64;
    let [host] = <[_; 1]>::try_from(told(&store)).unwrap();
    assert_eq!((host.tier.as_str(), host.blocks, host.bytes, host.limit_bytes), ("host", 2, 2 * stride, 16 * stride));
    assert!(load(&mut copier(9, &store), &what(blocks)));
    assert_eq!(told(&store)[0].hit_tokens, Some(8));
}
