//! [`HostMemory`]: [`MemoryCalls`] of the host, which keeps to a driver's rules and records every call.
//!
//! Physical memory is an anonymous file (memfd), reserved addresses are a mapping that nobody may touch, and a mapping is one of the file.
//! So memory behaves as a GPU's does: it outlives its process as long as others hold it, and what is used after its end is a fault. What a
//! driver refuses or leaves undefined is an error here, or a problem that tests ask for.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::super::device::Address;
use super::super::sharing::{DeviceId, Fabric, MemoryCalls, Names, PhysicalId};
use crate::KernelError;

/// Sizes are multiples of this many bytes.
const GRANULARITY: usize = 64 << 10;

/// One of [`MemoryCalls`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub(in crate::cuda) enum MemoryCall {
    Names,
    Create,
    CreateWithFabric,
    Release,
    Reserve,
    Vacate,
    Map,
    Allow,
    Unmap,
    Descriptor,
    Fabric,
    ByDescriptor,
    ByFabric,
    AllocateLegacy,
    FreeLegacy,
    OpenLegacy,
    CloseLegacy,
    WaitForAll,
}

/// What a process has of memory that it shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Physical memory that is held.
    pub memory: usize,
    /// Reserved ranges of addresses.
    pub reserved: usize,
    /// Mappings, legacy ones included.
    pub mapped: usize,
}

#[derive(Default)]
pub(in crate::cuda) struct HostMemory {
    /// Whether this host's memory has names in a fabric.
    fabric: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    held: BTreeMap<PhysicalId, File>,
    /// By address: bytes, and the memory that is mapped there.
    reserved: BTreeMap<Address, (usize, Mapped)>,
    /// By base: bytes, and the file if this process made it.
    legacy: BTreeMap<Address, (usize, Option<File>)>,
    log: Vec<MemoryCall>,
    problems: Vec<String>,
    refused: Vec<(MemoryCall, Why)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mapped {
    Nothing,
    Closed,
    Open,
}

/// Why a call is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cuda) enum Why {
    /// The device cannot do it.
    NotSupported,
    /// There is no room.
    #[cfg_attr(not(test), expect(dead_code))]
    NoMemory,
}

fn failed(what: &str, why: impl ToString) -> KernelError {
    KernelError::Device { operation: what.to_owned(), why: why.to_string() }
}

fn pointer(at: Address) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(at.0 as usize)
}

impl HostMemory {
    /// Memory that has names in a fabric too.
    #[cfg(test)]
    pub fn with_fabric() -> Self {
        HostMemory { fabric: true, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a call from now on.
    pub fn refuse(&self, call: MemoryCall, why: Why) {
        self.state().refused.push((call, why));
    }

    /// The calls since the last time.
    #[cfg(test)]
    pub fn take_log(&self) -> Vec<MemoryCall> {
        std::mem::take(&mut self.state().log)
    }

    /// What was asked for that a driver leaves undefined.
    #[cfg(test)]
    pub fn problems(&self) -> Vec<String> {
        self.state().problems.clone()
    }

    /// What this process has at present.
    pub fn held(&self) -> Held {
        let state = self.state();
        let mapped = state.reserved.values().filter(|(_, mapped)| *mapped != Mapped::Nothing).count();
        Held { memory: state.held.len(), reserved: state.reserved.len(), mapped: mapped + state.legacy.len() }
    }

    /// Logs a call, and refuses it if it is to be.
    fn called(&self, call: MemoryCall, bytes: usize) -> Result<MutexGuard<'_, State>, KernelError> {
        let mut state = self.state();
        state.log.push(call);
        match state.refused.iter().find(|(refused, _)| *refused == call) {
            Some((_, Why::NotSupported)) => Err(failed("a call", format!("{call:?}: CUDA_ERROR_NOT_SUPPORTED"))),
            Some((_, Why::NoMemory)) => Err(KernelError::Memory { bytes }),
            None => Ok(state),
        }
    }

    /// The same for a call that cannot fail.
    fn does(&self, call: MemoryCall) -> MutexGuard<'_, State> {
        let mut state = self.state();
        state.log.push(call);
        state
    }
}

impl State {
    fn hold(&mut self, file: File) -> PhysicalId {
        self.next += 1;
        self.held.insert(PhysicalId(self.next), file);
        PhysicalId(self.next)
    }

    fn file(&self, memory: PhysicalId) -> Result<&File, KernelError> {
        self.held.get(&memory).ok_or_else(|| failed("physical memory", "CUDA_ERROR_INVALID_VALUE: it was released"))
    }
}

/// A file of `bytes` bytes in memory.
fn memory(bytes: usize) -> Result<File, KernelError> {
    let none = |_| KernelError::Memory { bytes };
    let file = rustix::fs::memfd_create("baton-device", MemfdFlags::CLOEXEC).map_err(none)?;
    rustix::fs::ftruncate(&file, bytes as u64).map_err(none)?;
    Ok(file.into())
}

/// Another process's file, by its process and descriptor.
fn of_process(name: &[u8; 64]) -> Result<File, KernelError> {
    let number = |at: usize| name[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let path = format!("/proc/{}/fd/{}", number(0), number(4));
    OpenOptions::new().read(true).write(true).open(path).map_err(|e| failed("opening a peer's memory", e))
}

/// What [`of_process`] opens.
fn name_of(file: &File) -> [u8; 64] {
    let mut name = [0; 64];
    name[..4].copy_from_slice(&std::process::id().to_le_bytes());
    name[4..8].copy_from_slice(&(file.as_raw_fd() as u32).to_le_bytes());
    name
}

fn map_file(file: &File, bytes: usize) -> Result<Address, KernelError> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) };
    at.map(|at| Address(at.expose_provenance() as u64)).map_err(|e| failed("mapping memory", e))
}

impl MemoryCalls for HostMemory {
    fn names(&self) -> Result<Vec<Names>, KernelError> {
        drop(self.called(MemoryCall::Names, 0)?);
        Ok(self.fabric.then_some(Names::DescriptorAndFabric).into_iter().chain([Names::Descriptor]).collect())
    }

    fn granularity(&self, _names: Names) -> Result<usize, KernelError> {
        Ok(GRANULARITY)
    }

    fn create(&self, bytes: usize, names: Names) -> Result<PhysicalId, KernelError> {
        let call = match names {
            Names::Descriptor => MemoryCall::Create,
            Names::DescriptorAndFabric => MemoryCall::CreateWithFabric,
        };
        let mut state = self.called(call, bytes)?;
        match bytes > 0 && bytes.is_multiple_of(GRANULARITY) {
            true => Ok(state.hold(memory(bytes)?)),
            false => Err(failed("create", format!("CUDA_ERROR_INVALID_VALUE: {bytes} bytes"))),
        }
    }

    fn release(&self, memory: PhysicalId) {
        let mut state = self.does(MemoryCall::Release);
        if state.held.remove(&memory).is_none() {
            state.problems.push(format!("{memory:?} is released twice"));
        }
    }

    fn reserve(&self, bytes: usize) -> Result<Address, KernelError> {
        let mut state = self.called(MemoryCall::Reserve, bytes)?;
        // SAFETY: a new mapping at an address of the system's choice touches nobody's memory.
        let at = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let at = at.map_err(|e| failed("reserving addresses", e))?;
        let at = Address(at.expose_provenance() as u64);
        state.reserved.insert(at, (bytes, Mapped::Nothing));
        Ok(at)
    }

    fn vacate(&self, at: Address, bytes: usize) {
        let mut state = self.does(MemoryCall::Vacate);
        match state.reserved.get(&at) {
            Some((reserved, Mapped::Nothing)) if *reserved == bytes => {
                state.reserved.remove(&at);
                // SAFETY: `reserve` mapped it, and nobody uses it.
                let _ = unsafe { rustix::mm::munmap(pointer(at), bytes) };
            }
            Some((reserved, _)) => {
                let why = format!("{bytes} of {reserved} reserved bytes are given back, or a mapping with them");
                state.problems.push(why);
            }
            None => state.problems.push("addresses that are not reserved are given back".to_owned()),
        }
    }

    fn map(&self, at: Address, bytes: usize, memory: PhysicalId) -> Result<(), KernelError> {
        let mut state = self.called(MemoryCall::Map, bytes)?;
        let invalid = |why: &str| failed("mapping memory", format!("CUDA_ERROR_INVALID_VALUE: {why}"));
        let there = state.file(memory)?.metadata().map_err(|e| failed("mapping memory", e))?.len();
        if bytes as u64 > there || !bytes.is_multiple_of(GRANULARITY) {
            return Err(invalid(&format!("{bytes} bytes of {there}")));
        }
        if state.reserved.get(&at) != Some(&(bytes, Mapped::Nothing)) {
            return Err(invalid("these addresses are not reserved, or something is mapped there"));
        }
        let fixed = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the addresses are reserved, and nobody uses them.
        let mapped = unsafe { rustix::mm::mmap(pointer(at), bytes, ProtFlags::empty(), fixed, state.file(memory)?, 0) };
        mapped.map_err(|e| failed("mapping memory", e))?;
        state.reserved.insert(at, (bytes, Mapped::Closed));
        Ok(())
    }

    fn allow(&self, at: Address, bytes: usize) -> Result<(), KernelError> {
        let mut state = self.called(MemoryCall::Allow, bytes)?;
        if state.reserved.get(&at) != Some(&(bytes, Mapped::Closed)) {
            return Err(failed("access", "CUDA_ERROR_INVALID_VALUE: nothing is mapped there"));
        }
        // SAFETY: mapped above in this size.
        unsafe { rustix::mm::mprotect(pointer(at), bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|e| failed("access", e))?;
        state.reserved.insert(at, (bytes, Mapped::Open));
        Ok(())
    }

    fn unmap(&self, at: Address, bytes: usize) {
        let mut state = self.does(MemoryCall::Unmap);
        match state.reserved.get(&at) {
            Some((mapped, Mapped::Closed | Mapped::Open)) if *mapped == bytes => {
                let fixed = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
                // SAFETY: mapped above; the caller has waited for all that uses it. The addresses stay reserved.
                let _ = unsafe { rustix::mm::mmap_anonymous(pointer(at), bytes, ProtFlags::empty(), fixed) };
                state.reserved.insert(at, (bytes, Mapped::Nothing));
            }
            _ => state.problems.push("a mapping that is none, or of another size, ends".to_owned()),
        }
    }

    fn descriptor(&self, memory: PhysicalId) -> Result<OwnedFd, KernelError> {
        let state = self.called(MemoryCall::Descriptor, 0)?;
        state.file(memory)?.as_fd().try_clone_to_owned().map_err(|e| failed("exporting memory", e))
    }

    fn fabric(&self, memory: PhysicalId) -> Result<Fabric, KernelError> {
        let state = self.called(MemoryCall::Fabric, 0)?;
        Ok(name_of(state.file(memory)?))
    }

    fn by_descriptor(&self, descriptor: BorrowedFd<'_>) -> Result<PhysicalId, KernelError> {
        let mut state = self.called(MemoryCall::ByDescriptor, 0)?;
        // As a driver refuses descriptors that it has not issued.
        rustix::fs::fcntl_get_seals(descriptor)
            .map_err(|_| failed("opening a peer's memory", "CUDA_ERROR_INVALID_VALUE: no memory's descriptor"))?;
        let file = descriptor.try_clone_to_owned().map_err(|e| failed("opening a peer's memory", e))?;
        Ok(state.hold(file.into()))
    }

    fn by_fabric(&self, name: &Fabric) -> Result<PhysicalId, KernelError> {
        let mut state = self.called(MemoryCall::ByFabric, 0)?;
        Ok(state.hold(of_process(name)?))
    }

    fn id(&self) -> Result<DeviceId, KernelError> {
        Ok(*b"this host's own.")
    }

    fn out_of_reach(&self, of: &DeviceId) -> Option<&'static str> {
        (self.id().ok().as_ref() != Some(of)).then_some("this process does not see the peer's GPU")
    }

    fn wait_for_all(&self) {
        drop(self.does(MemoryCall::WaitForAll));
    }

    fn number(&self) -> i32 {
        0
    }

    fn allocate_legacy(&self, bytes: usize) -> Result<Address, KernelError> {
        let mut state = self.called(MemoryCall::AllocateLegacy, bytes)?;
        let file = memory(bytes)?;
        let at = map_file(&file, bytes)?;
        state.legacy.insert(at, (bytes, Some(file)));
        Ok(at)
    }

    fn free_legacy(&self, at: Address) {
        self.end_legacy(MemoryCall::FreeLegacy, at);
    }

    fn export_legacy(&self, at: Address) -> Result<(Address, [u8; 64]), KernelError> {
        let state = self.state();
        let file = state.legacy.get(&at).and_then(|(_, file)| file.as_ref());
        let file = file.ok_or_else(|| failed("exporting memory", "CUDA_ERROR_INVALID_VALUE: no such allocation"))?;
        Ok((at, name_of(file)))
    }

    fn open_legacy(&self, opaque: &[u8; 64]) -> Result<(Address, usize), KernelError> {
        let mut state = self.called(MemoryCall::OpenLegacy, 0)?;
        let file = of_process(opaque)?;
        let bytes = file.metadata().map_err(|e| failed("opening a peer's memory", e))?.len() as usize;
        let at = map_file(&file, bytes)?;
        state.legacy.insert(at, (bytes, None));
        Ok((at, bytes))
    }

    fn close_legacy(&self, base: Address) {
        self.end_legacy(MemoryCall::CloseLegacy, base);
    }
}

impl HostMemory {
    fn end_legacy(&self, call: MemoryCall, at: Address) {
        let mut state = self.does(call);
        match state.legacy.remove(&at) {
            // SAFETY: `map_file` mapped it, and nobody uses it any more.
            Some((bytes, _)) => drop(unsafe { rustix::mm::munmap(pointer(at), bytes) }),
            None => state.problems.push(format!("{call:?} of what is none")),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Tests look for leaks by `held`; here the process only gets its addresses back.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ranges = state.reserved.iter().map(|(at, (bytes, _))| (*at, *bytes));
        for (at, bytes) in ranges.chain(state.legacy.iter().map(|(at, (bytes, _))| (*at, *bytes))) {
            // SAFETY: mapped above; the device is gone, and so is whoever used its memory.
            let _ = unsafe { rustix::mm::munmap(pointer(at), bytes) };
        }
    }
}
