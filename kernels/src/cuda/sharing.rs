//! What a pool needs of a device to be reached from outside: memory that other processes open, copies that the host does not wait for,
//! pinned host memory on their way, and a word when they are done.
//!
//! The trait [`SharingDevice`] has the calls, [`Imported`] and [`Pinned`] their ends. Beside [`Device`], which is all that computing
//! needs. Who uses them is [`super::SharedPool`].

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Address, Device, Event, Piece, Stream};
use crate::KernelError;

/// A device whose memory can be handed to another process.
pub trait SharingDevice: Device {
    /// Memory as of [`Device::allocate`] that can be exported, and has nothing of anybody else's near it.
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError>;
    /// Bytes by which a process of this host imports memory of [`SharingDevice::allocate_shared`]. It may not be freed while others have it
    /// imported.
    fn export(&self, at: Address) -> Result<Vec<u8>, KernelError>;
    /// Another process's memory of at least `bytes` bytes, or this process's own, until [`SharingDevice::close`].
    ///
    /// # Errors
    /// When the handle is none, its process is gone, or its device cannot be reached from this one.
    fn import(&self, handle: &[u8], bytes: usize) -> Result<Address, KernelError>;
    /// Ends an import. Comes when all that uses it is done.
    fn close(&self, at: Address);
    /// Host memory that copies reach without a copy of the driver's in between; [`SharingDevice::unpin`] ends it.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError>;
    /// Gives pinned memory back. Comes when all that uses it is done.
    fn unpin(&self, at: NonNull<u8>);
    /// As [`Device::read`] without waiting.
    ///
    /// # Safety
    /// `to` has as many bytes as `from`, is pinned, and is touched by nobody before the stream has done this.
    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError>;
    /// As [`Device::write`] of as many bytes as `to` has, without waiting.
    ///
    /// # Safety
    /// `from` has as many, is pinned, and is not written before the stream has done this.
    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError>;
    /// Whether all that was put into the stream before the event's last record is done. Never waits.
    fn is_done(&self, event: Event) -> Result<bool, KernelError>;
    /// Adds 1 to an eventfd once all that was put into the stream so far is done. After a failure of the device it may stay silent.
    ///
    /// # Safety
    /// The descriptor stays open until then.
    unsafe fn notify(&self, stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError>;
}

/// Another process's memory, closed when it is dropped, which comes after all that uses it.
pub(super) struct Imported<D: SharingDevice> {
    device: Arc<D>,
    at: Address,
    bytes: usize,
}

impl<D: SharingDevice> Imported<D> {
    pub fn open(device: &Arc<D>, handle: &[u8], bytes: usize) -> Result<Self, KernelError> {
        let at = device.import(handle, bytes)?;
        Ok(Imported { device: Arc::clone(device), at, bytes })
    }

    /// `bytes` bytes from `from` on, if they are all inside.
    pub fn piece(&self, from: usize, bytes: usize) -> Option<Piece<'_>> {
        let end = from.checked_add(bytes)?;
        (end <= self.bytes).then(|| Piece::new(self.at.plus(from), bytes))
    }

    /// All of it.
    pub fn whole(&self) -> Piece<'_> {
        Piece::new(self.at, self.bytes)
    }
}

impl<D: SharingDevice> Drop for Imported<D> {
    fn drop(&mut self) {
        self.device.close(self.at);
    }
}

/// Pinned host memory, given back when it is dropped, which comes after all that uses it.
pub(super) struct Pinned<D: SharingDevice> {
    device: Arc<D>,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory that this value alone owns; who may touch it while copies are under way is told by `&` and `&mut` of its owner.
unsafe impl<D: SharingDevice> Send for Pinned<D> {}
// SAFETY: as above.
unsafe impl<D: SharingDevice> Sync for Pinned<D> {}

impl<D: SharingDevice> Pinned<D> {
    /// Zeroed.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        let bytes = bytes.max(1);
        let at = device.pin(bytes)?;
        // SAFETY: as many bytes as were asked for, and nobody else's.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Pinned { device: Arc::clone(device), at, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` bytes from `from` on, to copy into or out of.
    ///
    /// # Panics
    /// When they are not all inside.
    pub fn at(&self, from: usize, bytes: usize) -> NonNull<u8> {
        let inside = from.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes from {from} on, of pinned memory of {}", self.bytes);
        // SAFETY: inside, as was just seen.
        unsafe { self.at.add(from) }
    }

    /// What is in it.
    ///
    /// # Safety
    /// No copy into it is under way.
    pub unsafe fn get(&self) -> &[u8] {
        // SAFETY: initialised when it was made, and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }

    /// The same, to be changed.
    ///
    /// # Safety
    /// No copy into it or out of it is under way.
    pub unsafe fn get_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `get`, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl<D: SharingDevice> Drop for Pinned<D> {
    fn drop(&mut self) {
        self.device.unpin(self.at);
    }
}
