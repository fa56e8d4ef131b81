//! [`SharingDevice`]: a device whose memory other processes can import, and that tells when copies are done.
//!
//! [`super::SharedPool`] uses it for transfers; computing needs only [`Device`]. [`Imported`] closes imported memory when dropped.

mod calls;
mod handle;
mod memory;
#[cfg(feature = "testing")]
mod pass;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use baton_types::{OpenedBy, PoolHandle, Registrable};

use super::device::{Address, Device, Event, Piece, Stream};
use crate::KernelError;

pub(super) use calls::{MemoryCalls, Names, PhysicalId};
pub(super) use handle::{DeviceId, Fabric};
pub(super) use memory::SharedMemory;
#[cfg(feature = "testing")]
pub use pass::{receive_handle, send_handle};

/// A device whose memory can be handed to another process.
pub trait SharingDevice: Device {
    /// Allocates as [`Device::allocate`], but memory that can be exported. Importers see no other memory beside it.
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError>;
    /// A handle by which a process of this host imports memory of [`SharingDevice::allocate_shared`]. That memory must not be freed while
    /// others have it imported.
    fn export(&self, at: Address) -> Result<PoolHandle, KernelError>;
    /// What [`SharingDevice::export`] hands out, and why nothing better; for people.
    fn exported_as(&self, at: Address) -> String;
    /// Opens memory of at least `bytes` bytes by its handle, of another process or of this one, until [`SharingDevice::close`]. Returns by
    /// what it was opened, too.
    ///
    /// # Errors
    /// When the handle is invalid, its process has ended, or its device cannot be reached from this one.
    fn import(&self, handle: PoolHandle, bytes: usize) -> Result<(Address, OpenedBy), KernelError>;
    /// Address and kind of this memory, for a network library that sends from it and receives into it. Afterwards the calling thread may
    /// use the memory with that library.
    fn registrable(&self, at: Address) -> Result<Registrable, KernelError>;
    /// Makes earlier writes to the device's memory from outside this process's streams, such as by a network card, visible to work that is
    /// put into streams after this call.
    fn see_foreign_writes(&self) -> Result<(), KernelError>;
    /// Ends an import. To be called only once all work that uses it is done.
    fn close(&self, at: Address);
    /// Whether the work that was in the stream at the event's last record is done. Never waits.
    fn is_done(&self, event: Event) -> Result<bool, KernelError>;
    /// Adds 1 to an eventfd once all work put into the stream so far is done. After a failure of the device it may never do so.
    ///
    /// # Safety
    /// The descriptor stays open until then.
    unsafe fn notify(&self, stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError>;
}

/// Imported memory, closed when dropped. Its owner drops it only after all work that uses it is done.
pub(super) struct Imported<D: SharingDevice> {
    device: Arc<D>,
    at: Address,
    bytes: usize,
}

impl<D: SharingDevice> Imported<D> {
    pub fn open(device: &Arc<D>, handle: PoolHandle, bytes: usize) -> Result<(Self, OpenedBy), KernelError> {
        let (at, by) = device.import(handle, bytes)?;
        Ok((Imported { device: Arc::clone(device), at, bytes }, by))
    }

    /// The piece of `bytes` bytes from byte `from` on, or None if it reaches beyond the end.
    pub fn piece(&self, from: usize, bytes: usize) -> Option<Piece<'_>> {
        let end = from.checked_add(bytes)?;
        (end <= self.bytes).then(|| Piece::new(self.at.plus(from), bytes))
    }

    /// The whole imported memory.
    pub fn whole(&self) -> Piece<'_> {
        Piece::new(self.at, self.bytes)
    }
}

impl<D: SharingDevice> Drop for Imported<D> {
    fn drop(&mut self) {
        self.device.close(self.at);
    }
}
