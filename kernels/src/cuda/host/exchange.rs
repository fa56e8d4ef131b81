//! [`Exchange`] between host devices: each rank shows the address of its part, and all ranks copy what they need before any goes on.

use std::sync::{Arc, Mutex, PoisonError};

use super::super::backend::CudaBackend;
use super::super::device::{Address, Device, Piece};
use super::super::exchange::{Columns, Exchange, ExchangingDevice};
use super::super::memory::Memory;
use super::super::recorder::Recorder;
use super::{HostDevice, host};
use crate::{KernelError, Meeting};

/// Ranks whose devices use this process's memory and finish work as soon as it is put into a stream.
struct HostExchange {
    meeting: Meeting<String>,
    /// The address that each rank shows.
    shown: Mutex<Vec<Address>>,
    aborted: Mutex<bool>,
}

fn failed(why: String) -> KernelError {
    KernelError::Device { operation: "exchange between ranks".to_owned(), why }
}

impl HostExchange {
    /// Shows a rank's memory, calls `copy` with the addresses of all ranks, and returns once all ranks have copied. So no rank writes to
    /// its memory before the others have read it.
    fn while_shown(&self, rank: usize, own: Piece<'_>, copy: impl FnOnce(&[Address])) -> Result<(), KernelError> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)[rank] = own.at();
        self.meeting.meet().map_err(failed)?;
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        copy(&shown);
        self.meeting.meet().map_err(failed)
    }
}

/// Copies as many bytes as `to` has.
///
/// # Safety
/// `from` has as many bytes, and nobody writes to them meanwhile.
unsafe fn copy(from: Address, to: Piece<'_>) {
    // SAFETY: a piece lies inside memory that is still allocated; the caller vouches for `from`. `copy` allows the two to overlap.
    unsafe { std::ptr::copy(host(from), host(to.at()), to.bytes()) };
}

impl<D: Device> Exchange<D> for HostExchange {
    fn share(
        &self,
        rank: usize,
        _: &mut CudaBackend<D>,
        own: &Memory<D>,
        elements: usize,
        all: &[Memory<D>],
    ) -> Result<(), KernelError> {
        self.while_shown(rank, own.floats(elements), |shown| {
            for (from, to) in shown.iter().zip(all) {
                // SAFETY: each rank shows as many elements, and does not change them until all ranks have copied.
                unsafe { copy(*from, to.floats(elements)) };
            }
        })
    }

    fn collect(
        &self,
        rank: usize,
        _: &mut CudaBackend<D>,
        part: &Memory<D>,
        columns: &Columns<'_>,
        whole: &Memory<D>,
    ) -> Result<(), KernelError> {
        let bytes = |elements: usize| elements * size_of::<f32>();
        self.while_shown(rank, part.floats(columns.rows * columns.of(rank).len()), |shown| {
            let rows = (0..columns.rows).filter(|_| rank == 0);
            for (row, (peer, from)) in rows.flat_map(|row| shown.iter().enumerate().map(move |peer| (row, peer))) {
                let range = columns.of(peer);
                let to = whole.piece(bytes(row * columns.width() + range.start), bytes(range.len()));
                // SAFETY: as above; each rank shows its columns of all rows.
                unsafe { copy(from.plus(bytes(row * range.len())), to) };
            }
        })
    }

    fn abort(&self) {
        *self.aborted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.meeting.abort(&"a rank has failed".to_owned());
    }

    fn aborted(&self) -> bool {
        *self.aborted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects host devices, one per rank.
fn connect<D: Device>(devices: &[Arc<D>]) -> Arc<dyn Exchange<D>> {
    let (meeting, shown) = (Meeting::new(devices.len()), Mutex::new(vec![Address::default(); devices.len()]));
    Arc::new(HostExchange { meeting, shown, aborted: Mutex::new(false) })
}

impl ExchangingDevice for HostDevice {
    fn connect(devices: &[Arc<Self>]) -> Result<Arc<dyn Exchange<Self>>, KernelError> {
        Ok(connect(devices))
    }
}

impl ExchangingDevice for Recorder<HostDevice> {
    fn connect(devices: &[Arc<Self>]) -> Result<Arc<dyn Exchange<Self>>, KernelError> {
        Ok(connect(devices))
    }
}
