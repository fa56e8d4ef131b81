//! NCCL: exchanges between the GPUs of one process, by NVIDIA's library, opened at run time.
//!
//! Below the tensor-parallel ranks, which say what is exchanged when, as the [`Exchange`] of GPUs. An exchange is put into a backend's stream behind what it was given
//! before. Only moves data: sums are the backend's own kernels, since NCCL's order of adding depends on how much is added together (I1).
//! A host without the library is a [`KernelError::NoDevice`], told before anything else of it is called.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libloading::Library;

use super::backend::CudaBackend;
use super::device::Piece;
use super::driver::Driver;
use super::exchange::{Columns, Exchange, ExchangingDevice};
use super::memory::Memory;
use crate::KernelError;

/// Where it is looked for; distributions have the first, development packages the second too.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclFloat32`.
const FLOAT32: c_int = 7;

type Communicator = *mut c_void;
/// `ncclResult_t`; 0 is success.
type Status = c_int;
type Stream = *mut c_void;

/// The functions that are used, as `nccl.h` declares them since 2.7.
struct Nccl {
    comm_init_all: unsafe extern "C" fn(*mut Communicator, c_int, *const c_int) -> Status,
    comm_abort: unsafe extern "C" fn(Communicator) -> Status,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream) -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> Status,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    _library: Library,
}

/// The library, looked for once.
fn nccl() -> Result<&'static Nccl, KernelError> {
    static OPENED: OnceLock<Result<Nccl, String>> = OnceLock::new();
    OPENED.get_or_init(open).as_ref().map_err(|why| KernelError::NoDevice(why.clone()))
}

fn open() -> Result<Nccl, String> {
    // SAFETY: the library's initialisers only set up its own state.
    let found = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    let library = found.ok_or_else(|| {
        format!(
            "several ranks (tp) need NCCL, and this host has none ({}): install libnccl2, or set tp to 1",
            NAMES.join(", ")
        )
    })?;
    /// A function of the library, with the type that its header gives it.
    fn function<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
        // SAFETY: the types of `Nccl` are those of the header, which have not changed since; the library stays open with them.
        let symbol = unsafe { library.get::<T>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|error| format!("this host's NCCL is too old: {error}"))
    }
    Ok(Nccl {
        comm_init_all: function(&library, "ncclCommInitAll")?,
        comm_abort: function(&library, "ncclCommAbort")?,
        broadcast: function(&library, "ncclBroadcast")?,
        send: function(&library, "ncclSend")?,
        recv: function(&library, "ncclRecv")?,
        group_start: function(&library, "ncclGroupStart")?,
        group_end: function(&library, "ncclGroupEnd")?,
        error_string: function(&library, "ncclGetErrorString")?,
        _library: library,
    })
}

impl Nccl {
    fn check(&self, operation: &str, status: Status) -> Result<(), KernelError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a string that is never freed, for any status.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(KernelError::Device { operation: format!("NCCL {operation}"), why: text.to_string_lossy().into_owned() })
    }
}

/// GPUs that can exchange, one a rank.
struct Gpus {
    nccl: &'static Nccl,
    /// A rank's own, until it is aborted. Locked while it is used, so that none is used after that.
    communicators: Vec<Mutex<Option<Communicator>>>,
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
        nccl.check("connect", status)?;
        let communicators = made.into_iter().map(|communicator| Mutex::new(Some(communicator))).collect();
        Ok(Gpus { nccl, communicators })
    }

    /// What `calls` asks for with a rank's communicator becomes one exchange, also when a call of it failed.
    fn grouped(
        &self,
        rank: usize,
        calls: impl FnOnce(&Nccl, Communicator) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let gone = || KernelError::Device { operation: "NCCL".to_owned(), why: "a rank has failed before".to_owned() };
        let communicator = self.communicators.get(rank).ok_or_else(gone)?;
        let communicator = communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let (nccl, communicator) = (self.nccl, (*communicator).ok_or_else(gone)?);
        // SAFETY: takes nothing, and has its end below.
        nccl.check("group", unsafe { (nccl.group_start)() })?;
        let outcome = calls(nccl, communicator);
        // SAFETY: takes nothing.
        nccl.check("group", unsafe { (nccl.group_end)() }).and(outcome)
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
                    (nccl.broadcast)(pointer(own), pointer(to), elements, FLOAT32, root, communicator, stream)
                };
                nccl.check("broadcast", status)?;
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
                let status = unsafe { (nccl.send)(from, count, FLOAT32, 0, communicator, stream) };
                nccl.check("send", status)?;
                for peer in (0..columns.ranks()).filter(|_| rank == 0) {
                    let (to, count) =
                        piece(whole, row * columns.width() + columns.of(peer).start, columns.of(peer).len());
                    // SAFETY: as above.
                    let status = unsafe { (nccl.recv)(to, count, FLOAT32, peer as c_int, communicator, stream) };
                    nccl.check("receive", status)?;
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
        let gone = |c: &Mutex<Option<Communicator>>| c.lock().unwrap_or_else(PoisonError::into_inner).is_none();
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
