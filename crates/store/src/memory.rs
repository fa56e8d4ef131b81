//! The slots of host memory: one anonymous mapping, page-aligned, so that direct I/O can read into it and write from it.
//!
//! # Aliasing
//! Slots are shared between threads. The core says who may use which:
//! - Who has a [`Filling`](crate::Filling) writes the data of its slot, and nobody else touches the slot.
//! - The thread that carries out a read writes its slot, and nobody else touches it.
//! - Otherwise data are only read: by those with a [`Reading`](crate::Reading), and by the one thread that carries out the slot's write. That
//!   thread also writes the slot's head, which nobody else reads.
//!
//! Each hand-over passes through the core's mutex, which orders the accesses.

use std::ptr::{self, NonNull};

use baton_kv_store::Slot;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::OpenError;

#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    slot_bytes: usize,
    slots: usize,
}

// SAFETY: an address and two numbers, tied to no thread. Who may use which bytes is the module's aliasing contract.
unsafe impl Send for Memory {}
// SAFETY: as above; the methods that make references are unsafe.
unsafe impl Sync for Memory {}

impl Memory {
    /// `slots` slots of `slot_bytes` bytes each, which is a multiple of a page. Pages are made when they are first touched.
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Memory, OpenError> {
        let host = |cause: std::io::Error| OpenError::Host { doing: "map host memory", cause };
        let length = slots.checked_mul(slot_bytes).filter(|bytes| *bytes > 0 && isize::try_from(*bytes).is_ok());
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
        Ok(Memory { base, slot_bytes, slots })
    }

    /// A range of a slot.
    ///
    /// # Panics
    /// When it lies outside.
    fn at(&self, slot: Slot, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.slot_bytes);
        assert!((slot.0 as usize) < self.slots && inside, "{length} bytes at {offset} of {slot:?} lie outside");
        // SAFETY: the slot and the range inside it lie in the mapping.
        unsafe { self.base.as_ptr().add(slot.0 as usize * self.slot_bytes + offset) }
    }

    /// Bytes of a slot, to read.
    ///
    /// # Safety
    /// Nobody writes them meanwhile; see the module's aliasing contract.
    pub unsafe fn read(&self, slot: Slot, offset: usize, length: usize) -> &[u8] {
        // SAFETY: `at` has checked the range, and the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.at(slot, offset, length), length) }
    }

    /// Bytes of a slot, to write.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile; see the module's aliasing contract.
    #[allow(clippy::mut_from_ref, reason = "whose slot it is, is decided by the core")]
    pub unsafe fn write(&self, slot: Slot, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: `at` has checked the range, and the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.at(slot, offset, length), length) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, of which no reference is left: each borrows this value.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.slots * self.slot_bytes) };
        if let Err(error) = result {
            tracing::warn!(%error, "the KV store's host memory stays mapped");
        }
    }
}
