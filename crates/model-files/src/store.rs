//! Files mapped into memory, and a table of the tensors in them by the names the files use. One form for every format.
//!
//! Every range in the table lies inside its file: that is checked when the table is built, so reading a tensor cannot fault.
//! Mapped files must not be shortened in place while a model is open (the cache never does that; it replaces files by renaming).

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{ModelFileError, TensorRef, WeightDtype};

/// One file, mapped read-only.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub path: PathBuf,
    identity: String,
    map: Mmap,
}

impl MappedFile {
    pub fn open(path: &Path) -> Result<MappedFile, ModelFileError> {
        let file = std::fs::File::open(path).map_err(ModelFileError::io(path))?;
        let facts = file.metadata().map_err(ModelFileError::io(path))?;
        let size = facts.len();
        if size == 0 {
            return Err(ModelFileError::Truncated { path: path.to_owned(), what: "it is empty".to_owned(), size });
        }
        // SAFETY: the mapping is private and read-only, and lives as long as the slices handed out from it. Nothing in this
        // process writes to model files; another process that shortened one in place would break the contract above.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelFileError::io(path))?;
        Ok(MappedFile { path: path.to_owned(), identity: identity(&facts), map })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub fn truncated(&self, what: String) -> ModelFileError {
        ModelFileError::Truncated { path: self.path.clone(), what, size: self.map.len() as u64 }
    }
}

/// What changes when a file becomes another or is written to. The time of its last change cannot be set by programs.
fn identity(facts: &Metadata) -> String {
    let (inode, size) = (facts.ino(), facts.len());
    let times = [facts.mtime(), facts.mtime_nsec(), facts.ctime(), facts.ctime_nsec()];
    format!("file {inode} of {size} bytes at {times:?}")
}

/// Element type as the file gives it; an unsupported one matters only once the tensor is needed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StoredDtype {
    Supported(WeightDtype),
    Unsupported(String),
}

/// Where a tensor lies. Made only by [`TensorStore::insert`].
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    file: usize,
    pub dtype: StoredDtype,
    /// Row-major.
    pub shape: Vec<usize>,
    range: Range<usize>,
}

/// All tensors of a model.
#[derive(Debug, Default)]
pub(crate) struct TensorStore {
    files: Vec<MappedFile>,
    entries: BTreeMap<String, Entry>,
}

impl TensorStore {
    /// Adds a file; returns the number under which to insert its tensors.
    pub fn add_file(&mut self, file: MappedFile) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    pub fn file(&self, index: usize) -> &MappedFile {
        &self.files[index]
    }

    /// Adds a tensor of `file` whose bytes begin at `start`.
    pub fn insert(
        &mut self,
        file: usize,
        name: &str,
        dtype: StoredDtype,
        shape: Vec<usize>,
        start: Option<usize>,
        bytes: Option<usize>,
    ) -> Result<(), ModelFileError> {
        let mapped = &self.files[file];
        let fail = |problem: String| Err(ModelFileError::tensor(&mapped.path, name, problem));
        let Some(bytes) = bytes else {
            return fail(format!("a shape of {shape:?} is not possible for {dtype:?}: rows must be whole blocks"));
        };
        let end = start.and_then(|start| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return fail("its offset is beyond any file".to_owned());
        };
        if end > mapped.bytes().len() {
            return Err(mapped.truncated(format!("tensor {name} ends at byte {end}")));
        }
        self.entries.insert(name.to_owned(), Entry { file, dtype, shape, range: start..end });
        Ok(())
    }

    /// What changes when any of its files does.
    pub fn identity(&self) -> String {
        self.files.iter().map(|file| file.identity.as_str()).collect::<Vec<_>>().join(", ")
    }

    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The file a tensor lies in.
    pub fn path_of(&self, entry: &Entry) -> &Path {
        &self.files[entry.file].path
    }

    /// The file that an error about a missing tensor names.
    pub fn main_path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |file| &file.path)
    }

    pub fn bytes_of(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].bytes()[entry.range.clone()]
    }

    /// The tensor, if its element type is supported.
    pub fn view(&self, entry: &Entry) -> Option<TensorRef<'_>> {
        let StoredDtype::Supported(dtype) = entry.dtype else { return None };
        Some(TensorRef { dtype, shape: entry.shape.clone(), data: self.bytes_of(entry).into() })
    }
}
