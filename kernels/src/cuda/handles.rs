//! What a device is asked with: addresses, streams, events, pieces of memory and launches.

use std::marker::PhantomData;

/// An address in device memory; 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    pub(super) fn plus(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A queue of work; what is put into one runs in order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream(pub(super) usize);

/// A place in a stream that another stream can wait for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event(pub(super) usize);

/// Work that was captured, to be launched as a whole: the same kernels with the same sizes and addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Graph(pub(super) usize);

/// Grid, block and bytes of dynamic shared memory of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes.
    pub shared: u32,
}

impl Launch {
    /// With no more shared memory than the kernel declares.
    pub fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Launch { grid, block, shared: 0 }
    }

    /// A grid without blocks is not launched.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// A range of device memory that is there as long as it is borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    at: Address,
    bytes: usize,
    memory: PhantomData<&'a ()>,
}

impl Piece<'_> {
    /// Of memory that the caller knows to be there.
    pub(super) fn new(at: Address, bytes: usize) -> Self {
        Piece { at, bytes, memory: PhantomData }
    }

    /// Where it begins.
    pub fn at(&self) -> Address {
        self.at
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An array of 16-bit elements in device memory, as rows, and the boxes of it that kernels copy.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The rows, one behind the other.
    pub memory: Piece<'a>,
    /// Elements of a row.
    pub width: u32,
    /// Elements of a row of a box, at most 64, and rows of a box.
    pub box_shape: [u32; 2],
}

/// What a device's copy units know of [`Rows`], with a swizzle of 128 bytes: a part of a kernel's parameters.
#[repr(C, align(128))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TensorMap {
    /// As the device encodes it.
    pub words: [u64; 16],
}

/// What a launch does to a range.
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
    /// Its shape, not empty.
    pub launch: Launch,
    /// Its one parameter: a struct, and how many bytes it has.
    pub params: *const u8,
    /// See `params`.
    pub bytes: usize,
    /// All memory it touches.
    pub touches: &'a [Access<'a>],
}
