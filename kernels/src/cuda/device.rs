//! The trait [`Device`]: memory, streams, events, launches and products, as thin as a driver's own calls.
//!
//! It stands below [`super::CudaBackend`], which knows what is computed; a device knows only addresses and names of kernels.
//! The implementations:
//!
//! - the driver ([`super::Driver`]);
//! - the kernels compiled as a host library ([`super::HostDevice`]);
//! - a device without memory that computes nothing ([`super::Nowhere`]);
//! - a recorder around another device, which checks every call ([`super::Recorder`]).

use std::ptr::NonNull;

pub use super::gemm::{Alike, FP8_MULTIPLE, Fp8, Gemm, Operands, RowScales};
pub use super::handles::{Access, Address, Call, Event, Graph, Launch, Piece, Rows, Stream, TensorMap};
use crate::KernelError;

/// Properties of a device.
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
    /// How the device multiplies matrices of E4M3.
    pub fp8: Fp8,
    /// The library that computes matrix products, with its version.
    pub products: String,
    /// Its id, the same in all processes and tools; `None`: it has none.
    pub id: Option<[u8; 16]>,
}

/// Copies that the host does not wait for. This part of [`Device`] is a trait of its own, since a pool's transfers use it too.
pub trait HostCopies: Send + Sync + 'static {
    /// Allocates pinned host memory, which the device copies from and to without an extra copy by the driver. [`HostCopies::unpin`]
    /// frees it.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError>;
    /// Frees pinned memory. To be called only once all work that uses it is done.
    fn unpin(&self, at: NonNull<u8>);
    /// As [`Device::read`], but without waiting.
    ///
    /// # Safety
    /// `to` has as many bytes as `from`, is pinned, and nobody touches it before the stream has done the copy.
    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError>;
    /// As [`Device::write`] of as many bytes as `to` has, but without waiting.
    ///
    /// # Safety
    /// `from` has as many bytes as `to`, is pinned, and nobody writes to it before the stream has done the copy.
    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError>;
    /// Blocks the host until the work that was in the stream at the event's last record is done.
    fn settle(&self, event: Event) -> Result<(), KernelError>;
}

/// A GPU, or a stand-in for one. Work is put into streams and done later. Any later call may return an error of earlier work.
pub trait Device: HostCopies {
    /// Properties of the device.
    fn properties(&self) -> &Properties;
    /// Free bytes of its memory.
    fn free_memory(&self) -> Result<u64, KernelError>;
    /// Allocates `bytes` bytes, at least 1, aligned to 256.
    fn allocate(&self, bytes: usize) -> Result<Address, KernelError>;
    /// Waits for the work that uses the memory, then frees it.
    fn free(&self, at: Address);
    /// Maps host memory into the device and returns the address it has there. [`Device::unmap`] ends the mapping.
    ///
    /// # Safety
    /// The memory stays valid until it is unmapped.
    unsafe fn map(&self, base: *mut u8, bytes: usize) -> Result<Address, KernelError>;
    /// Ends a mapping. To be called only once all work that uses the memory is done.
    fn unmap(&self, base: *mut u8, at: Address);
    /// Makes a stream, which lives as long as the device.
    fn stream(&self) -> Result<Stream, KernelError>;
    /// Makes an event, which lives as long as the device.
    fn event(&self) -> Result<Event, KernelError>;
    /// Records the event: from now on it stands for all work put into the stream so far.
    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError>;
    /// Makes the stream wait: work put into it from now on runs after the work that the event stands for.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError>;
    /// Sets every byte of a piece to `byte`.
    fn fill(&self, stream: Stream, to: Piece<'_>, byte: u8) -> Result<(), KernelError>;
    /// Copies `from` to the device. `from` may change again when this returns.
    fn write(&self, stream: Stream, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError>;
    /// Waits for the stream and copies as many bytes as `to` has to the host.
    fn read(&self, stream: Stream, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError>;
    /// Encodes rows as a tensor map, for the copy units of a device of compute capability 9.0 or later.
    fn tensor_map(&self, rows: &Rows<'_>) -> Result<TensorMap, KernelError>;
    /// Launches a kernel.
    ///
    /// # Safety
    /// `call.params` points to `call.bytes` bytes, the struct that the kernel takes, and the kernel touches no memory but `call.touches`.
    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), KernelError>;
    /// A matrix product. A result row's bits depend only on its input row, the weight and [`Gemm::alike`], not on the other rows.
    fn product(&self, stream: Stream, gemm: &Gemm<'_>) -> Result<(), KernelError>;
    /// Blocks the host until all of a stream's work is done.
    fn synchronise(&self, stream: Stream) -> Result<(), KernelError>;
    /// The error that made the device unusable for good, such as an access outside of memory; None while it is usable. Waits for
    /// work under way. Other failures concern one call only.
    fn lost(&self) -> Option<KernelError> {
        None
    }
    /// Starts a capture: fills, launches and products that this thread puts into the stream from now on are recorded, not done. Until
    /// [`Device::end_capture`] the thread must not copy from or to the host, wait, or allocate or free memory.
    fn begin_capture(&self, stream: Stream) -> Result<(), KernelError>;
    /// Ends a capture and returns the recorded work. It must also be called after a failure during the capture; then it may fail, too.
    fn end_capture(&self, stream: Stream) -> Result<Graph, KernelError>;
    /// Runs the captured work on the present contents of memory.
    ///
    /// # Safety
    /// No memory that the work touches was freed since the capture.
    unsafe fn replay(&self, stream: Stream, graph: Graph) -> Result<(), KernelError>;
    /// Frees a graph that is not launched again. Launches under way still complete.
    fn forget(&self, graph: Graph);
}
