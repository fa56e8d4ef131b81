//! [`Nowhere`]: a device without memory, for tests of what is asked of one.

use std::sync::atomic::{AtomicU64, Ordering};

use super::device::{Address, Call, Device, Event, Gemm, Piece, Properties, Stream};
use crate::KernelError;

/// A device that has addresses and does nothing; what is read from it is 0.
#[derive(Default)]
pub struct Nowhere {
    properties: Properties,
    next: AtomicU64,
}

impl Nowhere {
    fn next(&self, by: u64) -> u64 {
        self.next.fetch_add(by, Ordering::Relaxed)
    }
}

impl Device for Nowhere {
    fn properties(&self) -> &Properties {
        &self.properties
    }
    fn free_memory(&self) -> Result<u64, KernelError> {
        Ok(u64::MAX)
    }
    fn allocate(&self, bytes: usize) -> Result<Address, KernelError> {
        Ok(Address(4096 + self.next((bytes as u64).next_multiple_of(4096))))
    }
    fn free(&self, _at: Address) {}
    unsafe fn map(&self, _base: *mut u8, bytes: usize) -> Result<Address, KernelError> {
        self.allocate(bytes)
    }
    fn unmap(&self, _base: *mut u8, _at: Address) {}
    fn stream(&self) -> Result<Stream, KernelError> {
        Ok(Stream(self.next(4096) as usize))
    }
    fn event(&self) -> Result<Event, KernelError> {
        Ok(Event(self.next(4096) as usize))
    }
    fn record(&self, _event: Event, _stream: Stream) -> Result<(), KernelError> {
        Ok(())
    }
    fn wait(&self, _stream: Stream, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }
    fn fill(&self, _stream: Stream, _to: Piece<'_>, _byte: u8) -> Result<(), KernelError> {
        Ok(())
    }
    fn write(&self, _stream: Stream, _to: Piece<'_>, _from: &[u8]) -> Result<(), KernelError> {
        Ok(())
    }
    fn read(&self, _stream: Stream, _from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError> {
        to.fill(0);
        Ok(())
    }
    unsafe fn launch(&self, _stream: Stream, _call: &Call<'_>) -> Result<(), KernelError> {
        Ok(())
    }
    fn product(&self, _stream: Stream, _gemm: &Gemm<'_>) -> Result<(), KernelError> {
        Ok(())
    }
    fn synchronise(&self, _stream: Stream) -> Result<(), KernelError> {
        Ok(())
    }
}
