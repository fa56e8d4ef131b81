//! [`Exchange`] between devices that are the host's: each rank shows where its part lies, and all copy what they need while nobody goes on.

use std::sync::{Arc, Mutex, PoisonError};

use super::super::backend::CudaBackend;
use super::super::device::{Address, Device, Piece};
use super::super::exchange::{Columns, Exchange, ExchangingDevice};
use super::super::memory::Memory;
use super::super::recorder::Recorder;
use super::{HostDevice, host};
use crate::{KernelError, Meeting};

/// Ranks on devices of this process's own memory, whose work is done when it is put into a stream.
struct HostExchange {
    meeting: Meeting<String>,
    /// What each rank shows.
    shown: Mutex<Vec<Address>>,
    aborted: Mutex<bool>,
}

fn failed(why: String) -> KernelError {
    KernelError::Device { operation: "exchange between ranks".to_owned(), why }
}

impl HostExchange {
    /// Shows a rank's memory, has all of them copied from, and lets nobody write to them before all have.
    fn while_shown(&self, rank: usize, own: Piece<'_>, copy: impl FnOnce(&[Address])) -> Result<(), KernelError> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)[rank] = own.at();
        self.meeting.meet().map_err(failed)?;
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        copy(&shown);
        self.meeting.meet().map_err(failed)
    }
}

/// # Safety
/// There are as many bytes at `from`, which nobody writes to.
unsafe fn copy(from: Address, to: Piece<'_>) {
    // SAFETY: a piece lies inside memory that is there; the caller's promise for the other. What is shown is no rank's copy of it.
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
                // SAFETY: each rank shows as many elements, and waits until all have copied.
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
                // SAFETY: as above; a rank shows its columns of all rows.
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

/// A rank a device, whose memory is the host's.
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
