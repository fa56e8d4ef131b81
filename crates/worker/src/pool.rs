//! The KV pool of a worker, where its backend computes and its transfers reach: a shared-memory segment for a CPU, a GPU's own memory for a
//! GPU. Joins the kernels, which know devices, and the transfer, which knows handoffs.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use baton_kernels::cuda::{CopyQueue, CudaBackend, CudaOptions, Finished, Moved, SharedPool, SharingDevice};
use baton_kernels::{HostPool, KernelError};
use baton_model::ModelError;
use baton_transfer::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, Pool, Range, Registrable,
    Segment, Staged,
};
use baton_types::PoolGeometry;

use crate::WorkerError;

/// A pool in host memory that other processes can map.
pub(crate) fn on_host(geometry: &PoolGeometry) -> Result<(Pool, Arc<HostPool>), WorkerError> {
    let segment = Arc::new(Segment::create("baton-kv", geometry.bytes())?);
    // SAFETY: the segment is a mapping of at least `bytes` bytes, page-aligned, alive as long as its Arc.
    let pool = unsafe { HostPool::new(segment.as_ptr(), segment.len(), geometry.clone(), segment.clone()) };
    Ok((Pool::Host(segment), Arc::new(pool.map_err(ModelError::from)?)))
}

/// A backend on a GPU with its pool in that GPU's memory, and that as transfers reach it.
pub(crate) fn on_device<D: SharingDevice>(
    device: &Arc<D>,
    geometry: &PoolGeometry,
    options: CudaOptions,
) -> Result<(CudaBackend<D>, Arc<dyn DeviceMemory>), KernelError> {
    let pool = Arc::new(SharedPool::new(device, geometry.bytes())?);
    let backend = CudaBackend::sharing(&pool, geometry.clone(), options)?;
    Ok((backend, device_memory(pool)))
}

/// A pool in a device's memory as transfers reach it.
pub fn device_memory<D: SharingDevice>(pool: Arc<SharedPool<D>>) -> Arc<dyn DeviceMemory> {
    Arc::new(Memory(pool))
}

struct Memory<D: SharingDevice>(Arc<SharedPool<D>>);

struct Queue<D: SharingDevice>(CopyQueue<D>);

const _: () = assert!(DEVICE_JOBS <= CopyQueue::<baton_kernels::cuda::Driver>::DEPTH);

fn said(error: KernelError) -> DeviceError {
    DeviceError(error.to_string())
}

impl<D: SharingDevice> DeviceMemory for Memory<D> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn mark(&self) -> u64 {
        self.0.mark()
    }

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        self.0.export().map_err(said)
    }

    fn registrable(&self) -> Result<Registrable, DeviceError> {
        let baton_kernels::cuda::Registrable { address, cuda } = self.0.registrable().map_err(said)?;
        Ok(Registrable { address, kind: if cuda { MemoryKind::Cuda } else { MemoryKind::Host } })
    }

    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        Ok(Box::new(Queue(self.0.queue().map_err(said)?)))
    }
}

impl<D: SharingDevice> DeviceQueue for Queue<D> {
    fn open(&mut self, handle: &[u8], bytes: usize) -> Result<(), DeviceError> {
        self.0.open(handle, bytes).map_err(said)
    }

    fn read(&mut self, after: u64, ranges: &[Range]) -> Result<(), DeviceError> {
        self.0.read(after, ranges.iter().copied()).map_err(said)
    }

    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError> {
        let moved = |run: &Moving| Moved { source: run.source as u64, target: run.target as u64, lane: run.lane };
        self.0.copy(after, &runs.iter().map(moved).collect::<Vec<_>>(), bytes).map_err(said)
    }

    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError> {
        self.0.digest(after, runs, bytes).map_err(said)
    }

    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        Ok(self.0.poll().map_err(said)?.map(|done| match done {
            Finished::Read(staging) => JobDone::Read(Staged::new(staging)),
            Finished::Digests(digests) => JobDone::Digests(digests),
        }))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.fd()
    }

    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        self.0.stage(bytes).map_err(said)
    }

    fn write(&mut self, ranges: &[Range]) -> Result<(), DeviceError> {
        self.0.write(ranges.iter().copied()).map_err(said)
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        self.0.settle().map_err(said)
    }

    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        self.0.digests(runs, bytes).map_err(said)
    }
}
