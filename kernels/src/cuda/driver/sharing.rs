//! [`SharingDevice`] of the driver: CUDA's inter-process handles, pinned memory, and callbacks of streams.
//!
//! The driver's handle names a whole allocation, whose base may lie before the exported memory, so an exported handle carries the
//! offset too. A process cannot open a handle that it exported itself; it takes the address from the handle instead.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use baton_types::{MemoryKind, Registrable, random_u64};
use cudarc::driver::result::{self, device};
use cudarc::driver::sys;

use super::super::device::{Address, Device, Event, HostCopies, Piece, Stream};
use super::super::sharing::SharingDevice;
use super::{Driver, failed, no_memory};
use crate::KernelError;

/// Granularity of the driver's allocations, in bytes. A pool that fills whole units shares none with other memory, which importers
/// could see otherwise.
const GRANULARITY: usize = 2 << 20;

/// An exported handle: the exporting process, its device, the memory's address there, its offset in the allocation, and the driver's
/// own handle.
struct Handle {
    process: u64,
    device: i32,
    at: u64,
    offset: u64,
    opaque: [u8; 64],
}

const BYTES: usize = 8 + 4 + 8 + 8 + 64;

/// A random number that tells this process from all others.
fn this_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(random_u64)
}

impl Handle {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BYTES);
        out.extend(self.process.to_le_bytes());
        out.extend(self.device.to_le_bytes());
        out.extend(self.at.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.opaque);
        out
    }

    fn parse(bytes: &[u8]) -> Option<Handle> {
        let (process, rest) = bytes.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (at, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        Some(Handle {
            process: u64::from_le_bytes(*process),
            device: i32::from_le_bytes(*device),
            at: u64::from_le_bytes(*at),
            offset: u64::from_le_bytes(*offset),
            opaque: *<&[u8; 64]>::try_from(rest).ok()?,
        })
    }
}

fn refused(why: impl Into<String>) -> KernelError {
    KernelError::Device { operation: "opening a peer's memory".to_owned(), why: why.into() }
}

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
        self.allocate(bytes.checked_next_multiple_of(GRANULARITY).ok_or(KernelError::Memory { bytes })?)
    }

    fn export(&self, at: Address) -> Result<Vec<u8>, KernelError> {
        self.current()?;
        let export = failed("exporting the pool's memory");
        let (mut base, mut size) = (0, 0);
        // SAFETY: the pointers are valid for the answers.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, at.0) }.result().map_err(&export)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is valid for the answer, and `base` is the base of an allocation.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, base) }.result().map_err(&export)?;
        let (process, device) = (this_process(), self.device);
        let opaque = handle.reserved.map(|byte| byte as u8);
        Ok(Handle { process, device, at: at.0, offset: at.0 - base, opaque }.encode())
    }

    fn import(&self, handle: &[u8], bytes: usize) -> Result<Address, KernelError> {
        self.current()?;
        let handle = Handle::parse(handle).ok_or_else(|| refused("what the peer sent is no handle"))?;
        if handle.process == this_process() {
            let same = handle.device == self.device;
            return same.then_some(Address(handle.at)).ok_or_else(|| refused("it is another GPU's of this process"));
        }
        let mut opened = self.imports();
        let raw = sys::CUipcMemHandle { reserved: handle.opaque.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the pointer is valid for the answer; the driver returns an error for an invalid handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, raw, flags) }
            .result()
            .map_err(failed("opening a peer's memory"))?;
        let (mut start, mut size) = (0, 0);
        // SAFETY: the pointers are valid for the answers.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut size, base) }.result();
        let room = (size as u64).checked_sub(handle.offset).filter(|room| *room >= bytes as u64);
        if found.is_err() || room.is_none() {
            // SAFETY: it was opened just now, and nothing uses it.
            let _ = unsafe { sys::cuIpcCloseMemHandle(base) };
            return Err(refused(format!("it has {size} bytes, {bytes} from {} on are needed", handle.offset)));
        }
        let at = Address(base + handle.offset);
        // An allocation that is opened twice has the same address both times and must be closed twice.
        opened.push((at, base));
        Ok(at)
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
        let mut opened = self.imports();
        // An address that is not in the list is this process's own memory, which was not opened.
        if let Some(place) = opened.iter().position(|(opened, _)| *opened == at) {
            let (_, base) = opened.swap_remove(place);
            if self.current().is_ok() {
                // SAFETY: `import` opened it, and each opening is closed once. It fails only when the context is broken, which other calls
                // report.
                let _ = unsafe { sys::cuIpcCloseMemHandle(base) };
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_whose_it_is_and_nothing_else_is_one() {
        let handle = Handle { process: this_process(), device: 1, at: 1 << 40, offset: 512, opaque: [7; 64] };
        let bytes = handle.encode();
        let read = Handle::parse(&bytes).unwrap();
        assert_eq!((read.process, read.device, read.at, read.offset), (this_process(), 1, 1 << 40, 512));
        assert_eq!((bytes.len(), read.opaque), (BYTES, [7; 64]));
        for wrong in [&bytes[..BYTES - 1], &[], &[bytes.as_slice(), &[0]].concat()] {
            assert!(Handle::parse(wrong).is_none());
        }
    }
}
