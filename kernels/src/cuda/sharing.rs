//! What a pool needs of a device to be reached from outside: memory that other processes open, and a word when copies are done.
//!
//! The trait [`SharingDevice`] has the calls, [`Imported`] their end. Beside [`Device`], which is all that computing needs. Who uses them
//! is [`super::SharedPool`].

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use baton_types::Registrable;

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
    /// Where this memory lies for a library that sends and receives over a network, which the calling thread may use for it from now on.
    fn registrable(&self, at: Address) -> Result<Registrable, KernelError>;
    /// What a network's card, or anybody else but this process's streams, has written to the device's memory before this call is seen by
    /// what is put into streams after it.
    fn see_foreign_writes(&self) -> Result<(), KernelError>;
    /// Ends an import. Comes when all that uses it is done.
    fn close(&self, at: Address);
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
