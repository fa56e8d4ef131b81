//! [`Nowhere`]: a device without memory, for tests of the calls that a device gets.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use baton_types::{MemoryKind, OpenedBy, PoolHandle, Registrable};

use super::device::{
    Address, Call, Device, Event, Gemm, Graph, HostCopies, Piece, Properties, Rows, Stream, TensorMap,
};
use super::sharing::SharingDevice;
use crate::KernelError;

/// A device that hands out addresses and does nothing. Reads from it give 0.
#[derive(Default)]
pub struct Nowhere {
    properties: Properties,
    next: AtomicU64,
    /// Pinned host memory, which is really allocated.
    pinned: Mutex<HashMap<NonNull<u8>, Layout>>,
}

// SAFETY: pinned memory is only allocated and freed here, never read or written.
unsafe impl Send for Nowhere {}
// SAFETY: as above.
unsafe impl Sync for Nowhere {}

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
    fn tensor_map(&self, _rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
        Ok(TensorMap::default())
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
    fn begin_capture(&self, _stream: Stream) -> Result<(), KernelError> {
        Ok(())
    }
    fn end_capture(&self, _stream: Stream) -> Result<Graph, KernelError> {
        Ok(Graph(self.next(4096) as usize))
    }
    unsafe fn replay(&self, _stream: Stream, _graph: Graph) -> Result<(), KernelError> {
        Ok(())
    }
    fn forget(&self, _graph: Graph) {}
}

impl HostCopies for Nowhere {
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError> {
        let none = KernelError::Memory { bytes };
        let Ok(layout) = Layout::from_size_align(bytes.max(1), 64) else { return Err(none) };
        // SAFETY: at least one byte.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(none)?;
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).insert(at, layout);
        Ok(at)
    }

    fn unpin(&self, at: NonNull<u8>) {
        if let Some(layout) = self.pinned.lock().unwrap_or_else(PoisonError::into_inner).remove(&at) {
            // SAFETY: `pin` allocated it with this layout, and it was removed from the list.
            unsafe { dealloc(at.as_ptr(), layout) };
        }
    }

    unsafe fn read_later(&self, _stream: Stream, _from: Piece<'_>, _to: NonNull<u8>) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn write_later(&self, _stream: Stream, _to: Piece<'_>, _from: NonNull<u8>) -> Result<(), KernelError> {
        Ok(())
    }

    fn settle(&self, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }
}

impl SharingDevice for Nowhere {
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError> {
        self.allocate(bytes)
    }
    fn export(&self, at: Address) -> Result<PoolHandle, KernelError> {
        Ok(PoolHandle { bytes: at.0.to_le_bytes().to_vec(), descriptor: None })
    }
    fn exported_as(&self, _at: Address) -> String {
        String::new()
    }
    fn import(&self, _handle: PoolHandle, bytes: usize) -> Result<(Address, OpenedBy), KernelError> {
        Ok((self.allocate(bytes)?, OpenedBy::Descriptor))
    }
    fn registrable(&self, at: Address) -> Result<Registrable, KernelError> {
        Ok(Registrable { address: at.0, kind: MemoryKind::Host })
    }
    fn see_foreign_writes(&self) -> Result<(), KernelError> {
        Ok(())
    }
    fn close(&self, _at: Address) {}
    fn is_done(&self, _event: Event) -> Result<bool, KernelError> {
        Ok(true)
    }
    unsafe fn notify(&self, _stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError> {
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        Ok(())
    }
}
