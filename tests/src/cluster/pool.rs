//! A worker's KV pool, from outside: the memory file that its process holds.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use anyhow::Context;
use baton_types::{BlockId, PoolGeometry};

use super::{Worker, wait};

/// Bytes of a KV pool, while its worker reads and writes them too.
#[derive(Debug)]
pub struct Pool(File);

impl Pool {
    /// The pool of a worker on this machine.
    pub fn of(worker: &Worker) -> anyhow::Result<Pool> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", worker.pid))?.flatten().map(|fd| fd.path());
        let is_pool =
            |fd: &PathBuf| std::fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:baton-kv"));
        let path = fds.into_iter().find(is_pool).context("a memory file of the pool")?;
        Ok(Pool(OpenOptions::new().read(true).write(true).open(path)?))
    }

    /// All of it, as it is now.
    pub fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; self.0.metadata()?.len() as usize];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Waits until a byte is not as `before`; answers where.
    pub fn until_changed(&self, before: &[u8]) -> anyhow::Result<usize> {
        // Piece by piece, so that a worker that stands still meanwhile does not seem to be gone.
        const PIECE: usize = 4096;
        let changed = || {
            let now = self.bytes().ok()?;
            let piece = now.chunks(PIECE).zip(before.chunks(PIECE)).position(|(now, before)| now != before)?;
            (piece * PIECE..now.len()).find(|&at| now[at] != before[at])
        };
        wait(changed).context("no KV arrives")
    }

    /// Bytes of the pages that were written to.
    pub fn written(&self) -> anyhow::Result<u64> {
        Ok(self.0.metadata()?.blocks() * 512)
    }

    /// A place that is written to, not at the end of a layer.
    pub fn used(&self) -> anyhow::Result<usize> {
        let bytes = self.bytes()?;
        let used: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        used.get(used.len() / 3).copied().context("nothing is written")
    }

    /// Flips a bit.
    pub fn flip(&self, at: usize) -> anyhow::Result<()> {
        let mut byte = [0];
        self.0.read_exact_at(&mut byte, at as u64)?;
        Ok(self.0.write_all_at(&[byte[0] ^ 4], at as u64)?)
    }
}

/// Blocks of the first layer group that differ, in any layer.
pub fn changed_blocks(geometry: &PoolGeometry, before: &[u8], after: &[u8]) -> BTreeSet<BlockId> {
    let layers = geometry.layout.groups[0].layers.len();
    let differs = |block: &BlockId| {
        let mut ranges = (0..layers).map(|layer| geometry.block_range(0, layer, *block));
        ranges.any(|range| before[range.clone()] != after[range])
    };
    (0..geometry.blocks[0]).map(BlockId).filter(differs).collect()
}
