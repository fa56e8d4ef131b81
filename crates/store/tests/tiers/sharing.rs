//! Many who use a store at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use baton_kv_store::testing::data;
use baton_kv_store::{Miss, StoreConfig, StoreLimits, Tier};
use baton_store::{Event, Got, KvStore, Settings};
use baton_types::testing::Random;
use baton_types::{Courtesy, Decoding, Processor};

use crate::common::{LONG, config, get, key_of, on_disk, open, put, put_all};

#[test]
fn threads_that_put_and_get_the_same_blocks_get_the_right_ones() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(24));
    let found = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (store, found) = (&store, &found);
            scope.spawn(move || {
                let mut random = Random(thread);
                for _ in 0..3000 {
                    let number = random.below(120) as u32;
                    match random.chance(500) {
                        true => drop(put(store, number)),
                        false => match get(store, number) {
                            Ok(_) => {
                                found.fetch_add(1, SeqCst);
                            }
                            Err(why) => assert!(matches!(why, Miss::Absent | Miss::Busy), "{why}"),
                        },
                    }
                }
            });
        }
    });
    assert!(store.settled(LONG));
    store.check().unwrap();
    let counters = store.counters();
    assert!(found.into_inner() > 3000 && counters.hit_tokens[Tier::Disk as usize] > 0);
    assert_eq!((counters.verify_failures, counters.disk_errors), ([0; 3], 0));
}

#[test]
fn events_tell_what_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    let mut held = std::collections::BTreeSet::new();
    for round in 0..5 {
        put_all(&store, round * 20..round * 20 + 20);
        for event in store.events() {
            match event {
                Event::Stored(name, tier) => assert!(held.insert((name, tier))),
                Event::Removed(name, tier) => assert!(held.remove(&(name, tier))),
                Event::Gap => panic!("so few events are not lost"),
            }
        }
        assert_eq!(held.iter().copied().collect::<Vec<_>>(), {
            let mut all = store.snapshot();
            all.sort_unstable();
            all
        });
    }
}

#[test]
fn who_waits_is_woken_and_a_part_can_be_read_alone() {
    let directory = tempfile::tempdir().unwrap();
    let woken = Arc::new(AtomicU32::new(0));
    let count = woken.clone();
    let settings = Settings {
        config: config(16),
        directory: directory.path().to_owned(),
        objects: None,
        threads: 2,
        courtesy: Courtesy::default(),
        about: None,
    };
    let store = KvStore::open(
        settings,
        Some(Box::new(move || {
            count.fetch_add(1, SeqCst);
        })),
    )
    .unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..40);
    let number = on_disk(&store, 0..40)[0];
    let before = woken.load(SeqCst);
    let Got::Pending(mut pending) = store.get(key_of(number)) else { panic!("it is on disk") };
    let mut reading = pending.wait(LONG).unwrap().unwrap();
    // The answer may be there a little before the call.
    let begun = Instant::now();
    while woken.load(SeqCst) == before {
        assert!(begun.elapsed() < LONG, "nobody was woken");
        std::thread::yield_now();
    }
    let parts: Vec<_> = store.shape().parts(0b11).collect();
    let mut part = vec![0; parts[2].range.len()];
    reading.copy_part(2, &mut part).unwrap();
    assert_eq!(part, data(store.shape(), number)[parts[2].range.clone()]);
    assert!(reading.copy_part(3, &mut part).is_err(), "there are three");
    // What somebody else found damaged is gone.
    reading.damaged();
    assert_eq!(store.counters().verify_failures, [1, 0, 0]);
    assert_eq!(get(&store, number), Ok(Tier::Disk), "the disk's copy is still there");
}

/// How long the disk's threads rested, in ns; they say it to nobody else.
static RESTED: AtomicU64 = AtomicU64::new(0);

#[test]
fn the_threads_of_the_disk_rest_while_answers_are_decoded() {
    let directory = tempfile::tempdir().unwrap();
    let decoding = Decoding::default();
    let processor = Processor {
        ran: || Duration::from_millis(1),
        rest: |time| {
            RESTED.fetch_add(time.as_nanos() as u64, SeqCst);
        },
    };
    let mut courtesy = Courtesy::beside(decoding.clone(), 0.5, processor);
    // What each thread copies first makes it give way.
    courtesy.nearly();
    let directory = directory.path().to_owned();
    let open = || {
        let (directory, courtesy) = (directory.clone(), courtesy.clone());
        let settings = Settings { config: config(16), directory, objects: None, threads: 1, courtesy, about: None };
        KvStore::open(settings, None).unwrap()
    };
    let store = open();
    assert!(store.settled(LONG));
    put_all(&store, 0..1);
    drop(store);
    assert_eq!(RESTED.load(SeqCst), 0, "nobody waits for a token");
    decoding.set(true);
    let store = open();
    assert!(store.settled(LONG));
    assert_eq!(get(&store, 0), Ok(Tier::Disk));
    drop(store);
    assert_eq!(RESTED.load(SeqCst), 1_000_000, "as long as it ran");
}

#[test]
fn a_filling_that_is_dropped_is_no_block() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    let mut filling = store.put(key_of(1)).unwrap();
    filling.data().fill(7);
    drop(filling);
    assert_eq!(get(&store, 1), Err(Miss::Absent));
    assert!(store.put(key_of(1)).is_ok(), "and nobody fills it any more");
    store.check().unwrap();
}

/// Bytes in host memory that are not those of the digests are found by whoever copies them out, and the block is gone.
#[test]
fn what_does_not_match_its_digests_in_host_memory_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    for wrong in 0..3 {
        let mut filling = store.put(key_of(1)).unwrap();
        let data = data(store.shape(), 1);
        filling.data().copy_from_slice(&data);
        let mut digests = store.shape().digests(0b11, &data).to_vec();
        digests[wrong] ^= 1;
        filling.done(digests.into());
        assert_eq!(get(&store, 1), Err(Miss::Damaged), "part {wrong}");
        assert_eq!(get(&store, 1), Err(Miss::Absent));
    }
    assert_eq!(store.counters().verify_failures, [3, 0, 0]);
    store.check().unwrap();
}

/// Who gives up takes no place from others.
#[test]
fn a_pending_that_is_dropped_is_no_ticket() {
    let directory = tempfile::tempdir().unwrap();
    let limits = StoreLimits { tickets: 2, ..StoreLimits::default() };
    let store = open(directory.path(), StoreConfig { limits, ..config(16) });
    put_all(&store, 0..40);
    let there = on_disk(&store, 0..40);
    for number in &there[..6] {
        let got = store.get(key_of(*number));
        assert!(matches!(got, Got::Pending(_)), "{got:?}");
    }
    assert!(store.settled(LONG));
    for number in &there[..6] {
        let Got::Ready(_) = store.get(key_of(*number)) else { panic!("block {number} did not come up") };
    }
    store.check().unwrap();
}
