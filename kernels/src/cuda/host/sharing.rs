//! [`SharingDevice`] of the host: shareable memory is an anonymous file (memfd). Another process opens it through
//! `/proc/<process>/fd/<number>`.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use baton_types::{MemoryKind, Registrable};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::super::device::{Address, Device, Event, HostCopies, Piece, Stream};
use super::super::sharing::SharingDevice;
use super::HostDevice;
use crate::KernelError;

/// Mapped anonymous files of this process and of others, by address.
#[derive(Default)]
pub(super) struct Shared(HashMap<Address, Mapping>);

/// A mapped file, unmapped when dropped.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// The file, if this process made it.
    file: Option<OwnedFd>,
}

// SAFETY: it is only an address and a length; users of the memory see to it who touches it.
unsafe impl Send for Mapping {}

impl Shared {
    /// Unmaps the memory at this address; returns whether there was any.
    pub(super) fn forget(&mut self, at: Address) -> bool {
        self.0.remove(&at).is_some()
    }

    fn insert(&mut self, mapping: Mapping) -> Address {
        let at = Address(mapping.base.as_ptr().expose_provenance() as u64);
        self.0.insert(at, mapping);
        at
    }
}

impl Mapping {
    fn of(fd: BorrowedFd<'_>, bytes: usize, file: Option<OwnedFd>) -> Option<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0) };
        Some(Mapping { base: NonNull::new(at.ok()?.cast())?, bytes, file })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `of` mapped it, and nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn refused(why: impl Into<String>) -> KernelError {
    KernelError::Device { operation: "opening a peer's memory".to_owned(), why: why.into() }
}

/// Reads a handle: process, file descriptor and bytes.
fn parse(handle: &[u8]) -> Option<(u32, u32, u64)> {
    let (process, rest) = handle.split_first_chunk()?;
    let (fd, rest) = rest.split_first_chunk()?;
    let bytes = rest.try_into().ok()?;
    Some((u32::from_le_bytes(*process), u32::from_le_bytes(*fd), u64::from_le_bytes(bytes)))
}

fn open(process: u32, fd: u32) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/fd/{fd}"))
}

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
        let none = || KernelError::Memory { bytes };
        let file = rustix::fs::memfd_create("baton-device", MemfdFlags::CLOEXEC).map_err(|_| none())?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(|_| none())?;
        let fd = file.try_clone().map_err(|_| none())?;
        let mapping = Mapping::of(fd.as_fd(), bytes, Some(file)).ok_or_else(none)?;
        // SAFETY: it was mapped just now, and nobody else uses it.
        unsafe { mapping.base.write_bytes(0xff, bytes) };
        Ok(self.shared().insert(mapping))
    }

    fn export(&self, at: Address) -> Result<Vec<u8>, KernelError> {
        let shared = self.shared();
        let found = shared.0.get(&at).and_then(|mapping| Some((mapping.file.as_ref()?, mapping.bytes)));
        let (file, bytes) = found.ok_or_else(|| refused("this memory was not made to be shared"))?;
        let mut handle = std::process::id().to_le_bytes().to_vec();
        handle.extend((file.as_raw_fd() as u32).to_le_bytes());
        handle.extend((bytes as u64).to_le_bytes());
        Ok(handle)
    }

    fn import(&self, handle: &[u8], bytes: usize) -> Result<Address, KernelError> {
        let (process, fd, size) = parse(handle).ok_or_else(|| refused("what the peer sent is no handle"))?;
        let file = open(process, fd).map_err(|error| refused(format!("process {process}: {error}")))?;
        let there = file.metadata().map_err(|error| refused(error.to_string()))?.len().min(size);
        if there < bytes as u64 || bytes == 0 {
            return Err(refused(format!("it has {there} bytes, {bytes} are needed")));
        }
        let mapping = Mapping::of(file.as_fd(), bytes, None).ok_or_else(|| refused("it cannot be mapped"))?;
        Ok(self.shared().insert(mapping))
    }

    fn registrable(&self, at: Address) -> Result<Registrable, KernelError> {
        Ok(Registrable { address: at.0, kind: MemoryKind::Host })
    }

    /// Nothing to do: host and device share one memory.
    fn see_foreign_writes(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn close(&self, at: Address) {
        self.shared().forget(at);
    }

    fn is_done(&self, _event: Event) -> Result<bool, KernelError> {
        Ok(true)
    }

    unsafe fn notify(&self, _stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError> {
        let rung = rustix::io::write(fd, &1u64.to_ne_bytes());
        rung.map(drop).map_err(|error| KernelError::Device { operation: "callback".to_owned(), why: error.to_string() })
    }
}
