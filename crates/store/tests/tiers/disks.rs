//! Disks that fail, are slow, or do not answer.

use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use baton_kv_store::{Miss, Place, StoreConfig, StoreLimits, Tier};
use baton_store::{Disk, Files, Got, KvStore};

use crate::common::{LONG, config, get, key_of, on_disk, put, put_all};

/// Real files, and what is wrong with them.
#[derive(Default)]
struct Faults {
    /// What a read, and a write, come to; 0: all is well.
    reads: AtomicU32,
    writes: AtomicU32,
    delay_ms: AtomicU32,
    stuck: Mutex<bool>,
    freed: Condvar,
}

struct Faulty {
    files: Files,
    faults: Arc<Faults>,
}

impl Faults {
    fn go(&self, error: &AtomicU32) -> Result<()> {
        std::thread::sleep(Duration::from_millis(self.delay_ms.load(SeqCst).into()));
        drop(self.freed.wait_while(self.stuck.lock().unwrap(), |stuck| *stuck).unwrap());
        match error.load(SeqCst) {
            0 => Ok(()),
            error => Err(Error::from_raw_os_error(error as i32)),
        }
    }

    fn unstick(&self) {
        *self.stuck.lock().unwrap() = false;
        self.freed.notify_all();
    }
}

impl Disk for Faulty {
    fn scan(&self, segment: u32) -> Result<Vec<std::result::Result<baton_kv_store::Head, baton_kv_store::Mismatch>>> {
        self.files.scan(segment)
    }

    fn read(&self, place: Place, record: &mut [u8]) -> Result<()> {
        self.faults.go(&self.faults.reads)?;
        self.files.read(place, record)
    }

    fn write(&self, place: Place, record: &[u8]) -> Result<()> {
        self.faults.go(&self.faults.writes)?;
        self.files.write(place, record)
    }

    fn sync(&self) -> Result<()> {
        self.files.sync()
    }
}

fn open(directory: &Path, config: StoreConfig) -> (KvStore, Arc<Faults>) {
    let files = Files::open(directory, config.identity, &config.shape, config.disk.unwrap()).unwrap();
    let faults = Arc::new(Faults::default());
    let disk = Box::new(Faulty { files, faults: faults.clone() });
    let store = KvStore::over(Some(disk), None, config, 4, None).unwrap();
    assert!(store.settled(LONG));
    (store, faults)
}

const EIO: u32 = 5;
const EACCES: u32 = 13;
const ENOSPC: u32 = 28;
const EROFS: u32 = 30;

#[test]
fn a_disk_that_is_full_read_only_or_forbidden_costs_no_put() {
    for error in [ENOSPC, EROFS, EACCES, EIO] {
        let directory = tempfile::tempdir().unwrap();
        let (store, faults) = open(directory.path(), config(16));
        put_all(&store, 0..40);
        let there = on_disk(&store, 0..40);
        faults.writes.store(error, SeqCst);
        for number in 100..160 {
            assert_eq!(put(&store, number), Ok(()), "error {error}");
            assert_eq!(get(&store, number), Ok(Tier::Host));
        }
        assert!(store.settled(LONG));
        assert_eq!(get(&store, there[0]), Ok(Tier::Disk), "reads go on");
        let counters = store.counters();
        assert!((1..=8).contains(&counters.disk_errors), "{}", counters.disk_errors);
        store.check().unwrap();
    }
}

#[test]
fn a_disk_that_cannot_be_read_is_a_miss_each_time() {
    let directory = tempfile::tempdir().unwrap();
    let (store, faults) = open(directory.path(), config(16));
    put_all(&store, 0..40);
    let there = on_disk(&store, 0..40);
    faults.reads.store(EIO, SeqCst);
    for number in &there {
        assert_eq!(get(&store, *number), Err(Miss::Failed));
    }
    assert_eq!(store.counters().disk_errors, there.len() as u64);
    faults.reads.store(0, SeqCst);
    put_all(&store, there.iter().copied());
    assert!(get(&store, there[0]).is_ok());
}

/// Half a second for each read and write: who has no patience goes on, and host memory is as fast as ever.
#[test]
fn a_slow_disk_holds_nobody_up() {
    let directory = tempfile::tempdir().unwrap();
    let (store, faults) = open(directory.path(), config(16));
    put_all(&store, 0..40);
    let there = on_disk(&store, 0..40);
    faults.delay_ms.store(500, SeqCst);
    let begun = Instant::now();
    let Got::Pending(mut pending) = store.get(key_of(there[0])) else { panic!("it is on disk") };
    assert!(pending.take().is_none() && pending.wait(Duration::from_millis(10)).is_none());
    for number in 100..130 {
        put(&store, number).unwrap();
        assert_eq!(get(&store, number), Ok(Tier::Host));
    }
    assert!(begun.elapsed() < Duration::from_millis(400), "{:?} for what needs no disk", begun.elapsed());
    assert!(matches!(pending.wait(LONG), Some(Ok(_))));
    assert!(begun.elapsed() >= Duration::from_millis(500));
    // Who gives up costs nothing.
    faults.delay_ms.store(5, SeqCst);
    if let Got::Pending(pending) = store.get(key_of(there[1])) {
        drop(pending);
    }
    assert!(store.settled(LONG));
    store.check().unwrap();
}

#[test]
fn a_disk_that_does_not_answer_ends_in_misses_and_the_store_can_be_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let limits = StoreLimits { reads: 3, ..StoreLimits::default() };
    let (store, faults) = open(directory.path(), StoreConfig { limits, ..config(16) });
    put_all(&store, 0..40);
    let there = on_disk(&store, 0..40);
    *faults.stuck.lock().unwrap() = true;
    let got: Vec<Got> = there[..5].iter().map(|number| store.get(key_of(*number))).collect();
    assert_eq!(got.iter().filter(|got| matches!(got, Got::Pending(_))).count(), 3);
    assert_eq!(got.iter().filter(|got| matches!(got, Got::Missed(Miss::Busy))).count(), 2);
    for number in 100..150 {
        put(&store, number).unwrap();
    }
    drop(got);
    store.check().unwrap();
    let begun = Instant::now();
    drop(store);
    assert!(begun.elapsed() < Duration::from_secs(4));
    faults.unstick();
}

#[test]
fn errors_without_a_number_are_errors_too() {
    struct Gone;
    impl Disk for Gone {
        fn scan(&self, _: u32) -> Result<Vec<std::result::Result<baton_kv_store::Head, baton_kv_store::Mismatch>>> {
            Err(ErrorKind::NotFound.into())
        }
        fn read(&self, _: Place, _: &mut [u8]) -> Result<()> {
            Err(ErrorKind::UnexpectedEof.into())
        }
        fn write(&self, _: Place, _: &[u8]) -> Result<()> {
            Err(ErrorKind::WriteZero.into())
        }
        fn sync(&self) -> Result<()> {
            Err(ErrorKind::NotFound.into())
        }
    }
    let store = KvStore::over(Some(Box::new(Gone)), None, config(16), 2, None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..40);
    assert_eq!(store.counters().disk_errors, 16 + 1, "a scan of each segment, and one write before they rest");
}

/// A file system of its own, unmounted at the end.
pub struct Mounted(pub tempfile::TempDir);

impl Mounted {
    pub fn new(kind: &str, options: &str) -> Option<Mounted> {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", kind, "-o", options, "none"]).arg(directory.path());
        mount.status().is_ok_and(|status| status.success()).then_some(Mounted(directory))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg("--lazy").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

/// Not a fault that is played: the file system has room for half of what the store may use.
#[test]
fn a_file_system_that_is_full_costs_no_put() {
    let Some(mounted) = Mounted::new("tmpfs", "size=500k") else {
        return baton_types::testing::left_out("mounting a file system takes root");
    };
    let config = config(16);
    let files = Files::open(mounted.0.path(), config.identity, &config.shape, config.disk.unwrap()).unwrap();
    let store = KvStore::over(Some(Box::new(files)), None, config, 4, None).unwrap();
    assert!(store.settled(LONG));
    put_all(&store, 0..100);
    let there = on_disk(&store, 0..100);
    assert!(there.len() > 10 && there.len() < 64, "{} blocks of 8 KiB on disk", there.len());
    assert!(store.counters().disk_errors > 0);
    for number in there {
        assert_eq!(get(&store, number), Ok(Tier::Disk));
    }
    store.check().unwrap();
    drop(store);
}

/// ramfs has neither direct I/O nor a way to allocate space.
#[test]
fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    let Some(mounted) = Mounted::new("ramfs", "mode=700") else {
        return baton_types::testing::left_out("mounting a file system takes root");
    };
    for _ in 0..2 {
        let config = config(16);
        let files = Files::open(mounted.0.path(), config.identity, &config.shape, config.disk.unwrap()).unwrap();
        assert!(!files.direct());
        let store = KvStore::over(Some(Box::new(files)), None, config, 4, None).unwrap();
        assert!(store.settled(LONG));
        put_all(&store, 0..60);
        let there = on_disk(&store, 0..60);
        assert!(there.len() > 30);
        assert_eq!(get(&store, there[0]), Ok(Tier::Disk));
        assert_eq!(store.counters().disk_errors, 0);
    }
}
