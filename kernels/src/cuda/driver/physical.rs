//! [`MemoryCalls`] of the driver: its virtual memory management (`cuMemCreate`, `cuMemMap` and so on), and its legacy inter-process
//! handles.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::result::{self, ctx, device};
use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUmemAllocationHandleType as HandleType, CUmemAllocationProp as Properties,
    CUmemLocation as Location,
};
use rustix::io::FdFlags;

use super::super::device::{Address, Device};
use super::super::sharing::{DeviceId, Fabric, MemoryCalls, Names, PhysicalId};
use super::{Driver, failed, no_memory};
use crate::KernelError;

/// Granularity of the driver's plain allocations, in bytes. A pool that fills whole units shares none with other memory, which importers
/// by a legacy handle could see otherwise.
const LEGACY_GRANULARITY: usize = 2 << 20;

impl Driver {
    fn has(&self, attribute: Attribute) -> Result<bool, KernelError> {
        // SAFETY: the device that this driver opened.
        unsafe { device::get_attribute(self.device, attribute) }.map(|value| value != 0).map_err(failed("device"))
    }

    fn location(&self) -> Location {
        Location { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    /// What memory on this device is created as.
    fn physical(&self, names: Names) -> Result<Properties, KernelError> {
        let by_card = self.has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let types = match names {
            Names::Descriptor => HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Names::DescriptorAndFabric => {
                HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | HandleType::CU_MEM_HANDLE_TYPE_FABRIC
            }
        };
        // SAFETY: the struct is numbers and a pointer, of which all zeros are valid values.
        let mut properties: Properties = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = types;
        properties.location = self.location();
        // Network cards read and write the pool, too: UCX registers it.
        properties.allocFlags.gpuDirectRDMACapable = u8::from(by_card);
        Ok(properties)
    }
}

impl MemoryCalls for Driver {
    fn names(&self) -> Result<Vec<Names>, KernelError> {
        let none = |why: &str| KernelError::Device { operation: "sharing memory".to_owned(), why: why.to_owned() };
        if self.legacy_only {
            return Err(none("the settings ask for legacy handles"));
        }
        if !self.has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? {
            return Err(none("this GPU, or its driver, has no virtual memory management"));
        }
        if !self.has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? {
            return Err(none("the driver names this GPU's memory by no file descriptors"));
        }
        let fabric = self.has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED).unwrap_or(false);
        Ok(fabric.then_some(Names::DescriptorAndFabric).into_iter().chain([Names::Descriptor]).collect())
    }

    fn granularity(&self, names: Names) -> Result<usize, KernelError> {
        self.current()?;
        let (properties, mut bytes) = (self.physical(names)?, 0);
        let best = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the pointers are valid for the call.
        unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties, best) }
            .result()
            .map_err(failed("granularity of memory"))?;
        Ok(bytes)
    }

    fn create(&self, bytes: usize, names: Names) -> Result<PhysicalId, KernelError> {
        self.current()?;
        let (properties, mut memory) = (self.physical(names)?, 0);
        // SAFETY: the pointers are valid for the call.
        let created = unsafe { sys::cuMemCreate(&mut memory, bytes, &properties, 0) };
        created.result().map(|()| PhysicalId(memory)).map_err(no_memory(bytes))
    }

    fn release(&self, PhysicalId(memory): PhysicalId) {
        // SAFETY: created or imported by this driver, and released once.
        let _ = unsafe { sys::cuMemRelease(memory) };
    }

    fn reserve(&self, bytes: usize) -> Result<Address, KernelError> {
        self.current()?;
        let mut at = 0;
        // SAFETY: the pointer is valid for the answer; the driver chooses address and alignment.
        unsafe { sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0) }.result().map_err(failed("reserving addresses"))?;
        Ok(Address(at))
    }

    fn vacate(&self, at: Address, bytes: usize) {
        // SAFETY: reserved by `reserve` in this size, and nothing is mapped there.
        let _ = unsafe { sys::cuMemAddressFree(at.0, bytes) };
    }

    fn map(&self, at: Address, bytes: usize, PhysicalId(memory): PhysicalId) -> Result<(), KernelError> {
        self.current()?;
        // SAFETY: reserved in this size. The driver refuses more bytes than the memory has.
        unsafe { sys::cuMemMap(at.0, bytes, 0, memory, 0) }.result().map_err(failed("mapping memory"))
    }

    fn allow(&self, at: Address, bytes: usize) -> Result<(), KernelError> {
        self.current()?;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: mapped in this size; the pointer is valid for the call. This device is given access, wherever the memory is.
        unsafe { sys::cuMemSetAccess(at.0, bytes, &access, 1) }.result().map_err(failed("access to mapped memory"))
    }

    fn unmap(&self, at: Address, bytes: usize) {
        if self.current().is_ok() {
            // SAFETY: mapped by `map` in this size, and the caller has waited for all that uses it.
            let _ = unsafe { sys::cuMemUnmap(at.0, bytes) };
        }
    }

    fn descriptor(&self, PhysicalId(memory): PhysicalId) -> Result<OwnedFd, KernelError> {
        self.current()?;
        let (mut fd, kind) = (-1i32, HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        // SAFETY: for this kind the answer is a descriptor, an int.
        unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast::<c_void>(), memory, kind, 0) }
            .result()
            .map_err(failed("exporting the pool's memory"))?;
        // SAFETY: a new descriptor that nobody else has.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // A child program must not keep the memory. An error would mean that it was closed already.
        let _ = rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC);
        Ok(fd)
    }

    fn fabric(&self, PhysicalId(memory): PhysicalId) -> Result<Fabric, KernelError> {
        self.current()?;
        let (mut name, kind) = ([0u8; size_of::<Fabric>()], HandleType::CU_MEM_HANDLE_TYPE_FABRIC);
        // SAFETY: for this kind the answer is 64 bytes.
        unsafe { sys::cuMemExportToShareableHandle(name.as_mut_ptr().cast::<c_void>(), memory, kind, 0) }
            .result()
            .map_err(failed("exporting the pool's memory"))?;
        Ok(name)
    }

    fn by_descriptor(&self, descriptor: BorrowedFd<'_>) -> Result<PhysicalId, KernelError> {
        // For this kind the driver takes the descriptor itself in the pointer's place.
        let fd = std::ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
        // SAFETY: nothing is read through that pointer, and the descriptor is open during the call.
        unsafe { self.imported(fd, HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) }
    }

    fn by_fabric(&self, name: &Fabric) -> Result<PhysicalId, KernelError> {
        let mut name = *name;
        // SAFETY: for this kind the driver reads 64 bytes.
        unsafe { self.imported(name.as_mut_ptr().cast(), HandleType::CU_MEM_HANDLE_TYPE_FABRIC) }
    }

    fn id(&self) -> Result<DeviceId, KernelError> {
        id_of(self.device)
    }

    fn out_of_reach(&self, of: &DeviceId) -> Option<&'static str> {
        let all = (0..device::get_count().ok()?).filter_map(|number| device::get(number).ok());
        let Some(there) = all.into_iter().find(|&device| id_of(device).is_ok_and(|id| id == *of)) else {
            return Some("this process does not see the peer's GPU: give both workers all GPUs of their node");
        };
        if there == self.device {
            return None;
        }
        let mut reaches = 0;
        // SAFETY: the pointer is valid for the answer; the driver named both devices.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, self.device, there) }.result();
        (asked.is_ok() && reaches == 0).then_some("this GPU has no peer access to the peer's GPU")
    }

    fn wait_for_all(&self) {
        let _ = self.current().and_then(|()| ctx::synchronize().map_err(failed("all work so far")));
    }

    fn number(&self) -> i32 {
        self.device
    }

    fn allocate_legacy(&self, bytes: usize) -> Result<Address, KernelError> {
        self.allocate(bytes.checked_next_multiple_of(LEGACY_GRANULARITY).ok_or(KernelError::Memory { bytes })?)
    }

    fn free_legacy(&self, at: Address) {
        self.free_plain(at);
    }

    fn export_legacy(&self, at: Address) -> Result<(Address, [u8; 64]), KernelError> {
        self.current()?;
        let export = failed("exporting the pool's memory");
        let (mut base, mut size) = (0, 0);
        // SAFETY: the pointers are valid for the answer.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, at.0) }.result().map_err(&export)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is valid for the answer, and `base` is the base of an allocation.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, base) }.result().map_err(&export)?;
        Ok((Address(base), handle.reserved.map(|byte| byte as u8)))
    }

    fn open_legacy(&self, opaque: &[u8; 64]) -> Result<(Address, usize), KernelError> {
        self.current()?;
        let raw = sys::CUipcMemHandle { reserved: opaque.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let (mut base, mut start, mut size) = (0, 0, 0);
        let opening = failed("opening a peer's memory");
        // SAFETY: the pointer is valid for the answer; the driver returns an error for an invalid handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, raw, flags) }.result().map_err(&opening)?;
        // SAFETY: the pointers are valid for the answers.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut size, base) }.result();
        if let Err(error) = found {
            self.close_legacy(Address(base));
            return Err(opening(error));
        }
        Ok((Address(base), size))
    }

    fn close_legacy(&self, base: Address) {
        if self.current().is_ok() {
            // SAFETY: `open_legacy` opened it, each opening is closed once, and nothing uses it any more.
            let _ = unsafe { sys::cuIpcCloseMemHandle(base.0) };
        }
    }
}

impl Driver {
    /// # Safety
    /// `name` is what the driver takes for this kind.
    unsafe fn imported(&self, name: *mut c_void, kind: HandleType) -> Result<PhysicalId, KernelError> {
        self.current()?;
        let mut memory = 0;
        // SAFETY: the caller vouches for the name; the driver returns an error for one that names no memory.
        let imported = unsafe { sys::cuMemImportFromShareableHandle(&mut memory, name, kind) };
        imported.result().map(|()| PhysicalId(memory)).map_err(failed("opening a peer's memory"))
    }

    /// Frees what [`Device::allocate`] allocated.
    pub(super) fn free_plain(&self, at: Address) {
        // The call waits for all work of the device. It fails only when the context is broken, which other calls report.
        if self.current().is_ok() {
            // SAFETY: `Memory` frees what it allocated, once.
            let _ = unsafe { result::free_sync(at.0) };
        }
    }
}

pub(super) fn id_of(device: sys::CUdevice) -> Result<DeviceId, KernelError> {
    device::get_uuid(device).map(|id| id.bytes.map(|byte| byte as u8)).map_err(failed("device"))
}
