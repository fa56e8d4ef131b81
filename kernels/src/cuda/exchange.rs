//! What the tensor-parallel ranks of one process, on a device each, need to exchange: the trait [`Exchange`].
//!
//! Only moves data: sums are the backend's own kernels ([`CudaBackend::sum_of`]), in the order of ranks (I1). GPUs exchange by NCCL, see
//! `nccl`; the host's devices copy out of each other's memory, see `host`. What is exchanged when is the ranks' business.

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
    /// Rows of it.
    pub rows: usize,
    /// Where each rank's columns begin, and the end.
    pub splits: &'a [usize],
}

impl Columns<'_> {
    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.splits.len().saturating_sub(1)
    }

    /// A rank's columns.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.splits[rank]..self.splits[rank + 1]
    }

    /// All columns.
    pub fn width(&self) -> usize {
        self.splits.last().copied().unwrap_or(0)
    }
}

/// Devices that can exchange, one a rank. All ranks call the same methods in the same order, each from its own thread and with its own
/// backend, into whose stream the exchange is put behind what it was given before.
pub trait Exchange<D: Device>: Send + Sync {
    /// Every rank gets every rank's first `elements` of `own`: rank r's into `all[r]`.
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

    /// Rank r's `part` `[rows, columns of r]` becomes those columns of rank 0's `whole`.
    ///
    /// # Errors
    /// As of [`Exchange::share`].
    fn collect(
        &self,
        rank: usize,
        backend: &mut CudaBackend<D>,
        part: &Memory<D>,
        columns: &Columns<'_>,
        whole: &Memory<D>,
    ) -> Result<(), KernelError>;

    /// Ends all that is under way between them, on all, for good.
    fn abort(&self);

    /// Whether they can exchange no more.
    fn aborted(&self) -> bool;
}

/// A device that can exchange with others of its kind.
pub trait ExchangingDevice: SharingDevice + Sized {
    /// Connects devices of this process, of which none is there twice: rank r is the r-th. Blocks for seconds.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] when the host lacks what they exchange by; when they cannot be connected.
    fn connect(devices: &[Arc<Self>]) -> Result<Arc<dyn Exchange<Self>>, KernelError>;
}

impl<D: Device> CudaBackend<D> {
    /// The first `elements` of `x` become the sum of those of `all`, added in their order.
    pub fn sum_of(&mut self, x: &mut Memory<D>, all: &[Memory<D>], elements: usize) -> Result<(), KernelError> {
        self.queue.fill(x.floats(elements), 0)?;
        all.iter().for_each(|other| self.add(x, other, elements));
        Ok(())
    }
}
