//! [`Memory`]: device memory with an owner, its parts, and rows of activations in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::{Address, Device, Piece};
use super::params::Element;
use super::sharing::SharingDevice;
use crate::{HostPool, KernelError};

/// One allocation of a device. It is freed when the last [`Memory`] in it is dropped.
struct Allocation<D: Device> {
    device: Arc<D>,
    at: Address,
    /// A pool in host memory that is mapped into the device, if it is that.
    host: Option<Arc<HostPool>>,
    freed: Freed,
}

/// Number of freed allocations of one owner. While it does not change, all earlier allocations are still valid.
pub(super) type Freed = Arc<AtomicU64>;

impl<D: Device> Drop for Allocation<D> {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
        match &self.host {
            None => self.device.free(self.at),
            Some(pool) => self.device.unmap(pool.base(), self.at),
        }
    }
}

/// Layout of rows that are columns of wider rows.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Columns {
    /// f32 elements of a row.
    width: usize,
    /// f32 elements from the start of one row to the start of the next.
    stride: usize,
}

/// Device memory: a whole allocation or a part of one, or a pool in host memory that is mapped into the device.
pub struct Memory<D: Device> {
    allocation: Arc<Allocation<D>>,
    at: Address,
    bytes: usize,
    /// Set if its rows are columns of wider rows; None if they lie one behind the other.
    columns: Option<Columns>,
    /// Element type of the rows of activations in it.
    element: Element,
}

/// A clone is the same memory. It is freed when all clones are dropped.
impl<D: Device> Clone for Memory<D> {
    fn clone(&self) -> Self {
        Memory { allocation: Arc::clone(&self.allocation), ..*self }
    }
}

impl<D: Device> Memory<D> {
    /// Allocates `bytes` bytes with undefined contents.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        Memory::counted(device, bytes, Freed::default())
    }

    /// The same; freeing it counts up `freed`.
    pub(super) fn counted(device: &Arc<D>, bytes: usize, freed: Freed) -> Result<Self, KernelError> {
        let at = device.allocate(bytes.max(1))?;
        Ok(Memory::of(device, at, bytes, None, freed))
    }

    /// Allocates `bytes` bytes that other processes can import.
    pub(super) fn of_shared(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError>
    where
        D: SharingDevice,
    {
        let at = device.allocate_shared(bytes.max(1))?;
        Ok(Memory::of(device, at, bytes, None, Freed::default()))
    }

    /// Maps a pool in host memory into the device.
    pub(super) fn of_host(device: &Arc<D>, pool: Arc<HostPool>) -> Result<Self, KernelError> {
        let bytes = pool.geometry().bytes();
        // SAFETY: the allocation made here owns the pool and unmaps it before it drops it.
        let at = unsafe { device.map(pool.base(), bytes) }?;
        Ok(Memory::of(device, at, bytes, Some(pool), Freed::default()))
    }

    fn of(device: &Arc<D>, at: Address, bytes: usize, host: Option<Arc<HostPool>>, freed: Freed) -> Self {
        let allocation = Arc::new(Allocation { device: Arc::clone(device), at, host, freed });
        Memory { allocation, at, bytes, columns: None, element: Element::F32 }
    }

    /// The same memory, for rows of this element type.
    pub(super) fn holding(self, element: Element) -> Self {
        Memory { element, ..self }
    }

    /// The part of `bytes` bytes from byte `from` on. It keeps the whole allocation alive.
    pub(super) fn part(&self, from: usize, bytes: usize) -> Self {
        Memory { at: self.piece(from, bytes).at(), bytes, ..self.clone() }
    }

    /// The columns `first..first + width` of rows of `stride` f32.
    pub(super) fn columns(&self, first: usize, width: usize, stride: usize) -> Self {
        assert!(first + width <= stride, "{width} f32 from {first} on, of rows of {stride}");
        let float = size_of::<f32>();
        let rows = self.bytes / (stride * float).max(1);
        let (at, columns) = (self.at.plus(first * float), Some(Columns { width, stride }));
        Memory { at, bytes: rows * width * float, columns, ..self.clone() }
    }

    /// This memory and `next` as one, if `next` begins where this one ends in the same allocation; for columns, if it does so in every
    /// row.
    pub(super) fn joined(&self, next: &Memory<D>) -> Option<Self> {
        let float = size_of::<f32>();
        let (across, columns) = match (self.columns, next.columns) {
            (None, None) => (self.bytes, None),
            (Some(a), Some(b)) if a.stride == b.stride => {
                (a.width * float, Some(Columns { width: a.width + b.width, stride: a.stride }))
            }
            _ => return None,
        };
        let one = Arc::ptr_eq(&self.allocation, &next.allocation) && self.element == next.element;
        let follows = one && next.at == self.at.plus(across);
        follows.then(|| Memory { bytes: self.bytes + next.bytes, columns, ..self.clone() })
    }

    /// Whether this is a pool in host memory.
    pub(super) fn is_host(&self) -> bool {
        self.allocation.host.is_some()
    }

    /// Element type of its rows.
    pub(super) fn element(&self) -> Element {
        self.element
    }

    /// Number of bytes, without the columns of others in between.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The piece of `bytes` bytes from byte `from` on.
    ///
    /// # Panics
    /// When it reaches beyond the end, or this memory is columns of wider rows.
    pub fn piece(&self, from: usize, bytes: usize) -> Piece<'_> {
        let inside = from.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes from {from} on, of device memory of {}", self.bytes);
        assert!(self.columns.is_none(), "rows that lie between those of others");
        Piece::new(self.at.plus(from), bytes)
    }

    /// The first `count` f32.
    ///
    /// # Panics
    /// When there are fewer, or the elements are of another type.
    pub fn floats(&self, count: usize) -> Piece<'_> {
        assert!(self.element == Element::F32, "rows of other elements");
        self.piece(0, count * size_of::<f32>())
    }

    /// Elements `from..to` as contiguous pieces, one for each row they touch. The columns of others are not counted.
    ///
    /// # Panics
    /// When `to` is beyond the end.
    pub(super) fn runs(&self, from: usize, to: usize) -> impl Iterator<Item = Piece<'_>> {
        let size = self.element.bytes();
        assert!(from <= to && to * size <= self.bytes, "elements {from} to {to} of {} bytes", self.bytes);
        let Columns { width, stride } = self.columns.unwrap_or(Columns { width: to.max(1), stride: 0 });
        (from / width..to.div_ceil(width)).map(move |row| {
            let (first, last) = (from.max(row * width), to.min((row + 1) * width));
            Piece::new(self.at.plus((row * stride + first - row * width) * size), (last - first) * size)
        })
    }

    /// The first `count` rows of a norm of `width` f32, such as heads whose dimensions are normed.
    ///
    /// Returns the piece from the first to the last of them, the number of rows that lie one behind the other, and the number of f32
    /// from the start of one such group to the next.
    pub(super) fn heads(&self, count: usize, width: usize) -> (Piece<'_>, usize, usize) {
        let Some(columns) = self.columns else { return (self.floats(count * width), 1, width) };
        let heads = columns.width / width.max(1);
        assert!(heads * width == columns.width && count.is_multiple_of(heads.max(1)), "{count} rows of {width}");
        let (piece, stride) = self.rows(count / heads.max(1), columns.width);
        (piece, heads, stride)
    }

    /// The piece from the first to the last of the first `count` rows of `width` f32, and the number of f32 from one row to the next.
    ///
    /// # Panics
    /// When there are fewer rows, or rows of another width or element type.
    pub(super) fn rows(&self, count: usize, width: usize) -> (Piece<'_>, usize) {
        let Some(columns) = self.columns else { return (self.floats(count * width), width) };
        assert_eq!((columns.width, self.element), (width, Element::F32), "rows of another width or other elements");
        assert!(count * width * size_of::<f32>() <= self.bytes, "{count} rows of {width}, of {} bytes", self.bytes);
        let floats = if count == 0 { 0 } else { (count - 1) * columns.stride + width };
        (Piece::new(self.at, floats * size_of::<f32>()), columns.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Nowhere;
    use super::*;

    #[test]
    fn columns_are_rows_between_those_of_others_and_keep_all_of_them() {
        let device = Arc::new(Nowhere::default());
        let freed = Freed::default();
        let all = Memory::counted(&device, 3 * 10 * 4, Arc::clone(&freed)).unwrap();
        let start = all.piece(0, 0).at();
        let [a, b, c] = [(0, 4), (4, 4), (8, 2)].map(|(first, width)| all.columns(first, width, 10));
        drop(all);
        assert_eq!(freed.load(Ordering::Relaxed), 0);
        assert_eq!((b.bytes(), c.bytes()), (48, 24));
        let (piece, stride) = b.rows(3, 4);
        assert_eq!((piece.at(), piece.bytes(), stride), (start.plus(16), (2 * 10 + 4) * 4, 10));
        assert_eq!(b.rows(0, 4).0.bytes(), 0);
        let runs = |memory: &Memory<Nowhere>, from, to| {
            memory.runs(from, to).map(|run| (run.at().0 - start.0, run.bytes())).collect::<Vec<_>>()
        };
        assert_eq!(runs(&b, 3, 10), [(16 + 12, 4), (16 + 40, 16), (16 + 80, 8)]);
        assert_eq!((runs(&b, 4, 4), runs(&b, 8, 12)), (vec![], vec![(16 + 80, 16)]));
        assert!(a.joined(&c).is_none() && b.joined(&a).is_none());
        let joined = a.joined(&b).and_then(|ab| ab.joined(&c)).unwrap();
        let (piece, stride) = joined.rows(2, 10);
        assert_eq!((piece.at(), piece.bytes(), stride), (start, 80, 10));
        drop(joined);
        drop([a, b, c]);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn parts_follow_each_other_within_an_allocation_only() {
        let device = Arc::new(Nowhere::default());
        let (memory, other) = (Memory::new(&device, 96).unwrap(), Memory::new(&device, 96).unwrap());
        let (a, b) = (memory.part(0, 32), memory.part(32, 64));
        let runs: Vec<_> = b.runs(2, 16).map(|run| (run.at().0 - b.at.0, run.bytes())).collect();
        assert_eq!(runs, [(8, 56)]);
        assert!(b.joined(&a).is_none() && b.joined(&other.part(0, 8)).is_none());
        assert_eq!(a.joined(&b).map(|both| both.bytes()), Some(96));
    }
}
