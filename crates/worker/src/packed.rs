//! Packed weights on disk. The first worker packs them and keeps them in a file; others of this machine, and the next start, map that file.
//!
//! Files lie in `packed/` below the model cache: `NAME.packed`, where NAME follows from the model's files and the rank, and `NAME.partial`
//! while one is written, under a lock. What a file must have in it to be believed is `baton_kernels::PackedFile`'s. Besides, it must be
//! this user's, and nobody else may write to it. Whatever goes wrong, the worker packs its own weights, as it does without.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use baton_kernels::{CpuBackend, CpuOptions, HostPool, Packed, PackedError, PackedFile, PackedWriter};
use baton_model::{ModelError, pack};
use baton_model_files::{Model, fetch};
use baton_types::{PoolGeometry, hash_bytes};
use rustix::fs::{Advice, OFlags, fadvise};

use crate::WorkerConfig;
use crate::error::WorkerError;
use crate::plan::layout;

/// Less than this is packed about as soon as it is read.
const LEAST: u64 = 32 << 20;
/// Longest wait for another process that packs the same weights (I5).
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks whether it has done so.
const LOOK: Duration = Duration::from_millis(20);

/// Gives each rank's backend its packed weights, as far as there is room for them.
pub(crate) fn with_packed_weights(
    config: &WorkerConfig,
    model: &Model,
    backends: Vec<CpuBackend>,
) -> Result<Vec<CpuBackend>, WorkerError> {
    let (bytes, limit) = (model.tensors().iter().map(|tensor| tensor.bytes()).sum::<u64>(), config.packed_weights.0);
    let Some(identity) = model.identity().filter(|_| limit > 0 && bytes >= LEAST) else { return Ok(backends) };
    if bytes > limit {
        tracing::info!(bytes, limit, "packed weights are not kept: {}", Unfit::Large);
        return Ok(backends);
    }
    let from = &config.fetch;
    let source = fetch::Source::new(from.model_cache.clone(), None, None)?;
    let folder = Folder { path: source.cache().join("packed"), limit, patience: PATIENCE };
    let empty = PoolGeometry::uniform(layout(config, model)?, 0).of_ranks(config.kv.tp);
    let with_packed = |(rank, backend): (u32, CpuBackend)| {
        let identity = format!("{identity}, rank {rank} of {}", config.kv.tp);
        let through = |packed| {
            let pool = Arc::new(HostPool::in_memory(empty.clone())?);
            let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }, pool)?;
            Ok(pack(model, config.kv.tp, rank, backend.with_packed(packed))?.into_packed())
        };
        match folder.find_or_pack(&identity, &through) {
            Some(file) => {
                tracing::info!(shared = file.is_shared(), "packed weights are mapped");
                backend.with_packed(Packed::Found(file))
            }
            None => backend,
        }
    };
    Ok((0..).zip(backends).map(with_packed).collect())
}

/// Takes all matrices of a rank through a backend with these packed weights.
type Through<'a> = &'a dyn Fn(Packed) -> Result<Packed, ModelError>;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    File(#[from] PackedError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("it belongs to another user, or others may write to it")]
    Untrusted,
    #[error("another process has been packing them for {} s", PATIENCE.as_secs())]
    Busy,
    #[error("they take more than packed_weights")]
    Large,
}

/// Where packed weights lie.
struct Folder {
    path: PathBuf,
    /// Most bytes of all files together.
    limit: u64,
    patience: Duration,
}

impl Folder {
    /// The file of these weights. None: there is none, and none can be made; a line in the log says why.
    fn find_or_pack(&self, identity: &str, through: Through<'_>) -> Option<Arc<PackedFile>> {
        let path = self.path.join(format!("{:016x}.packed", hash_bytes(0, identity.as_bytes())));
        if let Some(file) = find(&path, identity, through) {
            return Some(file);
        }
        match self.pack(&path, identity, through) {
            Ok(file) => file,
            Err(why) => {
                tracing::info!(file = %path.display(), %why, "packed weights are not kept");
                None
            }
        }
    }

    /// Packs the weights into a file, unless another process does so meanwhile.
    fn pack(&self, path: &Path, identity: &str, through: Through<'_>) -> Result<Option<Arc<PackedFile>>, Unfit> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        let partial = path.with_extension("partial");
        let file = self.lock(&partial)?;
        // Whoever had the lock before has made it, unless it failed. What is wrong with an older one is told already.
        if let Ok(found) = examine(path, identity, through) {
            if is_at(&file, &partial) {
                std::fs::remove_file(&partial)?;
            }
            return Ok(Some(found));
        }
        let started = Instant::now();
        let written = write(&file, identity, through).and_then(|()| {
            if file.metadata()?.len() > self.limit {
                return Err(Unfit::Large);
            }
            Ok(std::fs::rename(&partial, path)?)
        });
        if let Err(why) = written {
            let _ = std::fs::remove_file(&partial);
            return Err(why);
        }
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(file = %path.display(), seconds, "packed the weights, and kept them");
        self.trim();
        // And its lock, which `find` waits for.
        drop(file);
        Ok(find(path, identity, through))
    }

    /// The file to write to, locked.
    fn lock(&self, partial: &Path) -> Result<File, Unfit> {
        let started = Instant::now();
        let mut told = false;
        loop {
            let file = open(partial, OpenOptions::new().write(true).create(true))?;
            match file.try_lock() {
                // Another process may have renamed or removed it before this one had the lock.
                Ok(()) if is_at(&file, partial) => return Ok(file),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
                Err(TryLockError::Error(e)) => return Err(e.into()),
            }
            if started.elapsed() > self.patience {
                return Err(Unfit::Busy);
            }
            if !told {
                tracing::info!(file = %partial.display(), "another process packs the weights; waiting for it");
                told = true;
            }
        }
    }

    /// Removes files that were not used for longest, until the rest is within the limit, and what a process that died has left.
    fn trim(&self) {
        let Ok(entries) = std::fs::read_dir(&self.path) else { return };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in entries.flatten() {
            let (path, Ok(facts)) = (entry.path(), entry.metadata()) else { continue };
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("packed") => files.push((facts.modified().unwrap_or(SystemTime::UNIX_EPOCH), facts.len(), path)),
                Some("partial") => remove_unless_locked(&path),
                _ => {}
            }
        }
        files.sort_by(|a, b| b.cmp(a));
        let mut kept = 0;
        for (_, bytes, path) in files {
            kept += bytes;
            if kept > self.limit {
                // A process that has it mapped keeps its memory.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// The weights in a file that is there and is to be believed.
fn find(path: &Path, identity: &str, through: Through<'_>) -> Option<Arc<PackedFile>> {
    match examine(path, identity, through) {
        Ok(file) => Some(file),
        Err(Unfit::Io(e)) if e.kind() == io::ErrorKind::NotFound => None,
        Err(why) => {
            tracing::warn!(file = %path.display(), %why, "a file of packed weights is not used; packing them anew");
            None
        }
    }
}

fn examine(path: &Path, identity: &str, through: Through<'_>) -> Result<Arc<PackedFile>, Unfit> {
    let file = open(path, &mut OpenOptions::new())?;
    // For `trim`: it is in use.
    let _ = file.set_modified(SystemTime::now());
    lock_to_read(&file);
    let mut packed = PackedFile::open(file.try_clone()?, identity)?;
    if (1..PackedFile::HUGE_PERCENT).contains(&packed.huge_percent()) && file.try_lock().is_ok() {
        // A part came in small pages, and nobody else has it mapped: when all is read anew, it comes in huge ones.
        drop(packed);
        fadvise(&file, 0, None, Advice::DontNeed).map_err(io::Error::from)?;
        packed = PackedFile::open(file.try_clone()?, identity)?;
    }
    // Without a lock it is used all the same.
    let _ = file.try_lock_shared();
    let packed = Arc::new(packed.settled().map_err(PackedError::from)?);
    through(Packed::Found(packed.clone()))?;
    Ok(packed)
}

/// Waits until nobody else reads a file for the first time: of several that do so together, the system makes small pages. Who has it mapped
/// shares a lock on it, and who is the first has that lock alone until all is read.
fn lock_to_read(file: &File) {
    let started = Instant::now();
    let busy = |lock| matches!(lock, Err(TryLockError::WouldBlock));
    while busy(file.try_lock()) && busy(file.try_lock_shared()) && started.elapsed() < PATIENCE {
        std::thread::sleep(LOOK);
    }
}

/// Opens a regular file that only this user may write to.
fn open(path: &Path, options: &mut OpenOptions) -> Result<File, Unfit> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.read(true).mode(0o600).custom_flags(flags.bits() as i32).open(path)?;
    let facts = file.metadata()?;
    let own = facts.uid() == rustix::process::geteuid().as_raw();
    if own && facts.is_file() && facts.mode() & 0o022 == 0 { Ok(file) } else { Err(Unfit::Untrusted) }
}

fn write(file: &File, identity: &str, through: Through<'_>) -> Result<(), Unfit> {
    file.set_len(0)?;
    let writer = PackedWriter::new(file.try_clone()?, identity);
    let Packed::Kept(writer) = through(Packed::Kept(writer))? else { return Ok(()) };
    Ok(writer.finish()?)
}

/// Whether the file has that name still.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |facts: io::Result<std::fs::Metadata>| facts.map(|facts| (facts.dev(), facts.ino())).ok();
    let own = place(file.metadata());
    own.is_some() && own == place(std::fs::symlink_metadata(path))
}

fn remove_unless_locked(path: &Path) {
    if File::open(path).is_ok_and(|file| file.try_lock().is_ok()) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests;
