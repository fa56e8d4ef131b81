//! The arguments of a device's calls: addresses, streams, events, pieces of memory and launches.

use std::marker::PhantomData;

/// An address in device memory; 0 means none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    pub(super) fn plus(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A queue of work. Work in one stream runs in order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream(pub(super) usize);

/// A point in a stream that another stream or the host can wait for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event(pub(super) usize);

/// Captured work that is launched as a whole: the same kernels with the same sizes and addresses each time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Graph(pub(super) usize);

/// Shape of a launch: grid, thread block and dynamic shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Thread blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a thread block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Launch {
    /// A launch without dynamic shared memory.
    pub fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Launch { grid, block, shared: 0 }
    }

    /// Whether the grid has no thread blocks. Such a launch is left out.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// A borrowed range of device memory. The memory stays allocated while it is borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    at: Address,
    bytes: usize,
    memory: PhantomData<&'a ()>,
}

impl Piece<'_> {
    /// A piece of memory that the caller knows to be allocated.
    pub(super) fn new(at: Address, bytes: usize) -> Self {
        Piece { at, bytes, memory: PhantomData }
    }

    /// Its first address.
    pub fn at(&self) -> Address {
        self.at
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An array of rows of 16-bit elements in device memory, and the shape of the boxes that kernels copy from it.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The rows, one behind the other.
    pub memory: Piece<'a>,
    /// Elements in a row.
    pub width: u32,
    /// Elements in a row of a box (at most 64), and rows of a box.
    pub box_shape: [u32; 2],
}

/// [`Rows`] encoded for a device's copy units, with a swizzle of 128 bytes. It is part of a kernel's parameters.
#[repr(C, align(128))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TensorMap {
    /// The device's encoding.
    pub words: [u64; 16],
}

/// How a launch uses a piece of memory.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// Reads it.
    Read(Piece<'a>),
    /// Writes it, and may read it.
    Write(Piece<'a>),
}

/// A launch of a kernel.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Its shape, which is not empty.
    pub launch: Launch,
    /// Its one parameter: a struct of `bytes` bytes.
    pub params: *const u8,
    /// Bytes at `params`.
    pub bytes: usize,
    /// All memory that it touches.
    pub touches: &'a [Access<'a>],
}
