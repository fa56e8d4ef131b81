//! [`Driver`]: a GPU through NVIDIA's driver API, whose library is opened at run time.
//!
//! Nothing is linked. On a host without the library, [`KernelError::NoDevice`] is returned before any function of it is called. The
//! kernels are an image that the build script embeds.

mod blas;
mod graphs;
mod physical;
mod sharing;
mod tensor_map;

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blas::Blas;
use cudarc::driver::result::{self, DriverError, ctx, device, event, module, primary_ctx, stream};
use cudarc::driver::sys;
use graphs::Captures;

use super::device::{
    Address, Call, Device, Event, Fp8, Gemm, Graph, Launch, Piece, Properties, Rows, Stream, TensorMap,
};
use super::sharing::SharedMemory;
use crate::KernelError;

/// The kernels for all architectures; empty in a build without kernels.
static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton.fatbin"));

/// Bytes of dynamic shared memory that every kernel may have without asking for more.
const SHARED: u32 = 48 << 10;

/// The CUDA version that the kernels are compiled with, as 1000 · major + 10 · minor.
const COMPILED_WITH: i32 = 13_000;

/// A GPU, through the driver.
pub struct Driver {
    properties: Properties,
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    blas: Blas,
    /// Whether the GPU reaches any host memory through the host's page tables (Grace). The driver then need not copy the source of a
    /// [`Device::write`] before it returns.
    walks_host_tables: bool,
    made: Mutex<Made>,
    shared: Mutex<SharedMemory>,
    /// Whether memory is shared by legacy handles only.
    legacy_only: bool,
}

/// Kernels, streams, events and graphs that were asked for so far.
#[derive(Default)]
struct Made {
    /// By name, with the bytes of dynamic shared memory that each may have.
    kernels: HashMap<&'static str, (sys::CUfunction, u32)>,
    streams: Vec<sys::CUstream>,
    events: Vec<sys::CUevent>,
    captures: Captures,
}

// SAFETY: the driver's objects may be used from any thread that has made the context current, as every call here does first.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

fn failed(operation: &str) -> impl Fn(DriverError) -> KernelError + '_ {
    move |error| KernelError::Device { operation: operation.to_owned(), why: describe(error) }
}

/// Turns an allocation's failure into an error. Only a lack of memory becomes [`KernelError::Memory`]: any call may also return an
/// earlier failure of work.
fn no_memory(bytes: usize) -> impl Fn(DriverError) -> KernelError {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => KernelError::Memory { bytes },
        _ => failed("allocation")(error),
    }
}

fn describe(error: DriverError) -> String {
    let text = error.error_string().ok().map(|text| text.to_string_lossy().into_owned());
    format!("{} ({:?})", text.unwrap_or_default(), error.0)
}

fn none(why: impl Display) -> KernelError {
    KernelError::NoDevice(why.to_string())
}

/// Number of GPUs, at least one.
///
/// # Errors
/// [`KernelError::NoDevice`] with the reason why there is none.
pub fn devices() -> Result<u32, KernelError> {
    // SAFETY: the library's initialisers only set up its own state. No other function of it may be called before this check, since a
    // call to a missing library panics.
    if !unsafe { sys::is_culib_present() } {
        return Err(none("this host has no NVIDIA driver (libcuda.so.1)"));
    }
    result::init().map_err(|error| none(format!("the NVIDIA driver does not start: {}", describe(error))))?;
    let count = device::get_count().map_err(|error| none(format!("the NVIDIA driver: {}", describe(error))))?;
    if count < 1 { Err(none("the NVIDIA driver sees none")) } else { Ok(count as u32) }
}

/// The newest CUDA version that the driver supports, as 1000 · major + 10 · minor.
fn version() -> Result<i32, KernelError> {
    let mut version = 0;
    // SAFETY: the pointer is valid for the answer, and the library is loaded.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("version")).map(|()| version)
}

/// Refuses a driver that is too old for the kernels. It would only report that their image is invalid.
fn check_version(version: i32) -> Result<(), KernelError> {
    if version >= COMPILED_WITH {
        return Ok(());
    }
    let said = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let (serves, needed) = (said(version), said(COMPILED_WITH));
    Err(none(format!(
        "the NVIDIA driver serves CUDA {serves}, and the kernels need {needed}: install driver 580 or later"
    )))
}

impl Driver {
    /// Opens a GPU by its number, and loads the kernels and cuBLASLt.
    ///
    /// # Errors
    /// When there is no such GPU, no kernels are in this build or none for it, or there is no cuBLASLt.
    pub fn open(ordinal: u32) -> Result<Self, KernelError> {
        let count = devices()?;
        if ordinal >= count {
            return Err(none(format!("number {ordinal} of {count}, counted from 0")));
        }
        if IMAGE.is_empty() {
            return Err(none("this build has no GPU kernels; run kernels/cuda/build and build again"));
        }
        check_version(version()?)?;
        let device = device::get(ordinal as i32).map_err(failed("device"))?;
        let mut properties = properties(device)?;
        let tables = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        // SAFETY: a device that the driver just named.
        let walks_host_tables = unsafe { device::get_attribute(device, tables) }.map_err(failed("device"))? != 0;
        // SAFETY: a device that the driver just named.
        let context = unsafe { primary_ctx::retain(device) }.map_err(failed("context"))?;
        let opened = || {
            // SAFETY: the context was just retained.
            unsafe { ctx::set_current(context) }.map_err(failed("context"))?;
            Ok((load()?, Blas::new()?))
        };
        match opened() {
            Ok((module, blas)) => {
                properties.fp8 = blas.fp8(properties.capability);
                properties.products = format!("cuBLASLt {}", blas.version());
                let (made, shared) = (Mutex::default(), Mutex::default());
                Ok(Driver {
                    properties,
                    ordinal,
                    device,
                    context,
                    module,
                    blas,
                    walks_host_tables,
                    made,
                    shared,
                    legacy_only: false,
                })
            }
            Err(error) => {
                // SAFETY: retained above, and used by nobody any more.
                let _ = unsafe { primary_ctx::release(device) };
                Err(error)
            }
        }
    }

    /// The same GPU, but its memory is shared by CUDA's legacy handles only.
    pub fn with_legacy_handles(mut self) -> Self {
        self.legacy_only = true;
        self
    }

    /// The GPU's number on this host.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Makes this device's context current on the calling thread, which has a current context of its own.
    fn current(&self) -> Result<(), KernelError> {
        // SAFETY: the context is retained as long as `self` is there.
        unsafe { ctx::set_current(self.context) }.map_err(failed("context"))
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared(&self) -> MutexGuard<'_, SharedMemory> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver's handle of a stream. The context is current on this thread afterwards.
    pub(super) fn raw(&self, stream: Stream) -> Result<sys::CUstream, KernelError> {
        self.current()?;
        self.made().streams.get(stream.0).copied().ok_or_else(|| unknown("stream"))
    }

    fn raw_event(&self, event: Event) -> Result<sys::CUevent, KernelError> {
        self.made().events.get(event.0).copied().ok_or_else(|| unknown("event"))
    }

    /// The kernel of this name. It is allowed as much shared memory as `launch` asks for.
    fn kernel(&self, name: &'static str, launch: Launch) -> Result<sys::CUfunction, KernelError> {
        let mut made = self.made();
        let known = made.kernels.get(name).copied();
        if let Some((function, _)) = known.filter(|&(_, allowed)| launch.shared <= allowed) {
            return Ok(function);
        }
        let text = CString::new(name).map_err(|_| unknown("kernel"))?;
        // SAFETY: the module is loaded as long as `self` is there.
        let function = unsafe { module::get_function(self.module, text) }.map_err(failed(name))?;
        if launch.shared > SHARED {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of the module.
            unsafe { result::function::set_function_attribute(function, most, launch.shared as i32) }
                .map_err(failed(name))?;
        }
        made.kernels.insert(name, (function, launch.shared.max(SHARED)));
        Ok(function)
    }
}

fn unknown(what: &str) -> KernelError {
    KernelError::Device { operation: what.to_owned(), why: "of another device".to_owned() }
}

fn properties(device: sys::CUdevice) -> Result<Properties, KernelError> {
    use sys::CUdevice_attribute as A;
    // SAFETY: a device that the driver named.
    let attribute = |which| unsafe { device::get_attribute(device, which) }.map_err(failed("device"));
    Ok(Properties {
        name: device::get_name(device).map_err(failed("device"))?,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        // SAFETY: as above.
        memory: unsafe { device::total_mem(device) }.map_err(failed("device"))? as u64,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // `Driver::open` fills these in from cuBLASLt.
        fp8: Fp8::None,
        products: String::new(),
        id: physical::id_of(device).ok(),
    })
}

/// Loads the embedded kernels for the current device.
fn load() -> Result<sys::CUmodule, KernelError> {
    // The image begins with a header of 64-bit words, so it is copied to an aligned place.
    let mut words = vec![0u64; IMAGE.len().div_ceil(8)];
    for (word, bytes) in words.iter_mut().zip(IMAGE.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    // SAFETY: a fatbin's header says how long it is, and the driver copies it.
    unsafe { module::load_data(words.as_ptr().cast()) }.map_err(failed("loading the kernels"))
}

impl Device for Driver {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<u64, KernelError> {
        self.current()?;
        result::mem_get_info().map(|(free, _)| free as u64).map_err(failed("memory"))
    }

    fn allocate(&self, bytes: usize) -> Result<Address, KernelError> {
        self.current()?;
        // SAFETY: nobody else has the new memory.
        unsafe { result::malloc_sync(bytes) }.map(Address).map_err(no_memory(bytes))
    }

    fn free(&self, at: Address) {
        let shared = self.shared().disown(at);
        match shared {
            Some(memory) => memory.free(self),
            None => self.free_plain(at),
        }
    }

    unsafe fn map(&self, base: *mut u8, bytes: usize) -> Result<Address, KernelError> {
        self.current()?;
        let map = failed("mapping the pool's memory");
        // SAFETY: the caller's promise for the memory.
        unsafe { sys::cuMemHostRegister_v2(base.cast(), bytes, sys::CU_MEMHOSTREGISTER_DEVICEMAP) }
            .result()
            .map_err(&map)?;
        let mut at = 0;
        // SAFETY: registered just now, with an address for the device.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, base.cast(), 0) }.result().map_err(&map);
        if found.is_err() {
            self.unmap(base, Address(at));
        }
        found.map(|()| Address(at))
    }

    fn unmap(&self, base: *mut u8, _at: Address) {
        // The call does not wait; the backend has waited before. As for `free`, other calls report a failure.
        if self.current().is_ok() {
            // SAFETY: registered by `map`, and unmapped once.
            let _ = unsafe { sys::cuMemHostUnregister(base.cast()) };
        }
    }

    fn stream(&self) -> Result<Stream, KernelError> {
        self.current()?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(failed("stream"))?;
        let mut made = self.made();
        made.streams.push(stream);
        Ok(Stream(made.streams.len() - 1))
    }

    fn event(&self) -> Result<Event, KernelError> {
        self.current()?;
        // Without timing, which would slow down waiting for the event.
        let event = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed("event"))?;
        let mut made = self.made();
        made.events.push(event);
        Ok(Event(made.events.len() - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError> {
        let (stream, event) = (self.raw(stream)?, self.raw_event(event)?);
        // SAFETY: both live as long as `self`.
        unsafe { event::record(event, stream) }.map_err(failed("event"))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError> {
        let (stream, event) = (self.raw(stream)?, self.raw_event(event)?);
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live as long as `self`.
        unsafe { stream::wait_event(stream, event, flags) }.map_err(failed("event"))
    }

    fn fill(&self, stream: Stream, to: Piece<'_>, byte: u8) -> Result<(), KernelError> {
        let stream = self.raw(stream)?;
        // SAFETY: a piece lies inside memory that is still allocated; freeing that memory waits for this work.
        unsafe { result::memset_d8_async(to.at().0, byte, to.bytes(), stream) }.map_err(failed("fill"))
    }

    fn write(&self, stream: Stream, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError> {
        assert!(from.len() <= to.bytes(), "{} bytes into {}", from.len(), to.bytes());
        self.refuse_captured("copy to the device", stream)?;
        let stream = self.raw(stream)?;
        // SAFETY: as in `fill`. `from` is not pinned: the driver has copied it when the call returns, or the stream is waited for below.
        unsafe { result::memcpy_htod_async(to.at().0, from, stream) }.map_err(failed("copy to the device"))?;
        if !self.walks_host_tables {
            return Ok(());
        }
        // SAFETY: a stream lives as long as `self`.
        unsafe { stream::synchronize(stream) }.map_err(failed("copy to the device"))
    }

    fn read(&self, stream: Stream, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError> {
        assert!(to.len() <= from.bytes(), "{} bytes out of {}", to.len(), from.bytes());
        self.refuse_captured("copy from the device", stream)?;
        let raw = self.raw(stream)?;
        // SAFETY: as in `fill`; `to` stays borrowed until the stream is waited for below.
        unsafe { result::memcpy_dtoh_async(to, from.at().0, raw) }.map_err(failed("copy from the device"))?;
        self.synchronise(stream)
    }

    fn tensor_map(&self, rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
        self.current()?;
        tensor_map::encode(rows)
    }

    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), KernelError> {
        let (stream, function) = (self.raw(stream)?, self.kernel(call.kernel, call.launch)?);
        let ([gx, gy, gz], [bx, by, bz]) = (call.launch.grid, call.launch.block);
        let mut params = [call.params.cast::<c_void>().cast_mut()];
        // SAFETY: the caller vouches for the parameters, and the driver copies them.
        unsafe { result::launch_kernel(function, (gx, gy, gz), (bx, by, bz), call.launch.shared, stream, &mut params) }
            .map_err(failed(call.kernel))
    }

    fn product(&self, stream: Stream, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let stream = self.raw(stream)?;
        self.blas.product(stream, gemm)
    }

    fn synchronise(&self, stream: Stream) -> Result<(), KernelError> {
        let stream = self.raw(stream)?;
        // SAFETY: a stream lives as long as `self`.
        unsafe { stream::synchronize(stream) }.map_err(failed("the work so far"))
    }

    /// An error of work stays with the context: every call that waits returns it again until the process ends.
    fn lost(&self) -> Option<KernelError> {
        self.current().and_then(|()| ctx::synchronize().map_err(failed("all work so far"))).err()
    }

    fn begin_capture(&self, stream: Stream) -> Result<(), KernelError> {
        self.begin(stream)
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph, KernelError> {
        self.end(stream)
    }

    unsafe fn replay(&self, stream: Stream, graph: Graph) -> Result<(), KernelError> {
        // SAFETY: the caller vouches for it.
        unsafe { self.launch_graph(stream, graph) }
    }

    fn forget(&self, graph: Graph) {
        self.destroy(graph);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let made = std::mem::take(&mut *self.made());
        if self.current().is_err() {
            return;
        }
        // Errors are ignored: nothing can be done about them here.
        self.blas.close();
        // SAFETY: all of them were made by this driver, and nobody uses `self` any more.
        unsafe {
            made.captures.destroy_all();
            for event in made.events {
                let _ = event::destroy(event);
            }
            for stream in made.streams {
                let _ = stream::destroy(stream);
            }
            let _ = module::unload(self.module);
            let _ = primary_ctx::release(self.device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds on any host, with or without a GPU: the error says what is missing, and nothing panics.
    #[test]
    fn a_host_without_a_gpu_is_an_error_that_says_what_is_missing() {
        match Driver::open(u32::MAX) {
            Err(KernelError::NoDevice(why)) => {
                assert!(why.contains("NVIDIA driver") || why.contains("counted from 0"), "{why}")
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("there is no such GPU"),
        }
    }

    #[test]
    fn only_what_is_no_room_is_told_as_such() {
        let said = |code| no_memory(9)(DriverError(code));
        assert!(matches!(said(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY), KernelError::Memory { bytes: 9 }));
    }

    #[test]
    fn a_driver_that_cannot_load_the_kernels_is_told_by_its_version() {
        assert!(check_version(13_000).is_ok() && check_version(13_010).is_ok());
        let said = check_version(12_080).unwrap_err().to_string();
        assert!(said.contains("serves CUDA 12.8") && said.contains("need 13.0") && said.contains("580"), "{said}");
    }
}
