//! The buffers of host memory: one anonymous mapping, page-aligned, so that direct I/O can read into it and write from it.
//!
//! # Aliasing
//! Buffers are shared between threads. The core says who may use which:
//! - Who has a [`Filling`](crate::Filling) writes the data of its buffer, and nobody else touches the buffer.
//! - The thread that carries out a read writes its buffer, and nobody else touches it.
//! - Otherwise data are only read: by those with a [`Reading`](crate::Reading), and by the one thread that carries out the buffer's write. That
//!   thread also writes the buffer's head, which nobody else reads.
//!
//! Each hand-over passes through the core's mutex, which orders the accesses.

use std::ptr::{self, NonNull};

use baton_kv_store::Buffer;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::OpenError;

#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    buffer_bytes: usize,
    buffers: usize,
}

// SAFETY: an address and two numbers, tied to no thread. Who may use which bytes is the module's aliasing contract.
unsafe impl Send for Memory {}
// SAFETY: as above; the methods that make references are unsafe.
unsafe impl Sync for Memory {}

impl Memory {
    /// `buffers` buffers of `buffer_bytes` bytes each, which is a multiple of a page. Pages are made when they are first touched.
    pub fn new(buffers: usize, buffer_bytes: usize) -> Result<Memory, OpenError> {
        let host = |cause: std::io::Error| OpenError::Host { doing: "map host memory", cause };
        let length = buffers.checked_mul(buffer_bytes).filter(|bytes| *bytes > 0 && isize::try_from(*bytes).is_ok());
        let length = length.ok_or_else(|| host(std::io::ErrorKind::OutOfMemory.into()))?;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no existing object.
        let address = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, prot, flags) };
        let address = address.map_err(|error| host(error.into()))?;
        let base = NonNull::new(address.cast()).ok_or_else(|| host(std::io::ErrorKind::OutOfMemory.into()))?;
        // Copies and direct I/O walk whole blocks: with large pages they look up fewer of them.
        // SAFETY: the range was mapped above; the advice changes no byte.
        if let Err(error) = unsafe { rustix::mm::madvise(address, length, Advice::LinuxHugepage) } {
            tracing::debug!(%error, "host memory has small pages");
        }
        Ok(Memory { base, buffer_bytes, buffers })
    }

    /// A range of a buffer.
    ///
    /// # Panics
    /// When it lies outside.
    fn at(&self, buffer: Buffer, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.buffer_bytes);
        assert!((buffer.0 as usize) < self.buffers && inside, "{length} bytes at {offset} of {buffer:?} lie outside");
        // SAFETY: the buffer and the range inside it lie in the mapping.
        unsafe { self.base.as_ptr().add(buffer.0 as usize * self.buffer_bytes + offset) }
    }

    /// Bytes of a buffer, to read.
    ///
    /// # Safety
    /// Nobody writes them meanwhile; see the module's aliasing contract.
    pub unsafe fn read(&self, buffer: Buffer, offset: usize, length: usize) -> &[u8] {
        // SAFETY: `at` has checked the range, and the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.at(buffer, offset, length), length) }
    }

    /// Bytes of a buffer, to write.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile; see the module's aliasing contract.
    #[allow(clippy::mut_from_ref, reason = "whose buffer it is, is decided by the core")]
    pub unsafe fn write(&self, buffer: Buffer, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: `at` has checked the range, and the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.at(buffer, offset, length), length) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, of which no reference is left: each borrows this value.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.buffers * self.buffer_bytes) };
        if let Err(error) = result {
            tracing::warn!(%error, "the KV store's host memory stays mapped");
        }
    }
}
