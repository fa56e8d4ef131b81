//! Object stores: in memory with faults, and a file system.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use baton_kv_store::{DiskConfig, Identity, Miss, ObjectConfig, StoreConfig, Tier, object_bytes};
use baton_store::{Got, KvStore, Objects};
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::common::{LONG, config, get, key_of, put, put_all};
use crate::faulty::Faulty;

/// Longest time of a call here.
const PATIENCE: Duration = Duration::from_millis(300);

/// Host memory for a few blocks, no disk, and room for many objects.
fn small() -> StoreConfig {
    StoreConfig { disk: None, object: Some(ObjectConfig { most: 1000 }), ..config(8) }
}

fn over(objects: Objects, config: StoreConfig) -> KvStore {
    let store = KvStore::over(None, Some(objects), config, 0, None).unwrap();
    assert!(store.settled(LONG));
    store
}

fn begun(faulty: &Faulty) -> KvStore {
    let objects = Objects::over(Arc::new(faulty.clone()), Path::from("some/where")).with_patience(PATIENCE);
    over(objects, small())
}

fn of_files(directory: &FilePath, config: StoreConfig) -> KvStore {
    over(Objects::open(&format!("file://{}", directory.display())).unwrap().with_patience(PATIENCE), config)
}

/// Those of the blocks that are in the object store only.
fn far(store: &KvStore, numbers: std::ops::Range<u32>) -> Vec<u32> {
    numbers.filter(|number| store.held(&[key_of(*number).name]) == [Tier::Object]).collect()
}

/// All objects of a store, each with its bytes.
fn bytes_of(objects: &InMemory) -> Vec<(Path, Vec<u8>)> {
    let bytes = async {
        let mut found = Vec::new();
        for meta in objects.list(None).collect::<Vec<_>>().await {
            let at = meta.unwrap().location;
            let bytes = objects.get(&at).await.unwrap().bytes().await.unwrap();
            found.push((at, bytes.to_vec()));
        }
        found
    };
    run(bytes)
}

fn replace(objects: &InMemory, at: &Path, bytes: Vec<u8>) {
    run(objects.put(at, bytes.into())).unwrap();
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

#[test]
fn what_left_host_memory_comes_from_the_object_store_also_in_the_next_process() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    assert!(there.len() >= 30, "{there:?}");
    assert_eq!(get(&store, there[0]), Ok(Tier::Object));
    assert_eq!(get(&store, there[0]), Ok(Tier::Host));
    let counters = store.counters();
    assert_eq!((counters.verify_failures, counters.object_errors), ([0; 3], 0));
    assert_eq!(counters.uploaded_bytes, 40 * object_bytes(store.shape()));
    assert_eq!((store.blocks(Tier::Object), store.limit_bytes()[2]), (40, 1000 * object_bytes(store.shape())));
    store.check().unwrap();
    drop(store);
    let again = begun(&faulty);
    assert_eq!(again.counters().recovered, 40);
    for number in 0..40 {
        assert_eq!(get(&again, number), Ok(Tier::Object), "block {number}");
    }
    let names = bytes_of(&faulty.objects);
    assert!(names.iter().all(|(at, _)| at.as_ref().starts_with("some/where/0000000000000001-")), "{names:?}");
}

#[test]
fn below_a_disk_the_object_store_has_what_the_disk_has_no_room_for() {
    let (directory, faulty) = (tempfile::tempdir().unwrap(), Faulty::default());
    let disk = DiskConfig { segments: 8, records: 4 };
    let config = StoreConfig { disk: Some(disk), ..small() };
    let files = baton_store::Files::open(directory.path(), config.identity, &config.shape, disk).unwrap();
    let objects = Objects::over(Arc::new(faulty.clone()), Path::default());
    let store = KvStore::over(Some(Box::new(files)), Some(objects), config, 2, None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..100);
    let tiers: Vec<Tier> = (0..100).flat_map(|number| store.held(&[key_of(number).name])).collect();
    assert_eq!(tiers.len(), 100, "nothing is lost");
    for tier in Tier::ALL {
        let number = tiers.iter().position(|at| *at == tier).expect("a block in each tier") as u32;
        assert_eq!(get(&store, number), Ok(tier));
        assert!(store.settled(LONG));
    }
}

/// I2: a flipped bit anywhere in an object, or an end that is missing, is found and counted; the block is computed and uploaded again.
#[test]
fn an_object_that_changed_is_found_and_replaced() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    let head = store.shape().head_bytes();
    for (at, (path, mut bytes)) in (0..).zip(bytes_of(&faulty.objects)) {
        match at % 4 {
            0 => bytes[head + 19 * at] ^= 1,
            1 => bytes[40 + at] ^= 1,
            2 => bytes.truncate(head + 19 * at),
            _ => bytes.push(0),
        }
        replace(&faulty.objects, &path, bytes);
    }
    for (count, number) in (1..).zip(&there) {
        assert_eq!(get(&store, *number), Err(Miss::Damaged), "block {number}");
        assert_eq!(store.counters().verify_failures, [0, 0, count]);
    }
    assert!(store.settled(LONG));
    assert_eq!(bytes_of(&faulty.objects).len(), 40 - there.len(), "they are removed");
    put(&store, there[0]).unwrap();
    assert!(store.settled(LONG));
    assert_eq!(store.counters().object_errors, 0);
    drop(store);
    assert_eq!(get(&begun(&faulty), there[0]), Ok(Tier::Object));
}

/// A connection that breaks is no damage: the object may be whole.
#[test]
fn a_get_that_ends_too_soon_is_a_miss_and_the_object_stays() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    faulty.faults.cut.store(1000, SeqCst);
    assert_eq!(get(&store, there[0]), Err(Miss::Failed));
    assert_eq!((store.counters().verify_failures, store.counters().object_errors), ([0; 3], 1));
    faulty.faults.cut.store(0, SeqCst);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(get(&store, there[0]), Ok(Tier::Object));
}

#[test]
fn an_object_store_that_fails_is_left_alone_and_costs_no_put() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    faulty.faults.fails.store(true, SeqCst);
    assert_eq!(get(&store, there[0]), Err(Miss::Failed));
    let calls = faulty.faults.calls.load(SeqCst);
    for number in 100..160 {
        assert_eq!(put(&store, number), Ok(()));
        assert_eq!(get(&store, number), Ok(Tier::Host));
        assert_eq!(get(&store, there[0]), Err(Miss::Failed));
    }
    assert!(store.settled(LONG));
    let more = faulty.faults.calls.load(SeqCst) - calls;
    assert!((1..=4).contains(&more), "{more} calls: uploads find out by themselves, then all rests");
    assert!(far(&store, 0..40).is_empty(), "nobody is told to load from there");
    assert_eq!(store.counters().object_errors, 1 + u64::from(more));
    faulty.faults.fails.store(false, SeqCst);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(get(&store, there[0]), Ok(Tier::Object));
    store.check().unwrap();
}

#[test]
fn an_object_store_that_is_away_at_the_start_is_found_later() {
    let faulty = Faulty::default();
    put_all(&begun(&faulty), 0..40);
    faulty.faults.fails.store(true, SeqCst);
    let store = begun(&faulty);
    assert_eq!((get(&store, 0), store.counters().object_errors), (Err(Miss::Absent), 1));
    faulty.faults.fails.store(false, SeqCst);
    std::thread::sleep(Duration::from_millis(1100));
    put_all(&store, 100..101);
    assert_eq!(get(&store, 0), Ok(Tier::Object));
}

/// Who has no patience goes on, and host memory is as fast as ever.
#[test]
fn a_slow_object_store_holds_nobody_up() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    faulty.faults.delay_ms.store(200, SeqCst);
    let begun = Instant::now();
    let Got::Pending(mut pending) = store.get(key_of(there[0])) else { panic!("it is far") };
    for number in 100..130 {
        put(&store, number).unwrap();
        assert_eq!(get(&store, number), Ok(Tier::Host));
    }
    assert!(begun.elapsed() < Duration::from_millis(150), "{:?} for what needs no object", begun.elapsed());
    assert!(matches!(pending.wait(LONG), Some(Ok(_))));
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert!(store.settled(LONG));
    store.check().unwrap();
}

#[test]
fn an_object_store_that_hangs_ends_in_misses_and_the_store_can_be_dropped() {
    let faulty = Faulty::default();
    let store = begun(&faulty);
    put_all(&store, 0..40);
    let there = far(&store, 0..40);
    faulty.faults.hangs.store(true, SeqCst);
    let begun = Instant::now();
    assert_eq!(get(&store, there[0]), Err(Miss::Failed));
    assert!((PATIENCE..PATIENCE + Duration::from_secs(2)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    std::thread::sleep(Duration::from_millis(1100));
    let Got::Pending(_pending) = store.get(key_of(there[1])) else { panic!("it is asked again") };
    let begun = Instant::now();
    drop(store);
    assert!(begun.elapsed() < Duration::from_millis(200), "{:?}", begun.elapsed());
}

#[test]
fn a_directory_is_an_object_store() {
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("a/b");
    put_all(&of_files(&below, small()), 0..40);
    std::fs::write(below.join("notes.txt"), "mine").unwrap();
    let again = of_files(&below, small());
    assert_eq!(again.blocks(Tier::Object), 40);
    assert_eq!(get(&again, 7), Ok(Tier::Object));
    // KV of other numerics is elsewhere, and stays.
    let other = StoreConfig { identity: Identity { layout: 1, numerics: 3 }, ..small() };
    let other = of_files(&below, other);
    assert_eq!((other.blocks(Tier::Object), get(&other, 7)), (0, Err(Miss::Absent)));
    put_all(&other, 0..3);
    assert_eq!(get(&again, 8), Ok(Tier::Object));
    // Two may have the same directory: what one removes, the other computes.
    let one = StoreConfig { object: Some(ObjectConfig { most: 1 }), ..small() };
    let beside = of_files(&below, one);
    assert_eq!(beside.blocks(Tier::Object), 1);
    let lost = far(&again, 0..40).into_iter().filter(|number| get(&again, *number) == Err(Miss::Absent));
    assert!(lost.count() >= 20);
    assert_eq!((again.counters().object_errors, again.counters().verify_failures), (0, [0; 3]));
}

/// Reading a pipe that nobody writes to hangs, as a file system does whose server is away. Calls that do not come back are bounded (I5).
#[test]
fn a_directory_that_hangs_is_asked_only_so_often() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = StoreConfig { buffers: 100, ..small() };
    config.limits.fetches = 64;
    put_all(&of_files(directory.path(), config.clone()), 0..70);
    let folder = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let pipes: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let store = of_files(directory.path(), config);
    let whole = std::fs::read(&pipes[0]).unwrap();
    for pipe in &pipes {
        std::fs::remove_file(pipe).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
    }
    let begun = Instant::now();
    let asked: Vec<Got> = (0..64).map(|number| store.get(key_of(number))).collect();
    for got in asked {
        let Got::Pending(mut pending) = got else { panic!("{got:?}") };
        assert!(matches!(pending.wait(LONG), Some(Err(Miss::Failed))));
    }
    assert!((PATIENCE..3 * PATIENCE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    std::thread::sleep(Duration::from_millis(1100));
    let begun = Instant::now();
    assert_eq!(get(&store, 65), Err(Miss::Failed));
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}: it was asked, though 64 calls hang", begun.elapsed());
    // The server is back: calls that hung come back, and it is asked again.
    let mut writers = Vec::new();
    for pipe in &pipes {
        writers.push(std::fs::OpenOptions::new().read(true).write(true).open(pipe).unwrap());
    }
    std::thread::sleep(Duration::from_millis(500));
    drop(writers);
    for pipe in &pipes {
        std::fs::remove_file(pipe).unwrap();
        std::fs::write(pipe, &whole).unwrap();
    }
    std::thread::sleep(Duration::from_millis(1700));
    assert_eq!(get(&store, 66), Err(Miss::Damaged), "it is asked again, and has another block");
}

#[test]
fn a_url_that_cannot_be_used_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (url, why) in [
        ("gs://bucket/x", "neither"),
        ("/some/where", "neither"),
        ("file://relative", "neither"),
        ("s3://bucket/a//b", "a//b"),
        ("s3:///prefix", "no bucket"),
        (&format!("file://{}/below", file.display()), "Not a directory"),
    ] {
        let error = Objects::open(url).unwrap_err().to_string();
        assert!(error.contains(url) && error.contains(why) && error.contains("kv_object"), "{error}");
        assert!(error.contains("give s3://BUCKET/PREFIX or file:///DIRECTORY"), "{error}");
    }
}
