//! What is in a directory of the disk tier, for people and tools. Only [`Folder::remove`] and [`Folder::punch`] change anything, and only while
//! no worker has the directory.

use std::fmt;
use std::io::{Error, ErrorKind, Result as IoResult};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use baton_kv_store::{Buffer, Condition, DiskConfig, Expect, Identity, Mismatch, Shape, audit, check_record};
use baton_types::KvLayout;
use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};

use crate::files::{ENDING, Heads, options};
use crate::lock::Lock;
use crate::memory::Memory;
use crate::{Disk, Files, OpenError};

/// How the name of the description beside a file ends.
pub(crate) const ABOUT: &str = ".json";

/// What the KV in a file is of: a description in JSON beside the file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct About {
    /// The model, as the worker was told.
    pub model: String,
    /// What computed the KV.
    pub backend: String,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// The layout, with the KV type and the model's fingerprint.
    pub layout: KvLayout,
}

impl About {
    /// Writes the description, unless it is there. A full disk must not keep a store from opening: a description helps people, no more.
    pub(crate) fn write(&self, directory: &Path, name: FileName) {
        let path = directory.join(format!("{name}{ABOUT}"));
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        if std::fs::read_to_string(&path).is_ok_and(|there| there == text) {
            return;
        }
        if let Err(error) = std::fs::write(&path, text) {
            tracing::warn!(path = %path.display(), %error, "cannot say what the KV on disk is of; `baton kv` will not read it");
        }
    }
}

/// The name of a file: whose KV it has, and the sizes that say where its records lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileName {
    /// Whose KV.
    pub identity: Identity,
    /// Bytes of a record.
    pub stride: u64,
    /// Records of a segment.
    pub records: u32,
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { layout, numerics } = self.identity;
        write!(f, "{layout:016x}-{numerics:016x}-{:x}-{:x}{ENDING}", self.stride, self.records)
    }
}

impl FromStr for FileName {
    type Err = ();

    fn from_str(name: &str) -> Result<FileName, ()> {
        let mut fields = name.strip_suffix(ENDING).ok_or(())?.split('-');
        let mut next = || u64::from_str_radix(fields.next().ok_or(())?, 16).map_err(|_| ());
        let identity = Identity { layout: next()?, numerics: next()? };
        let (stride, records) = (next()?, u32::try_from(next()?).map_err(|_| ())?);
        let read = FileName { identity, stride, records };
        // Nothing else has this name, and no size is 0.
        (read.to_string() == name && stride > 0 && records > 0).then_some(read).ok_or(())
    }
}

/// A directory of the disk tier.
#[derive(Debug)]
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
    /// Its files.
    pub files: Vec<Kept>,
}

/// A file of a directory.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Where it is.
    pub path: PathBuf,
    /// What its name says.
    pub name: FileName,
    /// Segments that it has room for.
    pub segments: u32,
    /// Bytes that it has on disk.
    pub bytes: u64,
    /// When it was last written to.
    pub written: Option<SystemTime>,
    /// What it is of; None: there is no description, or it is of something else. Then nothing in the file can be read.
    pub about: Option<About>,
}

/// What was found in a file: a sum of each segment that was ever written.
#[derive(Clone, Debug, Default)]
pub struct Looked {
    /// The segments.
    pub segments: Vec<SegmentSum>,
    /// Bytes of a record, and tokens of a block.
    pub record_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// What was found in a segment: how many records of each condition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SegmentSum {
    /// Its number.
    pub segment: u32,
    /// See [`Condition`].
    pub live: u64,
    /// See [`Condition`].
    pub dead: u64,
    /// See [`Condition`].
    pub torn: u64,
    /// See [`Condition`].
    pub damaged: u64,
    /// See [`Condition`].
    pub foreign: u64,
}

impl SegmentSum {
    fn of(segment: u32, conditions: &[Condition]) -> SegmentSum {
        let count = |wanted| conditions.iter().filter(|is| **is == wanted).count() as u64;
        let (live, dead, foreign) = (count(Condition::Live), count(Condition::Dead), count(Condition::Foreign));
        SegmentSum { segment, live, dead, torn: count(Condition::Torn), damaged: count(Condition::Damaged), foreign }
    }

    /// Records that were written.
    pub fn written(&self) -> u64 {
        self.live + self.dead + self.torn + self.damaged + self.foreign
    }

    /// Whether no store could use anything in it, now or in a later version.
    pub fn useless(&self) -> bool {
        self.written() > 0 && self.live + self.foreign == 0
    }
}

impl Folder {
    /// Looks at a directory, and at those directly in it, as `baton up` makes them. Those without KV are left out.
    pub fn find(root: &Path) -> Result<Vec<Folder>, OpenError> {
        let failed = |cause| OpenError::Directory { doing: "read", path: root.to_owned(), cause };
        let mut inside: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(root).map_err(failed)? {
            inside.push(entry.map_err(failed)?.path());
        }
        inside.retain(|path| path.is_dir());
        inside.sort();
        let all = std::iter::once(root.to_owned()).chain(inside).map(|path| Folder::open(&path));
        all.filter(|folder| !matches!(folder, Ok(folder) if folder.files.is_empty())).collect()
    }

    fn open(path: &Path) -> Result<Folder, OpenError> {
        let failed = |cause| OpenError::Directory { doing: "read", path: path.to_owned(), cause };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if let Some(name) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                files.push(Kept::of(entry.path(), name).map_err(failed)?);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Folder { path: path.to_owned(), files })
    }

    /// Whether a process has the directory open, and which.
    pub fn in_use(&self) -> Result<Option<Option<u32>>, OpenError> {
        Lock::held(&self.path)
    }

    /// Keeps workers from opening the directory until `work` is done, which changes it. Refused while one has it open.
    pub fn alone<T>(&self, work: impl FnOnce(&Folder) -> IoResult<T>) -> Result<T, OpenError> {
        let _lock = Lock::take(&self.path)?;
        work(self).map_err(|cause| OpenError::Directory { doing: "change", path: self.path.clone(), cause })
    }

    /// Removes a file and its description. Only inside [`Folder::alone`].
    pub fn remove(&self, file: &Kept) -> IoResult<()> {
        std::fs::remove_file(&file.path)?;
        match std::fs::remove_file(about_path(&file.path)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Gives a segment's space back; a store then finds it blank. Only inside [`Folder::alone`].
    pub fn punch(&self, file: &Kept, segment: u32) -> IoResult<()> {
        let bytes = file.segment_bytes();
        let opened = options().create(false).open(&file.path)?;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&opened, how, u64::from(segment) * bytes, bytes)?)
    }
}

impl Kept {
    fn of(path: PathBuf, name: FileName) -> IoResult<Kept> {
        let is = std::fs::metadata(&path)?;
        let segments = is.len() / (u64::from(name.records) * name.stride).max(1);
        let about = std::fs::read_to_string(about_path(&path)).ok();
        let about = about.and_then(|text| serde_json::from_str::<About>(&text).ok());
        // Else the description is of something else.
        let about = about.filter(|about| {
            let shape = (about.layout.block_size > 0).then(|| Shape::new(&about.layout).ok()).flatten();
            about.layout.fingerprint() == name.identity.layout
                && shape.is_some_and(|shape| shape.stride() as u64 == name.stride)
        });
        let segments = u32::try_from(segments).unwrap_or(u32::MAX);
        Ok(Kept { name, segments, bytes: is.blocks() * 512, written: is.modified().ok(), about, path })
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.name.records) * self.name.stride
    }

    /// How long ago it was last written to.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        now.duration_since(self.written?).ok()
    }

    /// Reads the head of each record; with `data`, all of each record, and checks the digests (I2). None: it has no description.
    pub fn look(&self, data: bool) -> IoResult<Option<Looked>> {
        let Some(about) = &self.about else { return Ok(None) };
        let other = |error: &dyn fmt::Display| Error::new(ErrorKind::InvalidData, error.to_string());
        let shape = Shape::new(&about.layout).map_err(|error| other(&error))?;
        let size = DiskConfig { segments: self.segments, records: self.name.records };
        let files = Files::look(&self.path, &shape, size)?;
        let buffer = Memory::new(1, shape.stride()).map_err(|error| other(&error))?;
        let mut found: Vec<Heads> = Vec::new();
        for segment in 0..self.segments {
            let mut heads = files.scan(segment)?;
            for head in heads.iter_mut().filter(|_| data) {
                self.check(&files, &shape, &buffer, head)?;
            }
            found.push(heads);
        }
        let conditions = audit(self.name.identity, &found);
        let sums = (0..).zip(&conditions).map(|(segment, records)| SegmentSum::of(segment, records));
        let segments = sums.filter(|sum| sum.written() > 0).collect();
        Ok(Some(Looked { segments, record_bytes: self.name.stride, block_tokens: shape.block_size() }))
    }

    /// Checks a record whose head is whole; puts what is wrong with it in place of the head.
    fn check(
        &self,
        files: &Files,
        shape: &Shape,
        buffer: &Memory,
        head: &mut Result<baton_kv_store::Head, Mismatch>,
    ) -> IoResult<()> {
        let Ok(whole) = head else { return Ok(()) };
        let Some(place) = Some(whole.place).filter(|at| at.segment < self.segments && at.index < self.name.records)
        else {
            return Ok(());
        };
        // SAFETY: nobody else knows this memory.
        let record = unsafe { buffer.write(Buffer(0), 0, shape.stride()) };
        files.read(place, record)?;
        let expect = Expect { identity: whole.identity, place, name: whole.block.key.name };
        if let Err(wrong) = check_record(shape, record, &expect) {
            // Not what the place holds: the head stands elsewhere, which `audit` sees.
            if matches!(wrong, Mismatch::Digest { .. }) {
                *head = Err(wrong);
            }
        }
        Ok(())
    }
}

fn about_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(ABOUT);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_says_what_is_in_it_and_nothing_else_is_taken_for_one() {
        let name = FileName { identity: Identity { layout: 0xab, numerics: u64::MAX }, stride: 8192, records: 512 };
        let text = name.to_string();
        assert_eq!(text, "00000000000000ab-ffffffffffffffff-2000-200.baton-kv");
        assert_eq!(text.parse(), Ok(name));
        for wrong in [
            "lock",
            ".baton-kv",
            "00000000000000ab-ffffffffffffffff-2000-0.baton-kv",
            "ab-ffffffffffffffff-2000-200.baton-kv",
            "00000000000000ab-ffffffffffffffff-2000-200-1.baton-kv",
            "00000000000000ab-ffffffffffffffff-2000-200.baton-kv.json",
        ] {
            assert_eq!(wrong.parse::<FileName>(), Err(()), "{wrong}");
        }
    }

    #[test]
    fn a_segment_with_a_block_that_is_or_may_be_of_use_is_not_useless() {
        let sum = SegmentSum { dead: 2, torn: 1, ..SegmentSum::default() };
        assert!(sum.useless());
        assert!(!SegmentSum { live: 1, ..sum }.useless() && !SegmentSum { foreign: 1, ..sum }.useless());
        assert!(!SegmentSum::default().useless(), "a blank one has nothing to give back");
    }
}
