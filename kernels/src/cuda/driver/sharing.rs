//! [`SharingDevice`] of the driver: memory that processes share, pinned memory, and callbacks of streams.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;

use baton_types::{MemoryKind, OpenedBy, PoolHandle, Registrable};
use cudarc::driver::result::{self, device};
use cudarc::driver::sys;

use super::super::device::{Address, Event, HostCopies, Piece, Stream};
use super::super::sharing::SharingDevice;
use super::{Driver, failed, no_memory};
use crate::KernelError;

/// The callback that a stream runs. It must not call CUDA.
unsafe extern "C" fn ring(fd: *mut c_void) {
    // SAFETY: the caller of `notify` keeps the descriptor open until the stream has run this.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.addr() as RawFd) };
    // The write fails only when the counter is full, and then the descriptor is readable already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

impl HostCopies for Driver {
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError> {
        self.current()?;
        // SAFETY: nobody else has the new memory.
        let at = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.map_err(no_memory(bytes))?;
        NonNull::new(at.cast()).ok_or(KernelError::Memory { bytes })
    }

    fn unpin(&self, at: NonNull<u8>) {
        if self.current().is_ok() {
            // SAFETY: `pin` allocated it, and it is freed once.
            let _ = unsafe { result::free_host(at.as_ptr().cast()) };
        }
    }

    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError> {
        self.refuse_captured("copy from the device", stream)?;
        let raw = self.raw(stream)?;
        // SAFETY: a piece lies inside memory that is still allocated; the caller vouches for `to`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from.at().0, from.bytes(), raw) }
            .result()
            .map_err(failed("copy from the device"))
    }

    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError> {
        self.refuse_captured("copy to the device", stream)?;
        let raw = self.raw(stream)?;
        // SAFETY: as in `read_later`.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to.at().0, from.as_ptr().cast(), to.bytes(), raw) }
            .result()
            .map_err(failed("copy to the device"))
    }

    fn settle(&self, event: Event) -> Result<(), KernelError> {
        self.current()?;
        let event = self.raw_event(event)?;
        // SAFETY: an event lives as long as `self`.
        unsafe { sys::cuEventSynchronize(event) }.result().map_err(failed("the work so far"))
    }
}

impl SharingDevice for Driver {
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError> {
        self.shared().allocate(self, bytes)
    }

    fn export(&self, at: Address) -> Result<PoolHandle, KernelError> {
        self.shared().export(self, at)
    }

    fn exported_as(&self, at: Address) -> String {
        self.shared().exported_as(at)
    }

    fn import(&self, handle: PoolHandle, bytes: usize) -> Result<(Address, OpenedBy), KernelError> {
        self.shared().import(self, handle, bytes)
    }

    fn registrable(&self, at: Address) -> Result<Registrable, KernelError> {
        self.current()?;
        Ok(Registrable { address: at.0, kind: MemoryKind::Cuda })
    }

    fn see_foreign_writes(&self) -> Result<(), KernelError> {
        use sys::CUdevice_attribute as Attribute;
        let of = |attribute| {
            // SAFETY: the device that this driver opened.
            unsafe { device::get_attribute(self.device, attribute) }.map_err(failed("device"))
        };
        // Nothing to do if such writes are ordered by themselves, or if the host cannot flush them. In the second case digests find what
        // has not arrived yet.
        let options = of(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)? as u32;
        let host = sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as u32;
        if of(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)? > 0 || options & host == 0 {
            return Ok(());
        }
        self.current()?;
        let target = sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the context is current.
        unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) }
            .result()
            .map_err(failed("waiting for what a network's card has written"))
    }

    fn close(&self, at: Address) {
        self.shared().close(self, at);
    }

    fn is_done(&self, event: Event) -> Result<bool, KernelError> {
        self.current()?;
        let event = self.raw_event(event)?;
        // SAFETY: an event lives as long as `self`.
        match unsafe { sys::cuEventQuery(event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(failed("the work so far")),
        }
    }

    unsafe fn notify(&self, stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError> {
        let raw = self.raw(stream)?;
        let fd = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the stream lives as long as `self`; the caller keeps the descriptor open.
        unsafe { sys::cuLaunchHostFunc(raw, Some(ring), fd) }.result().map_err(failed("callback"))
    }
}
