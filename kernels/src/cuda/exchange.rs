//! The trait [`Exchange`]: moves data between the tensor-parallel ranks of one process, which have a device each.
//!
//! It only moves data: the backend's own kernels add it up in the order of ranks ([`CudaBackend::sum_of`], I1). GPUs exchange by NCCL
//! (`nccl`); host devices copy out of each other's memory (`host`). The ranks decide when they exchange what.

use std::ops::Range;
use std::sync::Arc;

use super::backend::CudaBackend;
use super::device::Device;
use super::memory::Memory;
use super::sharing::SharingDevice;
use crate::{Backend, KernelError};

/// How ranks share the columns of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Rows of the matrix.
    pub rows: usize,
    /// The first column of each rank, and at the end the number of columns.
    pub splits: &'a [usize],
}

impl Columns<'_> {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.splits.len().saturating_sub(1)
    }

    /// A rank's columns.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.splits[rank]..self.splits[rank + 1]
    }

    /// Number of columns of the matrix.
    pub fn width(&self) -> usize {
        self.splits.last().copied().unwrap_or(0)
    }
}

/// Devices that can exchange, one per rank. All ranks call the same methods in the same order, each from its own thread and with its own
/// backend. The exchange goes into that backend's stream, after the work put there before.
pub trait Exchange<D: Device>: Send + Sync {
    /// Gives every rank the first `elements` f32 of every rank's `own`: those of rank r go into `all[r]`.
    ///
    /// # Errors
    /// When the devices cannot exchange any more, or a rank has left.
    fn share(
        &self,
        rank: usize,
        backend: &mut CudaBackend<D>,
        own: &Memory<D>,
        elements: usize,
        all: &[Memory<D>],
    ) -> Result<(), KernelError>;

    /// Copies rank r's `part`, `[rows, columns of r]`, into those columns of rank 0's `whole`.
    ///
    /// # Errors
    /// As for [`Exchange::share`].
    fn collect(
        &self,
        rank: usize,
        backend: &mut CudaBackend<D>,
        part: &Memory<D>,
        columns: &Columns<'_>,
        whole: &Memory<D>,
    ) -> Result<(), KernelError>;

    /// Ends all exchanges under way, on all ranks, for good.
    fn abort(&self);

    /// Whether exchanges were ended for good.
    fn aborted(&self) -> bool;
}

/// A device that can exchange with others of its kind.
pub trait ExchangingDevice: SharingDevice + Sized {
    /// Connects different devices of this process; rank r is the r-th of them. Blocks for seconds.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] when the host lacks the library that they exchange by; also when they cannot be connected.
    fn connect(devices: &[Arc<Self>]) -> Result<Arc<dyn Exchange<Self>>, KernelError>;
}

impl<D: Device> CudaBackend<D> {
    /// Sets the first `elements` f32 of `x` to the sum of those of `all`, added in the order of `all`.
    pub fn sum_of(&mut self, x: &mut Memory<D>, all: &[Memory<D>], elements: usize) -> Result<(), KernelError> {
        self.queue.fill(x.floats(elements), 0)?;
        all.iter().for_each(|other| self.add(x, other, elements));
        Ok(())
    }
}
