//! NCCL: exchanges between the GPUs of one process, by NVIDIA's library, opened at run time.
//!
//! Below the tensor-parallel ranks, which say what is exchanged when, as the [`Exchange`] of GPUs. An exchange is put into a backend's stream behind what it was given
//! before. Only moves data: sums are the backend's own kernels, since NCCL's order of adding depends on how much is added together (I1).
//! A host without the library is a [`KernelError::NoDevice`], told before anything else of it is called.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use baton_nccl_sys::{Api, Communicator, DataType, LoadError, NAMES, Status, load};

use super::backend::CudaBackend;
use super::device::Piece;
use super::driver::Driver;
use super::exchange::{Columns, Exchange, ExchangingDevice};
use super::memory::Memory;
use crate::KernelError;

/// The library, or what to do without.
fn nccl() -> Result<&'static Api, KernelError> {
    load().map_err(|error| {
        KernelError::NoDevice(match error {
            LoadError::Open { .. } => format!(
                "several ranks (tp) need NCCL, and this host has none ({}): install libnccl2, or set tp to 1",
                NAMES.join(", ")
            ),
            error => error.to_string(),
        })
    })
}

/// What a call has answered, as an error that says which.
fn check(nccl: &Api, operation: &str, status: Status) -> Result<(), KernelError> {
    if status == Status::OK {
        return Ok(());
    }
    // SAFETY: returns a string that is never freed, for any status.
    let text = unsafe { CStr::from_ptr((nccl.error_string)(status)) };
    Err(KernelError::Device { operation: format!("NCCL {operation}"), why: text.to_string_lossy().into_owned() })
}

/// GPUs that can exchange, one a rank.
struct Gpus {
    nccl: &'static Api,
    /// A rank's own, until it is aborted. Locked while it is used, so that none is used after that.
    communicators: Vec<Mutex<Option<*mut Communicator>>>,
}

// SAFETY: a communicator may be used from any thread, one at a time, which its lock sees to.
unsafe impl Send for Gpus {}
// SAFETY: as above.
unsafe impl Sync for Gpus {}

impl Gpus {
    /// Connects devices, whose numbers are `ordinals`: rank r is the r-th. Blocks for seconds.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] without NCCL; when it cannot connect them, or a device is there twice.
    fn connect(ordinals: &[u32]) -> Result<Gpus, KernelError> {
        let nccl = nccl()?;
        let devices: Vec<c_int> = ordinals.iter().map(|&ordinal| ordinal as c_int).collect();
        let mut made = vec![std::ptr::null_mut(); devices.len()];
        // SAFETY: room for as many communicators as there are devices.
        let status = unsafe { (nccl.comm_init_all)(made.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        check(nccl, "connect", status)?;
        let communicators = made.into_iter().map(|communicator| Mutex::new(Some(communicator))).collect();
        Ok(Gpus { nccl, communicators })
    }

    /// What `calls` asks for with a rank's communicator becomes one exchange, also when a call of it failed.
    fn grouped(
        &self,
        rank: usize,
        calls: impl FnOnce(&Api, *mut Communicator) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let gone = || KernelError::Device { operation: "NCCL".to_owned(), why: "a rank has failed before".to_owned() };
        let communicator = self.communicators.get(rank).ok_or_else(gone)?;
        let communicator = communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let (nccl, communicator) = (self.nccl, (*communicator).ok_or_else(gone)?);
        // SAFETY: takes nothing, and has its end below.
        check(nccl, "group", unsafe { (nccl.group_start)() })?;
        let outcome = calls(nccl, communicator);
        // SAFETY: takes nothing.
        check(nccl, "group", unsafe { (nccl.group_end)() }).and(outcome)
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        self.abort();
    }
}

fn pointer(piece: Piece<'_>) -> *mut c_void {
    piece.at().0 as *mut c_void
}

/// Elements of a piece of f32.
fn floats(piece: Piece<'_>) -> usize {
    piece.bytes() / size_of::<f32>()
}

impl Exchange<Driver> for Gpus {
    fn share(
        &self,
        rank: usize,
        backend: &mut CudaBackend<Driver>,
        own: &Memory<Driver>,
        elements: usize,
        all: &[Memory<Driver>],
    ) -> Result<(), KernelError> {
        let stream = backend.queue.raw()?;
        let own = own.floats(elements);
        self.grouped(rank, |nccl, communicator| {
            for (root, to) in (0..).zip(all) {
                let to = to.floats(elements);
                // SAFETY: both have `elements` f32 on this rank's device and outlive the stream's work, as all of a backend's buffers do;
                // `own` is read on its own rank only.
                let status = unsafe {
                    (nccl.broadcast)(pointer(own), pointer(to), elements, DataType::FLOAT32, root, communicator, stream)
                };
                check(nccl, "broadcast", status)?;
            }
            Ok(())
        })
    }

    fn collect(
        &self,
        rank: usize,
        backend: &mut CudaBackend<Driver>,
        part: &Memory<Driver>,
        columns: &Columns<'_>,
        whole: &Memory<Driver>,
    ) -> Result<(), KernelError> {
        let stream = backend.queue.raw()?;
        let piece = |memory: &Memory<Driver>, first: usize, count: usize| {
            let piece = memory.piece(first * size_of::<f32>(), count * size_of::<f32>());
            (pointer(piece), floats(piece))
        };
        self.grouped(rank, |nccl, communicator| {
            for row in 0..columns.rows {
                let mine = columns.of(rank).len();
                let (from, count) = piece(part, row * mine, mine);
                // SAFETY: as many f32 on this rank's device, which outlive the stream's work.
                let status = unsafe { (nccl.send)(from, count, DataType::FLOAT32, 0, communicator, stream) };
                check(nccl, "send", status)?;
                for peer in (0..columns.ranks()).filter(|_| rank == 0) {
                    let (to, count) =
                        piece(whole, row * columns.width() + columns.of(peer).start, columns.of(peer).len());
                    // SAFETY: as above.
                    let status =
                        unsafe { (nccl.recv)(to, count, DataType::FLOAT32, peer as c_int, communicator, stream) };
                    check(nccl, "receive", status)?;
                }
            }
            Ok(())
        })
    }

    fn abort(&self) {
        for communicator in &self.communicators {
            let taken = communicator.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(communicator) = taken {
                // SAFETY: made by `connect`, and taken out: used by nobody any more, and aborted once.
                let _ = unsafe { (self.nccl.comm_abort)(communicator) };
            }
        }
    }

    fn aborted(&self) -> bool {
        let gone = |c: &Mutex<Option<*mut Communicator>>| c.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        self.communicators.iter().any(gone)
    }
}

impl ExchangingDevice for Driver {
    fn connect(devices: &[Arc<Self>]) -> Result<Arc<dyn Exchange<Self>>, KernelError> {
        Ok(Arc::new(Gpus::connect(&devices.iter().map(|device| device.ordinal()).collect::<Vec<_>>())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is no NCCL, that is told, and nothing panics.
    #[test]
    fn a_host_without_the_library_says_so() {
        match nccl() {
            Ok(_) => {}
            Err(error) => assert_eq!(
                error.to_string(),
                "no GPU: several ranks (tp) need NCCL, and this host has none (libnccl.so.2, libnccl.so): install libnccl2, or set tp to 1"
            ),
        }
    }
}
