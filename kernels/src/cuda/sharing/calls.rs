//! [`MemoryCalls`]: a driver's calls for memory that processes share. [`super::memory`] says which to make, and when.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::handle::{DeviceId, Fabric};
use crate::KernelError;
use crate::cuda::device::Address;

/// Physical memory, as this process's driver knows it. It has no address until it is mapped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::cuda) struct PhysicalId(pub u64);

/// What physical memory can be named by in other processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cuda) enum Names {
    /// A file descriptor.
    Descriptor,
    /// A file descriptor, and a name in the NVLink fabric.
    DescriptorAndFabric,
}

/// A driver's calls for one device's memory. Calls that give something back report no failure: it only fails when the device is broken,
/// which other calls report.
pub(in crate::cuda) trait MemoryCalls {
    /// What memory of this device can be named by, most names first.
    ///
    /// # Errors
    /// By nothing, and why.
    fn names(&self) -> Result<Vec<Names>, KernelError>;
    /// Bytes of which the size of such memory is a multiple.
    fn granularity(&self, names: Names) -> Result<usize, KernelError>;
    /// Creates memory.
    ///
    /// # Errors
    /// [`KernelError::Memory`] if there is no room; everything else is a refusal of such memory.
    fn create(&self, bytes: usize, names: Names) -> Result<PhysicalId, KernelError>;
    /// Gives up this process's hold. The memory is freed with the last hold, mapping and descriptor of any process.
    fn release(&self, memory: PhysicalId);
    /// Reserves addresses.
    fn reserve(&self, bytes: usize) -> Result<Address, KernelError>;
    /// Gives reserved addresses back, where nothing is mapped any more.
    fn vacate(&self, at: Address, bytes: usize);
    /// Maps memory at reserved addresses. Nobody may use them yet.
    fn map(&self, at: Address, bytes: usize, memory: PhysicalId) -> Result<(), KernelError>;
    /// Lets this process's device read and write there.
    fn allow(&self, at: Address, bytes: usize) -> Result<(), KernelError>;
    /// Ends a mapping. Waits for nothing: the caller has waited for all work that uses it.
    fn unmap(&self, at: Address, bytes: usize);
    /// A new file descriptor that names the memory.
    fn descriptor(&self, memory: PhysicalId) -> Result<OwnedFd, KernelError>;
    /// The memory's name in the fabric.
    fn fabric(&self, memory: PhysicalId) -> Result<Fabric, KernelError>;
    /// Takes hold of memory by a descriptor. It may be closed afterwards.
    fn by_descriptor(&self, descriptor: BorrowedFd<'_>) -> Result<PhysicalId, KernelError>;
    /// Takes hold of memory by its name in the fabric.
    fn by_fabric(&self, name: &Fabric) -> Result<PhysicalId, KernelError>;
    /// This device's id.
    fn id(&self) -> Result<DeviceId, KernelError>;
    /// Why this device cannot reach memory of the device `of`, as far as this process can tell.
    fn out_of_reach(&self, of: &DeviceId) -> Option<&'static str>;
    /// Waits for all work of the device.
    fn wait_for_all(&self);

    /// This process's number of the device.
    fn number(&self) -> i32;
    /// Allocates memory that legacy handles can name.
    fn allocate_legacy(&self, bytes: usize) -> Result<Address, KernelError>;
    /// Frees it, after waiting for all work of the device.
    fn free_legacy(&self, at: Address);
    /// The base of the allocation that an address is in, and the driver's handle of that.
    fn export_legacy(&self, at: Address) -> Result<(Address, [u8; 64]), KernelError>;
    /// Opens another process's allocation; its base and size in bytes. What is opened twice must be closed twice.
    fn open_legacy(&self, opaque: &[u8; 64]) -> Result<(Address, usize), KernelError>;
    /// Closes it.
    fn close_legacy(&self, base: Address);
}
