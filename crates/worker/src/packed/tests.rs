use std::cell::Cell;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_kernels::{Backend, WeightSource};
use baton_types::testing::left_out;
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, WeightDtype};

use super::*;

fn folder(path: &Path) -> Folder {
    Folder { path: path.join("packed"), limit: 1 << 20, patience: Duration::from_secs(60) }
}

/// A model of one matrix.
fn backend(packed: Packed) -> Result<Packed, ModelError> {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout =
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let pool = Arc::new(HostPool::in_memory(PoolGeometry::uniform(layout, 0))?);
    let mut backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }, pool)?.with_packed(packed);
    let data: Vec<u8> = (0..64 * 256 * 2).map(|i: u32| (i * i / 7) as u8).collect();
    let (dtype, data) = (WeightDtype::Bf16, data[..].into());
    backend.weight(&WeightSource { name: "w", dtype, rows: 64, cols: 256, data, row_order: None })?;
    Ok(backend.into_packed())
}

/// How often weights were packed.
#[derive(Default)]
struct Count(Cell<usize>);

impl Count {
    fn find(&self, folder: &Folder, identity: &str) -> Option<Arc<PackedFile>> {
        folder.find_or_pack(identity, &|packed| {
            self.0.set(self.0.get() + usize::from(matches!(packed, Packed::Kept(_))));
            backend(packed)
        })
    }
}

/// The only file there.
fn only(folder: &Folder) -> PathBuf {
    let names: Vec<_> = std::fs::read_dir(&folder.path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(names.len() == 1 && names[0].extension().unwrap() == "packed", "{names:?}");
    names[0].clone()
}

#[test]
fn weights_are_packed_once_and_then_found() {
    let (tmp, packed) = (tempfile::tempdir().unwrap(), Count::default());
    let folder = folder(tmp.path());
    for _ in 0..3 {
        assert!(packed.find(&folder, "a").is_some());
        assert_eq!(packed.0.get(), 1);
    }
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&folder.path), mode(&only(&folder))), (0o700, 0o600));
    assert!(packed.find(&folder, "b").is_some());
    assert_eq!(packed.0.get(), 2, "of another model");
}

#[test]
fn a_file_that_is_not_to_be_believed_is_replaced() {
    let tmp = tempfile::tempdir().unwrap();
    let folder = folder(tmp.path());
    let spoilt = |what: &str, spoil: &dyn Fn(&Path)| {
        let packed = Count::default();
        assert!(packed.find(&folder, "a").is_some());
        let path = only(&folder);
        let whole = std::fs::read(&path).unwrap();
        spoil(&path);
        packed.0.set(0);
        assert!(packed.find(&folder, "a").is_some());
        assert_eq!(packed.0.get(), 1, "{what} is not noticed");
        assert!(std::fs::read(only(&folder)).unwrap() == whole, "{what}");
        assert!(packed.find(&folder, "a").is_some() && packed.0.get() == 1, "{what}");
    };
    spoilt("nothing", &|path| std::fs::remove_file(path).unwrap());
    spoilt("damage", &|path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[1000] ^= 4;
        std::fs::write(path, bytes).unwrap();
    });
    spoilt("an end that is missing", &|path| File::options().write(true).open(path).unwrap().set_len(4096).unwrap());
    spoilt("that others may write", &|path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o662)).unwrap());
    spoilt("a link", &|path| {
        let elsewhere = tmp.path().join("elsewhere");
        std::fs::rename(path, &elsewhere).unwrap();
        symlink(&elsewhere, path).unwrap();
    });
    spoilt("another model's", &|path| {
        let other = Count::default();
        assert!(other.find(&folder, "b").is_some());
        let all: Vec<_> = std::fs::read_dir(&folder.path).unwrap().map(|entry| entry.unwrap().path()).collect();
        let others = all.iter().find(|other| *other != path).unwrap();
        std::fs::rename(others, path).unwrap();
    });
    match rustix::process::geteuid().is_root() {
        true => spoilt("another user's", &|path| std::os::unix::fs::chown(path, Some(1), None).unwrap()),
        false => left_out(format_args!("a file of another user: only root can make one")),
    }
}

#[test]
fn where_nothing_can_be_kept_each_packs_its_own() {
    let (tmp, packed) = (tempfile::tempdir().unwrap(), Count::default());
    // Not even root makes a folder below a file.
    std::fs::write(tmp.path().join("packed"), "").unwrap();
    assert!(packed.find(&folder(tmp.path()), "a").is_none());
    std::fs::remove_file(tmp.path().join("packed")).unwrap();
    let small = Folder { limit: 1000, ..folder(tmp.path()) };
    assert!(packed.find(&small, "a").is_none());
    let full = small.find_or_pack("a", &|_| {
        Err(ModelError::from(baton_kernels::KernelError::Keep(io::ErrorKind::StorageFull.into())))
    });
    assert!(full.is_none());
    assert_eq!(std::fs::read_dir(&small.path).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn of_several_at_once_one_packs_and_the_others_wait() {
    let (tmp, count) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let folder = folder(tmp.path());
    let find = || {
        folder.find_or_pack("a", &|packed| {
            if matches!(packed, Packed::Kept(_)) {
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(200));
            }
            backend(packed)
        })
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(find)).collect();
        assert!(all.into_iter().all(|one| one.join().unwrap().is_some()));
    });
    assert_eq!(count.into_inner(), 1);
    only(&folder);
}

#[test]
fn one_that_packs_for_too_long_is_not_waited_for_and_one_that_died_neither() {
    let (tmp, packed) = (tempfile::tempdir().unwrap(), Count::default());
    let folder = Folder { patience: Duration::from_millis(50), ..folder(tmp.path()) };
    assert!(packed.find(&folder, "a").is_some());
    let partial = only(&folder).with_extension("partial");
    std::fs::rename(only(&folder), &partial).unwrap();
    let other = File::open(&partial).unwrap();
    other.lock().unwrap();
    assert!(packed.find(&folder, "a").is_none());
    drop(other);
    assert!(packed.find(&folder, "a").is_some());
    assert_eq!(packed.0.get(), 2);
    only(&folder);
}

#[test]
fn files_that_were_not_used_for_longest_make_room() {
    let (tmp, packed) = (tempfile::tempdir().unwrap(), Count::default());
    let folder = Folder { limit: 70_000, ..folder(tmp.path()) };
    for identity in ["a", "b", "a", "c"] {
        assert!(packed.find(&folder, identity).is_some());
        // Apart in the file system's time.
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(packed.0.get(), 3);
    assert_eq!(std::fs::read_dir(&folder.path).unwrap().count(), 2);
    assert!(packed.find(&folder, "a").is_some() && packed.0.get() == 3, "used after b");
    assert!(packed.find(&folder, "b").is_some() && packed.0.get() == 4, "made room");
}
