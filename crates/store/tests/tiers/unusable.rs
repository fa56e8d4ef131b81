//! Disks that cannot be opened: the store goes on without, and says so.

use std::fmt::{Debug, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use baton_kv_store::{DiskConfig, ObjectConfig, StoreConfig, Tier};
use baton_store::{KvStore, Objects, OpenError, Settings};
use baton_types::Courtesy;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{LONG, config, get, open, put_all};
use crate::disks::Mounted;
use crate::faulty::Faulty;

/// The warnings of a thread, a line each.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        if *event.metadata().level() == Level::WARN {
            self.0.lock().unwrap().push(line.0);
        }
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn settings(directory: &Path, config: StoreConfig, objects: Option<Objects>) -> Settings {
    Settings {
        config,
        directory: directory.to_owned(),
        objects,
        threads: 2,
        courtesy: Courtesy::default(),
        about: None,
    }
}

/// A store with an object store that is opened over a disk that cannot be used has what the others have, and one warning was logged.
fn goes_on(directory: &Path, error: &str) {
    let (faulty, warnings) = (Faulty::default(), Warnings::default());
    let objects = Objects::over(Arc::new(faulty), object_store::path::Path::default());
    let config = StoreConfig { object: Some(ObjectConfig { most: 1000 }), ..config(8) };
    let settings = settings(directory, config, Some(objects));
    let store = tracing::subscriber::with_default(warnings.clone(), || KvStore::open(settings, None)).unwrap();
    assert!(store.settled(LONG));
    let warnings = warnings.0.lock().unwrap().clone();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    for part in [directory.to_str().unwrap(), error, "goes on without it"] {
        assert!(warning.contains(part), "{warning}");
    }
    let [host, disk, object] = store.limit_bytes();
    assert!(host > 0 && disk == 0 && object > 0, "the disk is no tier");
    put_all(&store, 0..40);
    assert_eq!((get(&store, 39), get(&store, 0)), (Ok(Tier::Host), Ok(Tier::Object)));
    assert_eq!((store.blocks(Tier::Disk), store.counters().disk_errors), (0, 0));
    store.check().unwrap();
}

#[test]
fn a_directory_that_cannot_be_made_costs_the_disk_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    goes_on(&file.join("store"), "Not a directory");
}

/// As the kernel leaves a disk on which it has found errors. What is on it is there when it may be written to again.
#[test]
fn a_disk_that_was_made_read_only_costs_the_disk_only_and_nothing_on_it_is_lost() {
    let Some(mounted) = Mounted::new("tmpfs", "size=4m") else {
        return baton_types::testing::left_out("mounting a file system takes root");
    };
    let remount = |how: &str| {
        let status = Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(mounted.0.path()).status();
        assert!(status.unwrap().success());
    };
    let store = open(mounted.0.path(), config(16));
    put_all(&store, 0..40);
    assert!(store.flush(LONG));
    drop(store);
    remount("ro");
    goes_on(mounted.0.path(), "Read-only file system");
    remount("rw");
    let store = open(mounted.0.path(), config(16));
    assert_eq!((store.counters().recovered, get(&store, 7)), (40, Ok(Tier::Disk)));
}

/// Whatever the state of the disk: only what the file system refuses is gone on without.
#[test]
fn settings_that_cannot_work_are_refused_whether_or_not_the_disk_can_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let disk = |segments, records| StoreConfig { disk: Some(DiskConfig { segments, records }), ..config(8) };
    for directory in [directory.path().join("there"), file.join("store")] {
        for (wrong, field) in
            [(config(3), "buffers"), (disk(7, 8), "disk segments"), (disk(8, 0), "records of a segment")]
        {
            let refused = KvStore::open(settings(&directory, wrong, None), None).err().unwrap();
            assert!(matches!(refused, OpenError::Settings(_)) && refused.to_string().contains(field), "{refused}");
        }
    }
}
