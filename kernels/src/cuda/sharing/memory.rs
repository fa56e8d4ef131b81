//! [`SharedMemory`]: a device's memory that processes share, from allocation to its end, and what was imported.
//!
//! Memory is physical memory of the driver, mapped at an address, where the driver offers that (`cuMemCreate`). A file descriptor names it
//! in other processes, so they need neither this one's IPC namespace nor its process namespace. Otherwise memory is an allocation that
//! CUDA's legacy handles name. The choice is made once per allocation, and a refusal is logged with its reason.
//!
//! Physical memory lives as long as any process holds, maps or has a descriptor of it. So a peer may copy into the pool of a process that
//! has died, and reaches nobody else's memory (I3). What this process imports ends in this order: all work is waited for by the caller, the
//! mapping ends, the addresses go back.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use baton_types::{OpenedBy, PoolHandle};

use super::calls::{MemoryCalls, Names, PhysicalId};
use super::handle::{Handle, Legacy, Physical, this_process};
use crate::KernelError;
use crate::cuda::device::Address;

/// What this process has allocated to share, and what it has imported.
#[derive(Default)]
pub(in crate::cuda) struct SharedMemory {
    owned: HashMap<Address, Owned>,
    imports: Vec<(Address, Import)>,
}

/// Memory of this process.
enum Owned {
    Physical { memory: PhysicalId, bytes: usize, names: Names },
    Legacy { why: String },
}

/// Memory of this process that is about to be freed.
pub(in crate::cuda) struct Disowned {
    at: Address,
    owned: Owned,
}

impl Disowned {
    /// Frees it, after waiting for all work of the device.
    pub fn free(self, calls: &impl MemoryCalls) {
        match self.owned {
            Owned::Physical { memory, bytes, .. } => {
                // Ending a mapping does not wait, as freeing an allocation does.
                calls.wait_for_all();
                unmap(calls, self.at, bytes);
                calls.release(memory);
            }
            Owned::Legacy { .. } => calls.free_legacy(self.at),
        }
    }
}

/// Memory of a peer.
enum Import {
    /// It was mapped, in this many bytes.
    Physical(usize),
    /// The base of the allocation that was opened. None: it is this process's own memory, and was not opened.
    Legacy(Option<Address>),
}

/// The error for a handle that cannot be opened.
fn refused(why: impl Into<String>) -> KernelError {
    KernelError::Device { operation: "opening a peer's memory".to_owned(), why: why.into() }
}

impl SharedMemory {
    /// Allocates memory that can be exported. Others see no memory beside it.
    pub fn allocate(&mut self, calls: &impl MemoryCalls, bytes: usize) -> Result<Address, KernelError> {
        let why = match self.allocate_physical(calls, bytes) {
            Err(refusal) if !matches!(refusal, KernelError::Memory { .. }) => refusal.to_string(),
            done => return done,
        };
        let at = calls.allocate_legacy(bytes)?;
        tracing::warn!(
            %why,
            "the KV pool can be opened by CUDA's legacy handles only: workers of other pods need hostIPC and hostPID, or use TCP"
        );
        self.owned.insert(at, Owned::Legacy { why });
        Ok(at)
    }

    fn allocate_physical(&mut self, calls: &impl MemoryCalls, bytes: usize) -> Result<Address, KernelError> {
        let mut refusal = None;
        for names in calls.names()? {
            match physical(calls, bytes, names) {
                Ok((at, memory, bytes)) => {
                    self.owned.insert(at, Owned::Physical { memory, bytes, names });
                    return Ok(at);
                }
                Err(full @ KernelError::Memory { .. }) => return Err(full),
                Err(error) => {
                    tracing::debug!(%error, ?names, "the driver refuses such memory");
                    refusal = Some(error);
                }
            }
        }
        Err(refusal.unwrap_or_else(|| refused("the driver names no way")))
    }

    /// Takes memory that was allocated here out of the list, for [`Disowned::free`]: that may wait for long, and the list is under a lock.
    pub fn disown(&mut self, at: Address) -> Option<Disowned> {
        self.owned.remove(&at).map(|owned| Disowned { at, owned })
    }

    /// A handle of memory that was allocated here.
    pub fn export(&self, calls: &impl MemoryCalls, at: Address) -> Result<PoolHandle, KernelError> {
        match self.owned.get(&at) {
            Some(Owned::Physical { memory, bytes, names }) => {
                let fabric = match names {
                    // Its descriptor is there all the same.
                    Names::DescriptorAndFabric => calls.fabric(*memory).ok(),
                    Names::Descriptor => None,
                };
                let (process, at, device) = (this_process(), at.0, calls.id()?);
                let handle = Handle::Physical(Physical { process, at, device, bytes: *bytes as u64, fabric });
                Ok(PoolHandle { bytes: handle.encode(), descriptor: Some(calls.descriptor(*memory)?) })
            }
            Some(Owned::Legacy { .. }) => {
                let (base, opaque) = calls.export_legacy(at)?;
                let (process, device, offset) = (this_process(), calls.number(), at.0 - base.0);
                let handle = Handle::Legacy(Legacy { process, device, at: at.0, offset, opaque });
                Ok(PoolHandle { bytes: handle.encode(), descriptor: None })
            }
            None => Err(refused("this memory was not made to be shared")),
        }
    }

    /// What [`SharedMemory::export`] hands out, and why nothing better.
    pub fn exported_as(&self, at: Address) -> String {
        match self.owned.get(&at) {
            Some(Owned::Physical { names: Names::Descriptor, .. }) => OpenedBy::Descriptor.to_string(),
            Some(Owned::Physical { names: Names::DescriptorAndFabric, .. }) => {
                format!("{}, {}", OpenedBy::Descriptor, OpenedBy::Fabric)
            }
            Some(Owned::Legacy { why }) => format!("{}: {why}", OpenedBy::Legacy),
            None => String::new(),
        }
    }

    /// Opens at least `bytes` bytes of a peer's memory.
    ///
    /// # Errors
    /// The handle is invalid or too small, its descriptor is missing, or this device cannot reach the memory. Then nothing is left behind.
    pub fn import(
        &mut self,
        calls: &impl MemoryCalls,
        handle: PoolHandle,
        bytes: usize,
    ) -> Result<(Address, OpenedBy), KernelError> {
        let PoolHandle { bytes: said, descriptor } = handle;
        match Handle::parse(&said).ok_or_else(|| refused("what the peer sent is no handle"))? {
            Handle::Physical(handle) => {
                let size = usize::try_from(handle.bytes).ok().filter(|size| *size >= bytes.max(1));
                let size = size.ok_or_else(|| refused(format!("it has {} bytes, {bytes} are needed", handle.bytes)))?;
                let (memory, by) = take_hold(calls, &handle, descriptor)?;
                let at = mapped(calls, memory, size);
                // The mapping keeps the memory; without one nothing does.
                calls.release(memory);
                let at = at.map_err(|error| explained(calls, &handle, error))?;
                self.imports.push((at, Import::Physical(size)));
                Ok((at, by))
            }
            Handle::Legacy(handle) => {
                let (at, base) = open_legacy(calls, &handle, bytes)?;
                self.imports.push((at, Import::Legacy(base)));
                Ok((at, OpenedBy::Legacy))
            }
        }
    }

    /// Ends an import, once. All work that uses it is done.
    pub fn close(&mut self, calls: &impl MemoryCalls, at: Address) {
        let Some(place) = self.imports.iter().position(|(opened, _)| *opened == at) else { return };
        match self.imports.swap_remove(place).1 {
            Import::Physical(bytes) => unmap(calls, at, bytes),
            Import::Legacy(base) => base.into_iter().for_each(|base| calls.close_legacy(base)),
        }
    }
}

/// Creates and maps memory of at least `bytes` bytes: its address, the memory, and its size. After an error nothing is left.
fn physical(calls: &impl MemoryCalls, bytes: usize, names: Names) -> Result<(Address, PhysicalId, usize), KernelError> {
    let granularity = calls.granularity(names)?.max(1);
    let size = bytes.checked_next_multiple_of(granularity).ok_or(KernelError::Memory { bytes })?;
    let memory = calls.create(size, names)?;
    match mapped(calls, memory, size) {
        Ok(at) => Ok((at, memory, size)),
        Err(error) => {
            calls.release(memory);
            Err(error)
        }
    }
}

/// Maps memory where this device may use it. After an error no addresses are left reserved.
fn mapped(calls: &impl MemoryCalls, memory: PhysicalId, bytes: usize) -> Result<Address, KernelError> {
    let at = calls.reserve(bytes)?;
    if let Err(error) = calls.map(at, bytes, memory) {
        calls.vacate(at, bytes);
        return Err(error);
    }
    if let Err(error) = calls.allow(at, bytes) {
        unmap(calls, at, bytes);
        return Err(error);
    }
    Ok(at)
}

fn unmap(calls: &impl MemoryCalls, at: Address, bytes: usize) {
    calls.unmap(at, bytes);
    calls.vacate(at, bytes);
}

/// Takes hold of a peer's memory by its descriptor, which is closed, or by its name in the fabric.
fn take_hold(
    calls: &impl MemoryCalls,
    handle: &Physical,
    descriptor: Option<OwnedFd>,
) -> Result<(PhysicalId, OpenedBy), KernelError> {
    let missing = || refused("its file descriptor did not come with it");
    let held = descriptor.ok_or_else(missing).and_then(|descriptor| calls.by_descriptor(descriptor.as_fd()));
    let error = match held {
        Ok(memory) => return Ok((memory, OpenedBy::Descriptor)),
        Err(error) => error,
    };
    if let Some(Ok(memory)) = handle.fabric.as_ref().map(|name| calls.by_fabric(name)) {
        tracing::debug!(%error, "a peer's memory is opened by its fabric handle");
        return Ok((memory, OpenedBy::Fabric));
    }
    Err(explained(calls, handle, error))
}

/// The error with what this process knows of the peer's device. A driver's own words say little.
fn explained(calls: &impl MemoryCalls, handle: &Physical, error: KernelError) -> KernelError {
    match (error, calls.out_of_reach(&handle.device)) {
        (KernelError::Device { operation, why }, Some(known)) => {
            KernelError::Device { operation, why: format!("{why}; {known}") }
        }
        (error, _) => error,
    }
}

/// Opens memory by a legacy handle: its address, and the base of what was opened.
fn open_legacy(
    calls: &impl MemoryCalls,
    handle: &Legacy,
    bytes: usize,
) -> Result<(Address, Option<Address>), KernelError> {
    if handle.process == this_process() {
        let same = handle.device == calls.number();
        let own = same.then_some((Address(handle.at), None));
        return own.ok_or_else(|| refused("it is another GPU's of this process"));
    }
    let (base, size) = calls.open_legacy(&handle.opaque)?;
    if (size as u64).checked_sub(handle.offset).is_none_or(|room| room < bytes as u64) {
        calls.close_legacy(base);
        return Err(refused(format!("it has {size} bytes, {bytes} from {} on are needed", handle.offset)));
    }
    Ok((Address(base.0 + handle.offset), Some(base)))
}

#[cfg(test)]
mod tests;
