//! Packed weights in a file, so that workers of one machine share them and the next start need not pack.
//!
//! | part | what it is |
//! | --- | --- |
//! | data | packed matrices, each from a cache line's start on |
//! | table | text: a line that says of what this is the file, then a line for each matrix |
//! | tail | where the table begins, and the digest of all bytes before the digest: 8 bytes each |
//!
//! Wrong weights would give wrong answers without a sign of it. So a file is read only if its digest is right and its first line is the
//! wanted one. And of each matrix two panels are packed anew and compared: a file of another model, or of another way of packing, fails.
//! Where the file lies, and who may write to it, is the caller's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use baton_types::digest_block;

use super::packing::{Form, LAYOUT};
use super::simd::LANES;
use super::weight::{pack_panels, panel_bytes};
use crate::pages::{Fixed, LINE, Region, copy};
use crate::{KernelError, WeightSource};

/// Bytes that are written together. The page cache keeps what comes in whole huge pages in such, where the file system can.
const CHUNK: usize = 8 << 20;
/// Bytes of the tail.
const TAIL: usize = 16;

/// Why a file of packed weights is not read.
#[derive(Debug, thiserror::Error)]
pub enum PackedError {
    /// The system gave an error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It cannot be mapped.
    #[error(transparent)]
    Memory(#[from] KernelError),
    /// It is not what was written.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// It is whole, but of something else.
    #[error("it is of something else: {0:?}")]
    Foreign(String),
}

/// The first line of a table.
fn title(identity: &str) -> String {
    format!("packed weights, layout {LAYOUT}, of {identity}")
}

/// What a matrix is called in a table.
fn entry(form: Form, source: &WeightSource<'_>) -> String {
    format!("{form:?} {} {} {}", source.rows, source.cols, source.name)
}

/// Writes a file of packed weights.
pub struct PackedWriter {
    out: File,
    chunk: Vec<u8>,
    /// Bytes before the chunk.
    written: usize,
    digest: u64,
    table: String,
}

impl PackedWriter {
    /// Into an empty file. `identity` is one line: it names all on which the packed bytes depend, but for the way of packing.
    pub fn new(out: File, identity: &str) -> PackedWriter {
        let table = format!("{}\n", title(identity));
        PackedWriter { out, chunk: Vec::with_capacity(CHUNK), written: 0, digest: 0, table }
    }

    pub(super) fn add(&mut self, form: Form, source: &WeightSource<'_>, packed: &[u8]) -> io::Result<()> {
        let start = self.written + self.chunk.len();
        self.table += &format!("{start} {} {}\n", packed.len(), entry(form, source));
        self.append(packed)?;
        let end = start + packed.len();
        self.append(&[0; LINE][..end.next_multiple_of(LINE) - end])
    }

    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            bytes = later;
            if self.chunk.len() == CHUNK {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.digest = self.digest.wrapping_add(digest_block(&self.chunk, (self.written / 8) as u64));
        self.out.write_all(&self.chunk)?;
        self.written += self.chunk.len();
        self.chunk.clear();
        Ok(())
    }

    /// Writes the rest, and waits until the disk has all.
    pub fn finish(mut self) -> io::Result<()> {
        let start = self.written + self.chunk.len();
        let table = std::mem::take(&mut self.table).into_bytes();
        self.append(&table)?;
        // Whole lanes of the digest.
        self.append(&b"\n\n\n\n\n\n\n\n"[..table.len().next_multiple_of(8) - table.len()])?;
        self.append(&(start as u64).to_le_bytes())?;
        self.flush()?;
        self.out.write_all(&self.digest.to_le_bytes())?;
        self.out.sync_all()
    }
}

/// A file of packed weights, mapped. It must not be changed while it is open: who replaces it renames another one over it.
pub struct PackedFile {
    region: Arc<Region>,
    /// What [`entry`] says, and where it lies.
    matrices: BTreeMap<String, Range<usize>>,
    huge_percent: usize,
    /// With the lock that its opener has on it. None: the region is a copy.
    file: Option<File>,
}

impl PackedFile {
    /// Least share of a file in huge pages, in percent, with which decode is as fast as from memory of one's own.
    pub const HUGE_PERCENT: usize = 95;

    /// Maps a file and reads all of it once.
    ///
    /// # Errors
    /// It is not whole, or it is not the file of `identity`.
    pub fn open(file: File, identity: &str) -> Result<PackedFile, PackedError> {
        let len = file.metadata()?.len() as usize;
        if len < TAIL || !len.is_multiple_of(8) {
            return Err(PackedError::Damaged("its size"));
        }
        let region = Arc::new(Region::of_file(&file, len)?);
        let all = Fixed::whole(&region);
        let (start, matrices) = read(&all, identity)?;
        let huge_percent = region.huge_bytes() * 100 / start.max(1);
        Ok(PackedFile { region, matrices, huge_percent, file: Some(file) })
    }

    /// How much of it the system has mapped in huge pages.
    pub fn huge_percent(&self) -> usize {
        self.huge_percent
    }

    /// Ready for decode: in huge pages, shared with others who open the file where the system has it in such, else in a copy. Shared pages stay
    /// in memory, as a copy does, if this user may ask for that.
    pub fn settled(self) -> Result<PackedFile, KernelError> {
        if self.huge_percent >= Self::HUGE_PERCENT {
            self.region.lock();
            return Ok(self);
        }
        let all = Fixed::whole(&self.region);
        Ok(PackedFile { region: copy(&all)?, file: None, ..self })
    }

    /// Whether its memory is shared with others who open the file.
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    /// The bytes of a matrix, after a look whether packing it now begins to give the same.
    pub(super) fn take(&self, form: Form, source: &WeightSource<'_>) -> Result<Fixed, KernelError> {
        let stale = |why: &str| KernelError::Packed { name: source.name.to_owned(), why: why.to_owned() };
        let range = self.matrices.get(&entry(form, source)).ok_or_else(|| stale("it is not in the file"))?;
        let bytes = Fixed::new(&self.region, range.clone()).ok_or_else(|| stale("it is beyond the file"))?;
        let panel = panel_bytes(form, source.cols);
        let panels = source.rows.div_ceil(LANES);
        if bytes.len() != panels * panel {
            return Err(stale("its size is another"));
        }
        let mut fresh = vec![0; panel];
        for at in [panels / 2, panels.saturating_sub(1)] {
            if panel > 0 && at < panels {
                fresh.fill(0);
                pack_panels(source, form, at, &mut fresh)?;
                if bytes[at * panel..][..panel] != fresh {
                    return Err(stale("packing it now gives other bytes"));
                }
            }
        }
        Ok(bytes)
    }
}

/// Checks a whole file. Where its table begins, and what that says.
fn read(all: &[u8], identity: &str) -> Result<(usize, BTreeMap<String, Range<usize>>), PackedError> {
    let (told, digest) = all.split_at(all.len() - 8);
    if digest_block(told, 0).to_le_bytes() != digest {
        return Err(PackedError::Damaged("its digest is another"));
    }
    let (before, start) = told.split_at(told.len() - 8);
    let start = u64::from_le_bytes(start.try_into().unwrap_or_default()) as usize;
    let table = before.get(start..).and_then(|table| std::str::from_utf8(table).ok());
    let mut lines = table.ok_or(PackedError::Damaged("its table"))?.lines();
    let first = lines.next().unwrap_or_default();
    if first != title(identity) {
        return Err(PackedError::Foreign(first.to_owned()));
    }
    let matrix = |line: &str| {
        let (at, rest) = line.split_once(' ')?;
        let (len, name) = rest.split_once(' ')?;
        let (at, len): (usize, usize) = (at.parse().ok()?, len.parse().ok()?);
        let end = at.checked_add(len).filter(|&end| end <= start && at % LINE == 0)?;
        Some((name.to_owned(), at..end))
    };
    let matrices = lines.filter(|line| !line.is_empty()).map(matrix).collect::<Option<_>>();
    Ok((start, matrices.ok_or(PackedError::Damaged("its table"))?))
}

#[cfg(test)]
mod tests;
