//! The disk tier's file. Its segments lie one after the other, in a directory of its own.
//!
//! The file is named by the identity and the shape of the KV in it. Files of another identity or shape are removed when a store opens, so that
//! the space stays bounded. A segment's space is allocated when it is first written to.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use baton_kv_store::{ALIGNMENT, Buffer, DiskConfig, Head, Identity, Mismatch, Place, Shape};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::OpenError;
use crate::folder::{ABOUT, FileName};
use crate::lock::Lock;
use crate::memory::Memory;

/// What is at the beginning of each record of a segment.
pub type Heads = Vec<std::result::Result<Head, Mismatch>>;

/// How the names of files end.
pub(crate) const ENDING: &str = ".baton-kv";

/// A disk: the file, or a test's.
pub trait Disk: Send + Sync {
    /// Reads the head of each record of a segment; none if it was never written.
    fn scan(&self, segment: u32) -> Result<Heads>;
    /// Fills `record` from a place. Its address and length are multiples of [`baton_kv_store::ALIGNMENT`].
    fn read(&self, place: Place, record: &mut [u8]) -> Result<()>;
    /// Writes `record`, aligned in the same way, to a place.
    fn write(&self, place: Place, record: &[u8]) -> Result<()>;
    /// Brings what was written to safety.
    fn sync(&self) -> Result<()>;
}

/// Segments in a file, past the page cache where the file system allows it.
#[derive(Debug)]
pub struct Files {
    file: File,
    direct: bool,
    shape: Shape,
    size: DiskConfig,
    allocated: Vec<AtomicBool>,
    /// Locked as long as the store is open; none if it is only read.
    _lock: Option<Lock>,
}

impl Files {
    /// Opens the file in `directory`, which is made if it is not there. Removes files of another identity, shape or size of segments, and what
    /// is beyond the last segment.
    pub fn open(
        directory: &Path,
        identity: Identity,
        shape: &Shape,
        size: DiskConfig,
    ) -> std::result::Result<Files, OpenError> {
        let failed = |doing, path: &Path| {
            let path = path.to_owned();
            move |cause| OpenError::Directory { doing, path, cause }
        };
        std::fs::create_dir_all(directory).map_err(failed("make", directory))?;
        let lock = Lock::take(directory)?;
        let name = FileName { identity, stride: shape.stride() as u64, records: size.records }.to_string();
        let path = directory.join(&name);
        remove_others(directory, &name).map_err(failed("clear", directory))?;
        let (file, direct) = open(&path).map_err(failed("open", &path))?;
        let length = file.metadata().map_err(failed("look at", &path))?.len();
        let bytes = size.segment_bytes(shape);
        let wanted = u64::from(size.segments) * bytes;
        if length != wanted {
            file.set_len(wanted).map_err(failed("size", &path))?;
        }
        // What is there already may have holes; they cost a little when they are written to, no more.
        let there = |segment: u32| AtomicBool::new((u64::from(segment) + 1) * bytes <= length && length == wanted);
        let allocated = (0..size.segments).map(there).collect();
        Ok(Files { file, direct, shape: shape.clone(), size, allocated, _lock: Some(lock) })
    }

    /// Opens a file that is there, to read only. It takes no lock: a worker may write meanwhile.
    pub(crate) fn look(path: &Path, shape: &Shape, size: DiskConfig) -> Result<Files> {
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path);
        let (file, direct) = match file {
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => (File::open(path)?, false),
            file => (file?, true),
        };
        Ok(Files { file, direct, shape: shape.clone(), size, allocated: Vec::new(), _lock: None })
    }

    /// Whether the page cache is passed by.
    pub fn direct(&self) -> bool {
        self.direct
    }

    fn offset(&self, segment: u32, index: u32) -> Result<u64> {
        if segment >= self.size.segments || index >= self.size.records {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("record {index} of segment {segment} is beyond the end"),
            ));
        }
        Ok(u64::from(segment) * self.size.segment_bytes(&self.shape) + u64::from(index) * self.shape.stride() as u64)
    }

    fn allocate(&self, segment: u32) -> Result<()> {
        let Some(allocated) = self.allocated.get(segment as usize).filter(|done| !done.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let (offset, bytes) = (self.offset(segment, 0)?, self.size.segment_bytes(&self.shape));
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => allocated.store(true, Ordering::Relaxed),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Disk for Files {
    fn scan(&self, segment: u32) -> Result<Heads> {
        let length = self.shape.head_bytes();
        let buffer = Memory::new(1, length).map_err(|error| Error::new(ErrorKind::OutOfMemory, error.to_string()))?;
        // SAFETY: nobody else knows this memory.
        let head = unsafe { buffer.write(Buffer(0), 0, length) };
        (0..self.size.records)
            .map(|index| {
                self.file.read_exact_at(head, self.offset(segment, index)?)?;
                Ok(Head::parse(&self.shape, head))
            })
            .collect()
    }

    fn read(&self, place: Place, record: &mut [u8]) -> Result<()> {
        debug_assert!(record.as_ptr().addr().is_multiple_of(ALIGNMENT));
        self.file.read_exact_at(record, self.offset(place.segment, place.index)?)
    }

    fn write(&self, place: Place, record: &[u8]) -> Result<()> {
        debug_assert!(record.as_ptr().addr().is_multiple_of(ALIGNMENT));
        self.allocate(place.segment)?;
        self.file.write_all_at(record, self.offset(place.segment, place.index)?)
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data()
    }
}

pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options
}

/// Opens a file for direct I/O, or for buffered I/O where the file system refuses that.
fn open(path: &Path) -> Result<(File, bool)> {
    match options().custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            tracing::info!(path = %path.display(), "the file system has no direct I/O; the KV store uses the page cache");
            Ok((options().open(path)?, false))
        }
        Err(error) => Err(error),
    }
}

/// Removes files that other settings have left.
fn remove_others(directory: &Path, ours: &str) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path: PathBuf = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let kept = name.strip_suffix(ABOUT).unwrap_or(name);
        if kept.ends_with(ENDING) && kept != ours {
            tracing::info!(path = %path.display(), "removing KV of another model, layout or size");
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}
