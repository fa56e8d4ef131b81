//! Small stores, and blocks that are made by a number.

use std::path::Path;
use std::time::Duration;

use baton_kv_store::testing::{data, key, shape};
use baton_kv_store::{BlockKey, Decline, DiskConfig, Identity, Miss, StoreConfig, Tier};
use baton_store::{Got, KvStore, Reading, Settings};
use baton_types::Courtesy;

pub const LONG: Duration = Duration::from_secs(60);

pub fn config(buffers: u32) -> StoreConfig {
    let identity = Identity { layout: 1, numerics: 2 };
    StoreConfig::new(shape(), identity, buffers, Some(DiskConfig { segments: 16, records: 8 }))
}

pub fn open(directory: &Path, config: StoreConfig) -> KvStore {
    let store = KvStore::open(
        Settings {
            config,
            directory: directory.to_owned(),
            objects: None,
            threads: 4,
            courtesy: Courtesy::default(),
            about: None,
        },
        None,
    )
    .unwrap();
    assert!(store.settled(LONG));
    store
}

/// Each block is the first of its prompt.
pub fn key_of(number: u32) -> BlockKey {
    key(number, None)
}

pub fn put(store: &KvStore, number: u32) -> Result<(), Decline> {
    store.seen(vec![key_of(number).name]);
    let filling = store.put(key_of(number))?;
    let data = data(store.shape(), number);
    filling.copy_from(|part| &data[part.range.clone()]);
    Ok(())
}

/// Puts blocks, and waits for the disk after each.
pub fn put_all(store: &KvStore, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        put(store, number).unwrap();
        assert!(store.settled(LONG));
    }
}

/// Copies a block out. What is verified is compared with the truth.
pub fn copied(mut reading: Reading, number: u32, store: &KvStore) -> Result<Tier, Miss> {
    let truth = data(store.shape(), number);
    let parts: Vec<_> = store.shape().parts(reading.block().key.groups).collect();
    for (at, part) in parts.iter().enumerate() {
        let mut copy = vec![0; part.range.len()];
        if reading.copy_part(at, &mut copy).is_err() {
            return Err(Miss::Damaged);
        }
        assert!(copy == truth[part.range.clone()], "block {number} has the wrong KV, and nobody noticed");
    }
    Ok(reading.tier())
}

pub fn get(store: &KvStore, number: u32) -> Result<Tier, Miss> {
    match store.get(key_of(number)) {
        Got::Ready(reading) => copied(reading, number, store),
        Got::Missed(why) => Err(why),
        Got::Pending(mut pending) => pending.wait(LONG).expect("an answer").and_then(|got| copied(got, number, store)),
    }
}

pub fn on_disk(store: &KvStore, numbers: std::ops::Range<u32>) -> Vec<u32> {
    let snapshot = store.snapshot();
    let there = |number: &u32| {
        let name = key_of(*number).name;
        snapshot.contains(&(name, Tier::Disk)) && !snapshot.contains(&(name, Tier::Host))
    };
    numbers.filter(there).collect()
}
