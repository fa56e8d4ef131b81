//! Memory of weights, activations and pools, in huge pages where the system has them.
//!
//! A decode step reads every weight once, in a few streams. With pages of 4 KiB each of them ends every 64 cache lines, where the
//! hardware's prefetcher stops and the address is translated anew; pages of 2 MiB leave the memory's own bandwidth as the bound.
//! Matrices of small models are smaller than such a page, so they lie one after another in large regions. A region is given
//! back when its last matrix is dropped; what of it was never handed out was never touched.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munmap};

use crate::KernelError;

/// Bytes of a huge page, the unit of regions.
const HUGE: usize = 2 << 20;
/// Bytes of a region of small matrices.
const REGION: usize = 32 << 20;
/// Every range starts a cache line.
pub const LINE: usize = 64;

/// Mapped memory of this process.
pub struct Region {
    mapping: NonNull<u8>,
    mapped: usize,
    bytes: usize,
    /// Where its bytes begin: for a large one, a huge page.
    base: NonNull<u8>,
}

// SAFETY: the memory is reached through pointers alone, whose users keep apart: `PageRange` by ranges, pools by blocks.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed, of at least `bytes`, of which the system gives what is touched.
    pub fn new(bytes: usize) -> Result<Self, KernelError> {
        let no_memory = || KernelError::Memory { bytes };
        let huge = bytes >= HUGE;
        let mapped = if huge { bytes.checked_add(HUGE).ok_or_else(no_memory)? } else { bytes.max(1) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE) };
        let mapping = mapping.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or_else(no_memory)?;
        let mut region = Region { mapping, mapped, bytes, base: mapping };
        if huge {
            // SAFETY: less than a huge page further on, and one more than `bytes` is mapped.
            region.base = unsafe { mapping.add(mapping.align_offset(HUGE)) };
            // A system without huge pages refuses; its small ones do.
            // SAFETY: inside the mapping; advice on page sizes changes no contents.
            let _ = unsafe { madvise(region.base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        }
        Ok(region)
    }

    /// The first `bytes` of a file, to read, shared with all who map it; in huge pages where the file system has them.
    pub fn of_file(file: impl AsFd, bytes: usize) -> Result<Self, KernelError> {
        let no_memory = || KernelError::Memory { bytes };
        let mapped = bytes.checked_add(HUGE).ok_or_else(no_memory)?;
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE) };
        let mapping = mapping.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or_else(no_memory)?;
        // SAFETY: less than a huge page further on, and one more than `bytes` is mapped.
        let base = unsafe { mapping.add(mapping.align_offset(HUGE)) };
        let region = Region { mapping, mapped, bytes, base };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: it replaces a part of the mapping above, which nobody has seen yet.
        unsafe { mmap(base.as_ptr().cast(), bytes, ProtFlags::READ, flags, file, 0) }.map_err(|_| no_memory())?;
        // SAFETY: inside the mapping; advice on page sizes changes no contents.
        let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        Ok(region)
    }

    /// Keeps a file's region in memory, as memory of one's own is where there is no swap, if this user may.
    pub fn lock(&self) {
        // SAFETY: inside the mapping; this changes no contents.
        let _ = unsafe { mlock(self.base.as_ptr().cast(), self.bytes) };
    }

    /// Bytes of a file's region that lie in huge pages, of those that were touched; 0 where the system does not say.
    pub fn huge_bytes(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        huge_of(&maps, self.base.as_ptr() as usize)
    }

    /// Its first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

/// What the system says of the mapping that begins at an address.
fn huge_of(maps: &str, start: usize) -> usize {
    let first = format!("{start:x}-");
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&first));
    let said = lines.find_map(|line| line.strip_prefix("FilePmdMapped:")).unwrap_or_default();
    said.split_whitespace().next().and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0) << 10
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this region's own, and no `PageRange` of it is left. It can only fail for a range that is not mapped.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapped) };
    }
}

/// Hands out ranges of regions.
#[derive(Default)]
pub struct Arena {
    region: Option<(Arc<Region>, usize)>,
}

impl Arena {
    /// `bytes` zeroed bytes, from a cache line's start on.
    pub fn zeroed(&mut self, bytes: usize) -> Result<PageRange, KernelError> {
        if bytes > REGION / 2 {
            return Ok(PageRange { region: Arc::new(Region::new(bytes)?), start: 0, len: bytes });
        }
        let (region, start) = match self.region.take() {
            Some((region, used)) if used + bytes <= REGION => (region, used),
            _ => (Arc::new(Region::new(REGION)?), 0),
        };
        self.region = Some((region.clone(), (start + bytes).next_multiple_of(LINE)));
        Ok(PageRange { region, start, len: bytes })
    }
}

/// A range of a region.
pub struct PageRange {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl Deref for PageRange {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the region, which lives as long as this, and is this one's alone.
        unsafe { std::slice::from_raw_parts(self.region.base.add(self.start).as_ptr(), self.len) }
    }
}

impl DerefMut for PageRange {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.add(self.start).as_ptr(), self.len) }
    }
}

/// A range of a region that changes no more.
pub struct Fixed {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Fixed {
    /// All of a region that nobody writes to any more.
    pub fn whole(region: &Arc<Region>) -> Fixed {
        Fixed { region: region.clone(), range: 0..region.bytes }
    }

    /// A range of a region that nobody writes to any more; None if it is beyond it.
    pub fn new(region: &Arc<Region>, range: Range<usize>) -> Option<Fixed> {
        let inside = range.start <= range.end && range.end <= region.bytes;
        inside.then(|| Fixed { region: region.clone(), range })
    }
}

impl From<PageRange> for Fixed {
    fn from(PageRange { region, start, len }: PageRange) -> Fixed {
        Fixed { region, range: start..start + len }
    }
}

impl Deref for Fixed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the region, which lives as long as this; nobody writes to it any more.
        unsafe { std::slice::from_raw_parts(self.region.base.add(self.range.start).as_ptr(), self.range.len()) }
    }
}

/// A copy in huge pages of its own.
pub fn copy(bytes: &[u8]) -> Result<Arc<Region>, KernelError> {
    let mut range = PageRange { region: Arc::new(Region::new(bytes.len())?), start: 0, len: bytes.len() };
    range.copy_from_slice(bytes);
    Ok(range.region)
}

/// A type of which any bits are a value.
///
/// # Safety
/// They are.
pub unsafe trait Plain: Copy {}

// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for [i32; 3] {}

/// Activations. Columns of many rows are written and read together: with small pages each row is a translation of its own.
pub struct Pages<T> {
    range: PageRange,
    of: PhantomData<T>,
}

impl<T: Plain> Pages<T> {
    /// Zeroes, from a page's start on.
    pub fn zeroed(count: usize) -> Result<Self, KernelError> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(KernelError::Memory { bytes: usize::MAX })?;
        let range = PageRange { region: Arc::new(Region::new(bytes)?), start: 0, len: bytes };
        Ok(Pages { range, of: PhantomData })
    }
}

impl<T: Plain> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the range begins a page and holds so many, of which any bits are a value.
        unsafe { std::slice::from_raw_parts(self.range.as_ptr().cast(), self.range.len() / size_of::<T>()) }
    }
}

impl<T: Plain> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let count = self.len();
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.range.as_mut_ptr().cast(), count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_zeroed_apart_and_outlive_their_arena() {
        let mut arena = Arena::default();
        let sizes = [1, 63, 64, 65, 0, REGION / 2, REGION / 2 - 300, 4096, REGION / 2 + 1];
        let mut ranges: Vec<PageRange> = sizes.iter().map(|&size| arena.zeroed(size).unwrap()).collect();
        drop(arena);
        for (i, range) in ranges.iter_mut().enumerate() {
            assert_eq!(range.len(), sizes[i]);
            assert_eq!(range.as_ptr() as usize % LINE, 0);
            assert!(range.iter().all(|&b| b == 0), "range {i} overlaps another");
            range.fill(1 + i as u8);
        }
        for (i, range) in ranges.iter().enumerate() {
            assert!(range.iter().all(|&b| b == 1 + i as u8), "range {i} overlaps another");
        }
    }

    #[test]
    fn activations_are_zeroed_and_as_many_as_asked_for() {
        for count in [0, 1, 7, 4096, HUGE] {
            let mut pages = Pages::<f32>::zeroed(count).unwrap();
            assert!(pages.len() == count && pages.iter().all(|&x| x == 0.0));
            assert_eq!(pages.as_ptr() as usize % LINE, 0);
            pages.fill(1.5);
            assert!(pages.iter().all(|&x| x == 1.5));
        }
        assert_eq!(Pages::<[i32; 3]>::zeroed(5).unwrap()[..], [[0; 3]; 5]);
        assert!(matches!(Pages::<f32>::zeroed(usize::MAX), Err(KernelError::Memory { .. })));
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        assert!(matches!(Arena::default().zeroed(usize::MAX), Err(KernelError::Memory { .. })));
        assert!(matches!(Arena::default().zeroed(1 << 60), Err(KernelError::Memory { .. })));
    }
}
