//! A worker's KV pool, in memory that both its backend and its transfers reach: a shared-memory segment for the CPU, device memory for a
//! GPU. Joins the kernels, which know devices, and the transfer, which knows handoffs.

use std::sync::Arc;

use baton_kernels::cuda::{CudaBackend, CudaOptions, SharedPool, SharingDevice};
use baton_kernels::{HostPool, KernelError};
use baton_model::ModelError;
use baton_transfer::{DeviceMemory, Pool, Segment};
use baton_types::PoolGeometry;

use crate::WorkerError;

/// A pool in host memory that other processes can map.
pub(crate) fn on_host(geometry: &PoolGeometry) -> Result<(Pool, Arc<HostPool>), WorkerError> {
    let segment = Arc::new(Segment::create("baton-kv", geometry.bytes())?);
    // SAFETY: the segment is a mapping of at least `bytes` bytes, page-aligned, alive as long as its Arc.
    let pool = unsafe { HostPool::new(segment.as_ptr(), segment.len(), geometry.clone(), segment.clone()) };
    Ok((Pool::Host(segment), Arc::new(pool.map_err(ModelError::from)?)))
}

/// A backend on a GPU with its pool in that GPU's memory, and the same pool for transfers.
pub(crate) fn on_device<D: SharingDevice>(
    device: &Arc<D>,
    geometry: &PoolGeometry,
    options: CudaOptions,
) -> Result<(CudaBackend<D>, Arc<dyn DeviceMemory>), KernelError> {
    let pool = SharedPool::new(device, geometry.bytes())?;
    let backend = CudaBackend::sharing(&pool, geometry.clone(), options)?;
    Ok((backend, Arc::new(pool)))
}
