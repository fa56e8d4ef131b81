//! [`Queue`]: one stream of a device, and the calls that put a backend's work into it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::device::{Access, Call, Device, Gemm, Graph, Piece, Stream};
use super::driver::Driver;
use super::memory::{Freed, Memory};
use super::params::{LogitEntry, Params, SampleRow, Sampled};
use crate::KernelError;

/// One stream of a device.
pub(super) struct Queue<D: Device> {
    pub device: Arc<D>,
    stream: Stream,
    freed: Freed,
}

/// Numbers, and structs of numbers without padding. Any bytes are a valid value.
pub(super) trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for f32 {}
impl Plain for SampleRow {}
impl Plain for LogitEntry {}
impl Plain for Sampled {}

pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding, and any byte is a valid u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are a valid value of a `Plain` type.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

impl<D: Device> Queue<D> {
    pub fn new(device: Arc<D>) -> Result<Self, KernelError> {
        let stream = device.stream()?;
        Ok(Queue { device, stream, freed: Freed::default() })
    }

    pub fn stream(&self) -> Stream {
        self.stream
    }

    pub fn memory(&self, bytes: usize) -> Result<Memory<D>, KernelError> {
        Memory::counted(&self.device, bytes, Arc::clone(&self.freed))
    }

    /// Number of freed allocations among those that this queue made.
    pub fn freed(&self) -> u64 {
        self.freed.load(Ordering::Relaxed)
    }

    /// Makes `memory` at least `bytes` bytes large. Memory that is too small is replaced, and its contents are lost. A backend that has
    /// reserved enough allocates nothing here.
    pub fn at_least(&self, memory: &mut Option<Memory<D>>, bytes: usize) -> Result<(), KernelError> {
        if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // The old memory is freed first, so that both need not fit at once. Freeing waits for the work that uses it.
            *memory = None;
            *memory = Some(self.memory(bytes)?);
        }
        Ok(())
    }

    pub fn fill(&self, to: Piece<'_>, byte: u8) -> Result<(), KernelError> {
        if to.bytes() == 0 { Ok(()) } else { self.device.fill(self.stream, to, byte) }
    }

    pub fn write<T: Plain>(&self, to: Piece<'_>, from: &[T]) -> Result<(), KernelError> {
        self.write_bytes(to, bytes_of(from))
    }

    pub fn write_bytes(&self, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError> {
        if from.is_empty() { Ok(()) } else { self.device.write(self.stream, to, from) }
    }

    /// Waits for all work put in before.
    pub fn read(&self, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError> {
        if to.is_empty() { Ok(()) } else { self.device.read(self.stream, from, to) }
    }

    /// Launches a kernel. Its parameters contain only addresses of `touches`. An empty grid is not launched.
    pub fn launch<P: Params>(
        &self,
        kernel: &'static str,
        params: &P,
        touches: &[Access<'_>],
    ) -> Result<(), KernelError> {
        let launch = params.launch();
        if launch.is_empty() {
            return Ok(());
        }
        let call = Call { kernel, launch, params: (&raw const *params).cast(), bytes: size_of::<P>(), touches };
        // SAFETY: `Params` are laid out as the kernel's struct; callers take every address and size in them from the pieces in `touches`.
        unsafe { self.device.launch(self.stream, &call) }
    }

    pub fn product(&self, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let floats = gemm.rows.saturating_sub(1) * gemm.stride + gemm.outs;
        assert!(
            gemm.stride >= gemm.outs && (gemm.rows == 0 || gemm.out.bytes() == floats * size_of::<f32>()),
            "rows of results"
        );
        if gemm.rows == 0 { Ok(()) } else { self.device.product(self.stream, gemm) }
    }

    pub fn synchronise(&self) -> Result<(), KernelError> {
        self.device.synchronise(self.stream)
    }

    pub fn begin_capture(&self) -> Result<(), KernelError> {
        self.device.begin_capture(self.stream)
    }

    pub fn end_capture(&self) -> Result<Graph, KernelError> {
        self.device.end_capture(self.stream)
    }

    /// Launches a graph. Returns an error if [`Queue::freed`] is no longer `freed`, its value at the capture: memory was freed since.
    pub fn replay(&self, graph: Graph, freed: u64) -> Result<(), KernelError> {
        if freed != self.freed() {
            let (operation, why) = ("graph".to_owned(), "memory has gone since it was captured".to_owned());
            return Err(KernelError::Device { operation, why });
        }
        // SAFETY: captured launches touch memory that this queue has made, none of which was freed, or a pool, which the backend keeps.
        unsafe { self.device.replay(self.stream, graph) }
    }
}

impl Queue<Driver> {
    /// The driver's handle of the stream, for NVIDIA's libraries. The device's context is current on this thread afterwards.
    pub fn raw(&self) -> Result<*mut std::ffi::c_void, KernelError> {
        Ok(self.device.raw(self.stream)?.cast())
    }
}
