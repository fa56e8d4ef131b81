//! The trait [`Device`]: memory, streams, events, launches and products, as thin as a driver's own calls.
//!
//! Below [`super::CudaBackend`], which knows what is computed; a device knows addresses and kernels by name. Three of them: the driver,
//! the kernels as a host library ([`super::HostDevice`]), and a recorder around another one that checks what is asked of it
//! ([`super::Recorder`]).

use std::ptr::NonNull;

pub use super::gemm::{Alike, FP8_MULTIPLE, Fp8, Gemm, Operands, RowScales};
pub use super::handles::{Access, Address, Call, Event, Graph, Launch, Piece, Rows, Stream, TensorMap};
use crate::KernelError;

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

/// Copies that the host does not wait for. A part of [`Device`] by itself, since a pool's transfers use it too.
pub trait HostCopies: Send + Sync + 'static {
    /// Host memory that copies reach without a copy of the driver's in between; [`HostCopies::unpin`] ends it.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError>;
    /// Gives pinned memory back. Comes when all that uses it is done.
    fn unpin(&self, at: NonNull<u8>);
    /// As [`Device::read`] without waiting.
    ///
    /// # Safety
    /// `to` has as many bytes as `from`, is pinned, and is touched by nobody before the stream has done this.
    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError>;
    /// As [`Device::write`] of as many bytes as `to` has, without waiting.
    ///
    /// # Safety
    /// `from` has as many, is pinned, and is not written before the stream has done this.
    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError>;
    /// Waits, on the host, for all that was put into the stream before the event's last record.
    fn settle(&self, event: Event) -> Result<(), KernelError>;
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
