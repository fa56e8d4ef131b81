//! [`SharingDevice`] of the host: [`super::memory`] stands in for a driver's memory. Copies are done when they are asked for.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use baton_types::{MemoryKind, OpenedBy, PoolHandle, Registrable};

use super::super::device::{Address, Device, Event, HostCopies, Piece, Stream};
use super::super::sharing::SharingDevice;
use super::HostDevice;
use crate::KernelError;

impl HostCopies for HostDevice {
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError> {
        let at = self.allocate(bytes)?;
        NonNull::new(super::host(at)).ok_or(KernelError::Memory { bytes })
    }

    fn unpin(&self, at: NonNull<u8>) {
        self.free(Address(at.as_ptr().expose_provenance() as u64));
    }

    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError> {
        self.captures().refuse("read", Some(stream))?;
        // SAFETY: a piece lies inside memory that is still allocated; the caller vouches for `to`.
        unsafe { std::ptr::copy_nonoverlapping(super::host(from.at()), to.as_ptr(), from.bytes()) };
        Ok(())
    }

    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError> {
        self.captures().refuse("write", Some(stream))?;
        // SAFETY: as in `read_later`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), super::host(to.at()), to.bytes()) };
        Ok(())
    }

    fn settle(&self, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }
}

impl SharingDevice for HostDevice {
    /// Fills the memory with ones, as `allocate` does.
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError> {
        let at = self.shared().allocate(&self.shareable, bytes)?;
        // SAFETY: it was allocated just now, and nobody else uses it.
        unsafe { super::host(at).write_bytes(0xff, bytes) };
        Ok(at)
    }

    fn export(&self, at: Address) -> Result<PoolHandle, KernelError> {
        self.shared().export(&self.shareable, at)
    }

    fn exported_as(&self, at: Address) -> String {
        self.shared().exported_as(at)
    }

    fn import(&self, handle: PoolHandle, bytes: usize) -> Result<(Address, OpenedBy), KernelError> {
        self.shared().import(&self.shareable, handle, bytes)
    }

    fn registrable(&self, at: Address) -> Result<Registrable, KernelError> {
        Ok(Registrable { address: at.0, kind: MemoryKind::Host })
    }

    /// Nothing to do: host and device share one memory.
    fn see_foreign_writes(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn close(&self, at: Address) {
        self.shared().close(&self.shareable, at);
    }

    fn is_done(&self, _event: Event) -> Result<bool, KernelError> {
        Ok(true)
    }

    unsafe fn notify(&self, _stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError> {
        let rung = rustix::io::write(fd, &1u64.to_ne_bytes());
        rung.map(drop).map_err(|error| KernelError::Device { operation: "callback".to_owned(), why: error.to_string() })
    }
}
