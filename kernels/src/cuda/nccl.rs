//! [`Exchange`] between the GPUs of one process by NCCL, NVIDIA's library, which is opened at run time.
//!
//! The tensor-parallel ranks above decide when they exchange what. An exchange goes into a backend's stream, after the work put there
//! before. NCCL only moves data. The backend's own kernels add it up, since NCCL's order of adding depends on the number of elements
//! (I1). On a host without the library, [`KernelError::NoDevice`] is returned before any function of it is called.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use baton_nccl_sys::{Api, Communicator, DataType, LoadError, NAMES, Status, load};

use super::backend::CudaBackend;
use super::device::Piece;
use super::driver::Driver;
use super::exchange::{Columns, Exchange, ExchangingDevice};
use super::memory::Memory;
use crate::KernelError;

/// The library, or an error that says what to install or set.
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

/// Turns a call's status into an error that names the call.
fn check(nccl: &Api, operation: &str, status: Status) -> Result<(), KernelError> {
    if status == Status::OK {
        return Ok(());
    }
    // SAFETY: the call returns a string that is never freed, for any status.
    let text = unsafe { CStr::from_ptr((nccl.error_string)(status)) };
    Err(KernelError::Device { operation: format!("NCCL {operation}"), why: text.to_string_lossy().into_owned() })
}

/// GPUs that can exchange, one per rank.
struct Gpus {
    nccl: &'static Api,
    /// Each rank's communicator; None once it is aborted. It is locked while it is used, so that nobody uses it after the abort.
    communicators: Vec<Mutex<Option<*mut Communicator>>>,
}

// SAFETY: a communicator may be used from any thread, by one thread at a time; its lock ensures that.
unsafe impl Send for Gpus {}
// SAFETY: as above.
unsafe impl Sync for Gpus {}

impl Gpus {
    /// Connects the devices with these numbers; rank r is the r-th of them. Blocks for seconds.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] without NCCL; also when NCCL cannot connect them, or a device is named twice.
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

    /// Groups the calls that `calls` makes with a rank's communicator into one exchange. The group is closed also when a call failed.
    fn grouped(
        &self,
        rank: usize,
        calls: impl FnOnce(&Api, *mut Communicator) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let gone = || KernelError::Device { operation: "NCCL".to_owned(), why: "a rank has failed before".to_owned() };
        let communicator = self.communicators.get(rank).ok_or_else(gone)?;
        let communicator = communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let (nccl, communicator) = (self.nccl, (*communicator).ok_or_else(gone)?);
        // SAFETY: the call takes no arguments, and the group is ended below.
        check(nccl, "group", unsafe { (nccl.group_start)() })?;
        let outcome = calls(nccl, communicator);
        // SAFETY: the call takes no arguments.
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

/// Number of f32 in a piece.
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
                // SAFETY: both have `elements` f32 on this rank's device and outlive the stream's work, as all of a backend's buffers do.
                // `own` is read only where `root` is this rank.
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
                // SAFETY: the piece has `count` f32 on this rank's device and outlives the stream's work.
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
                // SAFETY: `connect` made it. It was taken out of its lock, so nobody uses it any more and it is aborted once.
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

    /// Without NCCL the error says so, and nothing panics.
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
