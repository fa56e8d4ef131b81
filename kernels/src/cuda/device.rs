//! The trait [`Device`]: memory, streams, events, launches and products, as thin as a driver's own calls.
//!
//! Below [`super::CudaBackend`], which knows what is computed; a device knows addresses and kernels by name. Three of them: the driver,
//! the kernels as a host library ([`super::HostDevice`]), and a recorder around another one that checks what is asked of it
//! ([`super::Recorder`]).

use std::marker::PhantomData;

use super::pinned::HostCopies;
use crate::KernelError;

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

/// What is known of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub memory: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// How it multiplies matrices of E4M3.
    pub fp8: Fp8,
    /// Whose matrix products it takes, with their version.
    pub products: String,
}

/// How a device multiplies matrices of E4M3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fp8 {
    /// Not at all.
    #[default]
    None,
    /// As they are; scales are a kernel's work afterwards.
    Plain,
    /// With the scales of their rows.
    Scaled,
}

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

/// Products with one weight, of all that lies together in a call, whose rows have the same bits: all those of the same value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alike {
    /// Whatever the number of their rows (I1).
    Always,
    /// Those of few rows: up to so many.
    UpTo(u32),
    /// Those of more.
    Many,
}

/// Bounds of few rows: a weight's bytes, tiles of outputs or the work itself are what takes time.
const FEW: [u32; 3] = [16, 64, 256];

impl Alike {
    /// The value of a product of so many rows that need not have the bits of one of any number.
    pub fn by_rows(rows: usize) -> Self {
        let few = FEW.into_iter().find(|&few| rows <= few as usize);
        few.map_or(Alike::Many, Alike::UpTo)
    }

    /// Rows for which they are done best.
    pub fn typical(self) -> u64 {
        match self {
            Alike::Always => 64,
            Alike::UpTo(rows) => u64::from(rows),
            Alike::Many => 4096,
        }
    }

    /// Rows by which an algorithm shows that it takes them all: small and odd ones, the bounds, and large ones; ascending.
    pub fn samples(self) -> &'static [u64] {
        match self {
            Alike::Always => &[1, 7, 16, 64, 255, 2048, 8192, 16_384],
            Alike::UpTo(16) => &[1, 7, 16],
            Alike::UpTo(64) => &[17, 40, 64],
            Alike::UpTo(_) => &[65, 96, 255, 256],
            Alike::Many => &[257, 1021, 4096, 8192, 16_384],
        }
    }
}

/// Of what type both operands of a product are.
#[derive(Clone, Copy, Debug)]
pub enum Operands<'a> {
    /// bf16.
    Bf16,
    /// E4M3, on a device that can ([`Fp8`]), with scales if it is one that applies them. Outputs and inputs are multiples of
    /// 16, and there is no bias.
    E4m3(Option<RowScales<'a>>),
}

/// What an output is multiplied with: its weight row's scale and its input row's.
#[derive(Clone, Copy, Debug)]
pub struct RowScales<'a> {
    /// `[outs]` f32.
    pub weight: Piece<'a>,
    /// `[rows]` f32.
    pub x: Piece<'a>,
}

/// Outputs and inputs of a product of E4M3 are multiples of this.
pub const FP8_MULTIPLE: usize = 16;

/// `out[r] = weight · x[r] (+ bias)`, summed in f32.
#[derive(Clone, Copy)]
pub struct Gemm<'a> {
    /// What the operands are.
    pub operands: Operands<'a>,
    /// `[outs, cols]`.
    pub weight: Piece<'a>,
    /// `[rows, cols]`.
    pub x: Piece<'a>,
    /// `[outs]` f32.
    pub bias: Option<Piece<'a>>,
    /// `[rows, outs]` f32, of which each row begins `stride` behind the one before.
    pub out: Piece<'a>,
    /// f32 from one row of `out` to the next, at least `outs`.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Outputs.
    pub outs: usize,
    /// Inputs.
    pub cols: usize,
    /// Whose bits its rows have.
    pub alike: Alike,
}

/// A GPU, or what stands in for one. Work is put into streams and done later; an error of the work may come with any later call.
pub trait Device: HostCopies {
    /// What is known of it.
    fn properties(&self) -> &Properties;
    /// Bytes of its memory that nobody has.
    fn free_memory(&self) -> Result<u64, KernelError>;
    /// Memory of `bytes` bytes, at least 1, aligned to 256.
    fn allocate(&self, bytes: usize) -> Result<Address, KernelError>;
    /// Gives memory back when all that uses it is done.
    fn free(&self, at: Address);
    /// The address at which the device sees memory of the host; [`Device::unmap`] ends it.
    ///
    /// # Safety
    /// The memory is there until then.
    unsafe fn map(&self, base: *mut u8, bytes: usize) -> Result<Address, KernelError>;
    /// The device sees the memory no longer. Comes when all that uses it is done.
    fn unmap(&self, base: *mut u8, at: Address);
    /// A new stream, which lives as long as the device.
    fn stream(&self) -> Result<Stream, KernelError>;
    /// A new event, which lives as long as the device.
    fn event(&self) -> Result<Event, KernelError>;
    /// The event is now what was put into the stream so far.
    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError>;
    /// What is put into the stream from now on comes after the event.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError>;
    /// Sets every byte.
    fn fill(&self, stream: Stream, to: Piece<'_>, byte: u8) -> Result<(), KernelError>;
    /// From the host, as many bytes as `from` has; it may change again when this returns.
    fn write(&self, stream: Stream, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError>;
    /// To the host, as many bytes as `to` has; waits for the stream.
    fn read(&self, stream: Stream, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError>;
    /// Encodes rows for the copy units of a device of compute capability 9.0 or later.
    fn tensor_map(&self, rows: &Rows<'_>) -> Result<TensorMap, KernelError>;
    /// Launches a kernel.
    ///
    /// # Safety
    /// `params` points to `bytes` bytes, the struct that the kernel takes, and the kernel launched so touches nothing but `touches`.
    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), KernelError>;
    /// A product. A row's bits depend on nothing but itself, the weight and [`Gemm::alike`]: not on the other rows.
    fn product(&self, stream: Stream, gemm: &Gemm<'_>) -> Result<(), KernelError>;
    /// Waits for all of a stream's work.
    fn synchronise(&self, stream: Stream) -> Result<(), KernelError>;
    /// What ended all work on it for good, as an access outside of memory does; waits for what is under way. Other failures are of one
    /// call.
    fn lost(&self) -> Option<KernelError> {
        None
    }
    /// What this thread puts into the stream from now on is kept and not done: fills, launches and products. Until the end it may copy
    /// nothing from or to the host, wait for nothing, and allocate and free no memory.
    fn begin_capture(&self, stream: Stream) -> Result<(), KernelError>;
    /// Ends it; what was kept. To be called also when something in between failed, and then it may fail, too.
    fn end_capture(&self, stream: Stream) -> Result<Graph, KernelError>;
    /// Does what was captured, with what memory holds by then.
    ///
    /// # Safety
    /// All memory that it touches has been there since.
    unsafe fn replay(&self, stream: Stream, graph: Graph) -> Result<(), KernelError>;
    /// A graph that is not launched again; launches under way are not disturbed.
    fn forget(&self, graph: Graph);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_alike_are_those_between_two_bounds_and_are_tried_there() {
        let kinds = [1, 16, 17, 64, 65, 256, 257, 1 << 20].map(Alike::by_rows);
        let few = |rows| [Alike::UpTo(rows); 2];
        assert_eq!(kinds, [few(16), few(64), few(256), [Alike::Many; 2]].as_flattened());
        for kind in kinds {
            assert_eq!(Alike::by_rows(kind.typical() as usize), kind);
            assert!(kind.samples().iter().all(|&rows| Alike::by_rows(rows as usize) == kind), "{kind:?}");
        }
        assert!(
            kinds.iter().all(|kind| Alike::Always.samples().iter().any(|&rows| Alike::by_rows(rows as usize) == *kind))
        );
    }
}
