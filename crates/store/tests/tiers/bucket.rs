//! What tools find in an object store, and what they may remove.

use std::path::{Path, PathBuf};

use baton_kv_store::{Identity, ObjectConfig, StoreConfig};
use baton_store::{Bucket, KvStore, ObjectSum, Objects, Settings};
use baton_types::Courtesy;

use crate::common::{LONG, config, put_all};
use crate::folder::settings;

fn url(directory: &Path) -> String {
    format!("file://{}", directory.display())
}

/// A store that uploads what comes, with a description of what it is of where `told`.
fn store(directory: &Path, numerics: u64, told: bool) -> KvStore {
    let Settings { config: of, about, .. } = settings(directory);
    let identity = Identity { numerics, ..of.identity };
    let config = StoreConfig { identity, disk: None, object: Some(ObjectConfig { most: 1000 }), ..config(8) };
    let objects = Some(Objects::open(&url(directory)).unwrap());
    let about = about.filter(|_| told);
    let store = KvStore::open(
        Settings { config, objects, about, directory: PathBuf::new(), threads: 0, courtesy: Courtesy::default() },
        None,
    )
    .unwrap();
    assert!(store.settled(LONG));
    store
}

/// The files of objects in a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let inside = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    inside.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn an_object_store_says_what_is_in_it_and_what_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let ours = store(directory.path(), 2, true);
    put_all(&ours, 0..30);
    assert!(ours.flush(LONG));
    let bucket = Bucket::open(&url(directory.path())).unwrap();
    let look = || bucket.look().unwrap().into_iter().next().filter(|kept| kept.about.is_some());
    // Nobody waits for the description.
    let kept = std::iter::repeat_with(look).find_map(|kept| kept).unwrap();
    assert_eq!((kept.blocks, kept.identity.numerics), (30, 2));
    assert_eq!(kept.about.as_ref().unwrap().model, "tiny");
    assert_eq!(bucket.check(&kept).unwrap(), Some(ObjectSum { whole: 30, ..ObjectSum::default() }));
    let objects = files(directory.path());
    let mut objects = objects.iter().filter(|path| path.extension().is_none());
    // A byte of the data of one, the end of another, and all of a third.
    let [changed, cut, gone] = [objects.next(), objects.next(), objects.next()].map(|path| path.unwrap());
    let mut bytes = std::fs::read(changed).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(changed, &bytes).unwrap();
    std::fs::write(cut, &bytes[..bytes.len() / 2]).unwrap();
    std::fs::remove_file(gone).unwrap();
    assert_eq!(bucket.check(&kept).unwrap(), Some(ObjectSum { whole: 27, damaged: 2, gone: 0 }));
}

#[test]
fn what_nobody_has_described_is_listed_and_not_read() {
    let directory = tempfile::tempdir().unwrap();
    put_all(&store(directory.path(), 2, false), 0..4);
    let bucket = Bucket::open(&url(directory.path())).unwrap();
    let [kept] = bucket.look().unwrap().try_into().unwrap();
    assert_eq!((&kept.about, bucket.check(&kept).unwrap()), (&None, None));
}

#[test]
fn one_identity_is_removed_and_the_others_stay() {
    let directory = tempfile::tempdir().unwrap();
    for numerics in [2, 3] {
        put_all(&store(directory.path(), numerics, true), 0..4);
    }
    let bucket = Bucket::open(&url(directory.path())).unwrap();
    let [first, second] = bucket.look().unwrap().try_into().unwrap();
    bucket.remove(&first).unwrap();
    let [left] = bucket.look().unwrap().try_into().unwrap();
    assert_eq!((left.folder, left.blocks), (second.folder, 4));
    let left = files(directory.path());
    assert!(left.iter().all(|path| !path.to_string_lossy().contains(&first.folder)), "{left:?}");
}

#[test]
fn an_empty_object_store_has_nothing() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(Bucket::open(&url(directory.path())).unwrap().look().unwrap(), []);
    assert!(Bucket::open("ftp://x").unwrap_err().to_string().contains("s3://BUCKET/PREFIX"));
}
