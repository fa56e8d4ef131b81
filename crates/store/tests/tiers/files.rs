//! What is in files.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_kv_store::testing::shape;
use baton_kv_store::{Identity, Miss, StoreConfig, Tier};
use baton_store::{KvStore, OpenError, Settings};
use baton_types::Courtesy;

use crate::common::{LONG, config, get, key_of, on_disk, open, put_all};

fn file(directory: &Path) -> PathBuf {
    let mut files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.extension().is_some_and(|ending| ending == "baton-kv")).unwrap()
}

#[test]
fn blocks_outlive_the_process() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    put_all(&store, 0..60);
    let there = on_disk(&store, 0..60);
    assert!(there.len() > 30 && get(&store, there[3]) == Ok(Tier::Disk));
    assert_eq!(get(&store, there[3]), Ok(Tier::Host));
    assert!(store.flush(LONG));
    let [reads, writes] = store.disk_times();
    assert!(reads.count == 1 && writes.count >= 60 && writes.spent > Duration::ZERO);
    drop(store);
    let store = open(directory.path(), config(16));
    assert_eq!(store.counters().recovered, 60);
    for number in there {
        assert_eq!(get(&store, number), Ok(Tier::Disk), "block {number}");
    }
    assert_eq!(get(&store, 999), Err(Miss::Absent));
    store.check().unwrap();
}

#[test]
fn a_byte_that_changed_in_the_file_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    put_all(&store, 0..60);
    let there = on_disk(&store, 0..60);
    let (stride, head) = (shape().stride() as u64, shape().head_bytes() as u64);
    let path = OpenOptions::new().read(true).write(true).open(file(directory.path())).unwrap();
    for record in 0..path.metadata().unwrap().len() / stride {
        let (mut byte, at) = ([0], record * stride + head + 500);
        path.read_exact_at(&mut byte, at).unwrap();
        path.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    path.sync_all().unwrap();
    for (count, number) in (1..).zip(there) {
        assert_eq!(get(&store, number), Err(Miss::Damaged));
        assert_eq!(store.counters().verify_failures, [0, count, 0]);
    }
}

#[test]
fn a_file_that_lost_its_end_is_a_miss() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), config(16));
    put_all(&store, 0..60);
    let there = on_disk(&store, 0..60);
    OpenOptions::new().write(true).open(file(directory.path())).unwrap().set_len(0).unwrap();
    assert_eq!(get(&store, there[0]), Err(Miss::Failed));
    assert_eq!(store.counters().disk_errors, 1);
    put_all(&store, 100..110);
    drop(store);
    assert!(open(directory.path(), config(16)).settled(LONG));
}

#[test]
fn space_is_bounded_and_files_of_others_stay() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("notes.txt"), "mine").unwrap();
    let bytes = |directory: &Path| fs::metadata(file(directory)).unwrap().len();
    let store = open(directory.path(), config(16));
    put_all(&store, 0..300);
    let most = 16 * 8 * shape().stride() as u64;
    assert_eq!(bytes(directory.path()), most);
    drop(store);
    // KV of other numerics takes its place.
    let other = StoreConfig { identity: Identity { layout: 1, numerics: 3 }, ..config(16) };
    let store = open(directory.path(), other);
    assert_eq!((store.blocks(Tier::Disk), bytes(directory.path())), (0, most));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3, "notes, lock, and one file of KV");
    assert_eq!(get(&store, 1), Err(Miss::Absent));
}

#[test]
fn a_directory_belongs_to_one_store() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path(), config(16));
    let again = || {
        let settings = Settings {
            config: config(16),
            directory: directory.path().to_owned(),
            objects: None,
            threads: 1,
            courtesy: Courtesy::default(),
            about: None,
        };
        KvStore::open(settings, None)
    };
    assert!(matches!(again(), Err(OpenError::InUse { .. })));
    drop(first);
    assert!(again().is_ok());
}

#[test]
fn without_a_disk_there_is_host_memory() {
    let store = open(Path::new("/nowhere"), StoreConfig { disk: None, ..config(4) });
    put_all(&store, 0..6);
    assert_eq!((get(&store, 5), get(&store, 0)), (Ok(Tier::Host), Err(Miss::Absent)));
    assert_eq!(store.held(&[key_of(5).name, key_of(0).name]), [Tier::Host]);
    assert_eq!(store.counters().overrun, 0);
}
