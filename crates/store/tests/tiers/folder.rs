//! What tools find in a directory, and what they may change.

use std::os::unix::fs::FileExt;

use baton_kv_store::testing::shape;
use baton_kv_store::{Identity, StoreConfig};
use baton_store::{About, Folder, KvStore, Looked, OpenError, Settings};
use baton_types::{Courtesy, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION};

use crate::common::{LONG, config, key_of, put_all};

/// The layout of the tests' shape.
fn layout() -> KvLayout {
    let group = |layers: Vec<u32>| KvGroup { layers, planes: 2, kv_heads: 1, head_dim: 16, window: None, sinks: 0 };
    let groups = vec![group(vec![0, 2]), group(vec![1])];
    KvLayout { version: PROTOCOL_VERSION, model: 1, dtype: KvDtype::F16, block_size: 4, groups }
}

pub fn settings(directory: &std::path::Path) -> Settings {
    let identity = Identity { layout: layout().fingerprint(), numerics: 2 };
    let config = StoreConfig { identity, ..config(16) };
    let about = Some(About { model: "tiny".into(), backend: "cpu".into(), tp: 1, layout: layout() });
    Settings {
        config,
        directory: directory.to_owned(),
        objects: None,
        threads: 2,
        courtesy: Courtesy::default(),
        about,
    }
}

fn sums(looked: &Looked) -> (u64, u64, u64) {
    let sum = |of: fn(&baton_store::SegmentSum) -> u64| looked.segments.iter().map(of).sum();
    (sum(|s| s.live), sum(|s| s.torn), sum(|s| s.damaged))
}

/// What a directory has in it.
fn names(directory: &std::path::Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_directory_says_what_is_in_it_and_what_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let store = KvStore::open(settings(directory.path()), None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..30);
    assert!(store.flush(LONG));
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    assert_eq!(folder.in_use().unwrap(), Some(Some(std::process::id())));
    // The other process is named, whoever asks.
    let refused = folder.alone(|_| Ok(())).unwrap_err();
    assert!(matches!(refused, OpenError::InUse { process: Some(id), .. } if id == std::process::id()), "{refused}");
    assert!(refused.to_string().contains(&std::process::id().to_string()), "{refused}");
    drop(store);
    assert_eq!(folder.in_use().unwrap(), None);
    let file = &folder.files[0];
    assert_eq!(file.about.as_ref().unwrap().model, "tiny");
    assert_eq!(sums(&file.look(true).unwrap().unwrap()), (30, 0, 0));
    // A byte of the data of the first record: heads do not show it.
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(&file.path).unwrap();
    let mut byte = [0];
    opened.read_exact_at(&mut byte, shape().head_bytes() as u64).unwrap();
    opened.write_all_at(&[byte[0] ^ 1], shape().head_bytes() as u64).unwrap();
    assert_eq!(sums(&file.look(false).unwrap().unwrap()), (30, 0, 0));
    assert_eq!(sums(&file.look(true).unwrap().unwrap()), (29, 0, 1));
}

#[test]
fn a_segment_that_is_punched_is_blank_and_the_rest_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let store = KvStore::open(settings(directory.path()), None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..24);
    assert!(store.flush(LONG));
    drop(store);
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    let file = &folder.files[0];
    let before = file.look(true).unwrap().unwrap();
    let first = before.segments[0];
    folder.alone(|folder| folder.punch(file, first.segment)).unwrap();
    let after = file.look(true).unwrap().unwrap();
    assert_eq!(after.segments, before.segments[1..], "nothing else has changed");
    let store = KvStore::open(settings(directory.path()), None).unwrap();
    assert!(store.settled(LONG));
    let found = (0..24).filter(|number| store.held(&[key_of(*number).name]).len() == 1).count() as u64;
    assert_eq!(found, 24 - first.live);
    drop(store);
    folder.alone(|folder| folder.remove(file)).unwrap();
    assert!(Folder::find(directory.path()).unwrap().is_empty());
    assert_eq!(names(directory.path()), ["lock"], "the description goes with it");
}

/// A description helps people. Where it cannot be written, the store works without.
#[test]
fn a_store_opens_without_its_description() {
    let directory = tempfile::tempdir().unwrap();
    drop(KvStore::open(settings(directory.path()), None).unwrap());
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    let about = format!("{}.json", folder.files[0].path.display());
    std::fs::remove_file(&about).unwrap();
    std::fs::create_dir(&about).unwrap();
    let store = KvStore::open(settings(directory.path()), None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..4);
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    assert!(folder.files[0].look(true).unwrap().is_none(), "what it is of is not known");
}

/// A file of another identity goes when a store opens, and its description with it.
#[test]
fn descriptions_are_of_the_file_that_is_there() {
    let directory = tempfile::tempdir().unwrap();
    drop(KvStore::open(settings(directory.path()), None).unwrap());
    let other = Settings {
        config: StoreConfig {
            identity: Identity { numerics: 3, ..settings(directory.path()).config.identity },
            ..config(16)
        },
        ..settings(directory.path())
    };
    drop(KvStore::open(other, None).unwrap());
    let there = names(directory.path());
    assert_eq!(there.len(), 3, "{there:?}");
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    let file = &folder.files[0];
    assert_eq!(file.name.identity.numerics, 3);
    assert!(file.about.is_some());
    // One of another layout, whose records are as long.
    let about = About { layout: KvLayout { model: 2, ..layout() }, ..file.about.clone().unwrap() };
    std::fs::write(format!("{}.json", file.path.display()), serde_json::to_string(&about).unwrap()).unwrap();
    let [folder] = Folder::find(directory.path()).unwrap().try_into().unwrap();
    assert!(folder.files[0].about.is_none(), "it says nothing of this file");
}
