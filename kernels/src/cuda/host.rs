//! [`HostDevice`]: the kernels compiled for this processor, launched on this process's own memory.
//!
//! For tests without a GPU: the same sources run with one fiber for each CUDA thread, and with real barriers and shuffles
//! (`kernels/cuda/shim`). All work of a call is done when it returns, so streams and events are mere names.

mod exchange;
mod memory;
mod sharing;

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use super::device::{
    Address, Call, Device, Event, Fp8, Gemm, Graph, Operands, Piece, Properties, Rows, Stream, TensorMap,
};
use super::sharing::SharedMemory;
use super::work::{Captures, Kept, Work};
use crate::KernelError;
pub use memory::Held;
pub(super) use memory::{HostMemory, MemoryCall, Why};

type LaunchFn = unsafe extern "C" fn(*const c_char, *const u8, u64, *const u32, *const u32, u32) -> u32;
/// Arguments: map, base; width, rows, bytes of a row; width and rows of a box.
type TensorMapFn = unsafe extern "C" fn(*mut TensorMap, *mut u8, u64, u64, u64, u32, u32) -> u32;
type LayoutFn = unsafe extern "C" fn(*const c_char, *mut u64, u64) -> u64;
/// Arguments: weight, x, bias, out; rows, outs, cols, f32 from one row of out to the next.
type ProductFn = unsafe extern "C" fn(*mut u8, *mut u8, *mut u8, *mut u8, u64, u64, u64, u64);
/// Arguments: weight, x, the weight's scales, x's scales, out; rows, outs, cols, f32 from one row of out to the next.
type ProductE4m3Fn = unsafe extern "C" fn(*mut u8, *mut u8, *mut u8, *mut u8, *mut u8, u64, u64, u64, u64);

/// Bytes of memory that the device claims to have.
const MEMORY: u64 = 1 << 30;
/// Hopper's compute capability, since the shim emulates Hopper's units.
const CAPABILITY: (u32, u32) = (9, 0);
/// Alignment of every allocation in bytes, as a driver has it.
const ALIGN: usize = 256;

/// The library runs one launch at a time.
static RUNNING: Mutex<()> = Mutex::new(());

/// A device that runs the kernels on the host.
pub struct HostDevice {
    launch: LaunchFn,
    layout: LayoutFn,
    product: ProductFn,
    tensor_map: TensorMapFn,
    product_e4m3: ProductE4m3Fn,
    /// Keeps the functions' code loaded.
    _library: Library,
    properties: Properties,
    memory: Mutex<HashMap<Address, Layout>>,
    shared: Mutex<SharedMemory>,
    /// The calls by which memory is shared.
    shareable: HostMemory,
    named: AtomicUsize,
    captures: Mutex<Captures>,
}

impl HostDevice {
    /// Opens the library that `kernels/cuda/tests/run library` has built.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let failed = |error: libloading::Error| KernelError::NoDevice(format!("{}: {error}", path.display()));
        // SAFETY: the library's initialisers only fill its own variables.
        let library = unsafe { Library::new(path) }.map_err(failed)?;
        // SAFETY: the five functions of kernels/cuda/shim/library.cpp have these types.
        let (launch, layout, product, tensor_map, product_e4m3) = unsafe {
            (
                *library.get::<LaunchFn>(c"baton_host_launch").map_err(failed)?,
                *library.get::<LayoutFn>(c"baton_host_layout").map_err(failed)?,
                *library.get::<ProductFn>(c"baton_host_product").map_err(failed)?,
                *library.get::<TensorMapFn>(c"baton_host_tensor_map").map_err(failed)?,
                *library.get::<ProductE4m3Fn>(c"baton_host_product_e4m3").map_err(failed)?,
            )
        };
        let name = "kernels on the host".to_owned();
        let fp8 = Fp8::Plain;
        let (memory, capability, products) = (MEMORY, CAPABILITY, "this processor's products".to_owned());
        let properties =
            Properties { name, memory, capability, multiprocessors: 1, fp8, products, ..Properties::default() };
        let (memory, shared, named) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
        let (captures, shareable) = (Mutex::default(), HostMemory::default());
        Ok(HostDevice {
            launch,
            layout,
            product,
            tensor_map,
            product_e4m3,
            _library: library,
            properties,
            memory,
            shared,
            shareable,
            named,
            captures,
        })
    }

    /// The same device, but with this way of multiplying matrices of E4M3.
    pub fn with_fp8(mut self, fp8: Fp8) -> Self {
        self.properties.fp8 = fp8;
        self
    }

    /// The same device, but its memory can be shared by legacy handles only.
    pub fn with_legacy_handles(self) -> Self {
        self.shareable.refuse(MemoryCall::Names, Why::NotSupported);
        self
    }

    /// What this process has of memory that it shares.
    pub fn held(&self) -> Held {
        self.shareable.held()
    }

    /// A device with the library built from the present sources. Without the CUDA headers: None, with the reason on standard error.
    ///
    /// # Panics
    /// When the library cannot be built or opened. Also without the headers if `BATON_REQUIRE_ALL` is set, as `.ci/run` does.
    #[allow(clippy::expect_used)]
    pub fn for_tests() -> Option<HostDevice> {
        static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
        let path = BUILT.get_or_init(|| {
            let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
            let said = |program: &str, argument: &str| {
                let output = Command::new(cuda.join(program)).arg(argument).output().expect("a script of kernels/cuda");
                assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8_lossy(&output.stdout).trim().to_owned()
            };
            if said("toolchain", "--installed").is_empty() {
                let all = std::env::var_os("BATON_REQUIRE_ALL").is_some_and(|value| !value.is_empty());
                assert!(
                    !all,
                    "BATON_REQUIRE_ALL is set, and there are no CUDA headers; kernels/cuda/toolchain installs them"
                );
                eprintln!("skipped: no CUDA headers; kernels/cuda/toolchain installs them");
                return None;
            }
            Some(PathBuf::from(said("tests/run", "library")))
        });
        Some(HostDevice::open(path.as_deref()?).expect("the library of kernels opens"))
    }

    /// Size of a struct of the kernels and offsets of its fields; empty if there is no struct of that name.
    pub fn layout(&self, name: &str) -> Vec<usize> {
        let Ok(name) = CString::new(name) else { return Vec::new() };
        let mut out = [0u64; 32];
        // SAFETY: the string is terminated, and `out` has room for as many numbers as is passed.
        let count = unsafe { (self.layout)(name.as_ptr(), out.as_mut_ptr(), out.len() as u64) };
        out[..(count as usize).min(out.len())].iter().map(|&x| x as usize).collect()
    }

    fn shared(&self) -> MutexGuard<'_, SharedMemory> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> usize {
        self.named.fetch_add(1, Ordering::Relaxed)
    }

    fn captures(&self) -> MutexGuard<'_, Captures> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work now, or records it if its stream is being captured.
    ///
    /// # Safety
    /// Its addresses are valid memory of the sizes given in it, at the time when it is done.
    unsafe fn put(&self, stream: Stream, work: Work) -> Result<(), KernelError> {
        let now = self.captures().put(stream, work);
        // SAFETY: the caller vouches for it.
        now.map_or(Ok(()), |work| unsafe { self.run(&work) })
    }

    /// # Safety
    /// As for `put`.
    unsafe fn run(&self, work: &Work) -> Result<(), KernelError> {
        match work {
            Work::Fill { at, bytes, byte } => {
                // SAFETY: the caller vouches for it.
                unsafe { host(*at).write_bytes(*byte, *bytes) };
            }
            Work::Launch(call) => {
                // SAFETY: the caller vouches for it.
                unsafe { self.call(call)? };
            }
            Work::Product { weight, x, bias, out, rows, outs, cols, stride } => {
                let bias = bias.map_or(std::ptr::null_mut(), host);
                // SAFETY: the caller vouches for the addresses; null means no bias.
                unsafe { (self.product)(host(*weight), host(*x), bias, host(*out), *rows, *outs, *cols, *stride) };
            }
            Work::ProductE4m3 { weight, x, scales, out, rows, outs, cols, stride } => {
                let [of_weight, of_x] = scales.map_or([std::ptr::null_mut(); 2], |scales| scales.map(host));
                let (weight, x, out) = (host(*weight), host(*x), host(*out));
                // SAFETY: the caller vouches for the addresses; null means no scales.
                unsafe { (self.product_e4m3)(weight, x, of_weight, of_x, out, *rows, *outs, *cols, *stride) };
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for `put`.
    unsafe fn call(&self, call: &Kept) -> Result<(), KernelError> {
        let device = |why: &str| KernelError::Device { operation: call.kernel.to_owned(), why: why.to_owned() };
        let name = CString::new(call.kernel).map_err(|_| device("no name"))?;
        let _one = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let (grid, block) = (call.launch.grid.as_ptr(), call.launch.block.as_ptr());
        // SAFETY: the caller vouches for the parameters; grid and block have three numbers each.
        let code =
            unsafe { (self.launch)(name.as_ptr(), call.params(), call.bytes as u64, grid, block, call.launch.shared) };
        match code {
            0 => Ok(()),
            1 => Err(device("there is no such kernel")),
            2 => Err(device("its parameters have another size")),
            _ => Err(device("grid, block or shared memory are not what its launch_of says")),
        }
    }
}

impl Device for HostDevice {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<u64, KernelError> {
        Ok(MEMORY)
    }

    /// Fills the memory with ones, which are NaNs as floats, so that reading before writing shows.
    fn allocate(&self, bytes: usize) -> Result<Address, KernelError> {
        self.captures().refuse("allocation", None)?;
        let none = || KernelError::Memory { bytes };
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| none())?;
        // SAFETY: callers ask for at least one byte.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(none());
        }
        // SAFETY: as many bytes as were allocated.
        unsafe { memory.write_bytes(0xff, bytes) };
        let at = Address(memory.expose_provenance() as u64);
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(at, layout);
        Ok(at)
    }

    fn free(&self, at: Address) {
        let shared = self.shared().disown(at);
        if let Some(memory) = shared {
            memory.free(&self.shareable);
            return;
        }
        if let Some(layout) = self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(&at) {
            // SAFETY: `allocate` allocated it with this layout, and it was removed from the list.
            unsafe { dealloc(host(at), layout) };
        }
    }

    unsafe fn map(&self, base: *mut u8, _bytes: usize) -> Result<Address, KernelError> {
        Ok(Address(base.expose_provenance() as u64))
    }

    fn unmap(&self, _base: *mut u8, _at: Address) {}

    fn stream(&self) -> Result<Stream, KernelError> {
        Ok(Stream(self.next()))
    }

    fn event(&self) -> Result<Event, KernelError> {
        Ok(Event(self.next()))
    }

    fn record(&self, _event: Event, _stream: Stream) -> Result<(), KernelError> {
        Ok(())
    }

    fn wait(&self, _stream: Stream, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }

    fn fill(&self, stream: Stream, to: Piece<'_>, byte: u8) -> Result<(), KernelError> {
        // SAFETY: a piece lies inside memory that is still allocated. For a graph, the caller of `replay` vouches that it still is then.
        unsafe { self.put(stream, Work::Fill { at: to.at(), bytes: to.bytes(), byte }) }
    }

    fn write(&self, stream: Stream, to: Piece<'_>, from: &[u8]) -> Result<(), KernelError> {
        self.captures().refuse("write", Some(stream))?;
        assert!(from.len() <= to.bytes(), "{} bytes into {}", from.len(), to.bytes());
        // SAFETY: a piece lies inside memory that is still allocated, and no Rust slice overlaps device memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), host(to.at()), from.len()) };
        Ok(())
    }

    fn read(&self, stream: Stream, from: Piece<'_>, to: &mut [u8]) -> Result<(), KernelError> {
        self.captures().refuse("read", Some(stream))?;
        assert!(to.len() <= from.bytes(), "{} bytes out of {}", to.len(), from.bytes());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(host(from.at()), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn tensor_map(&self, rows: &Rows<'_>) -> Result<TensorMap, KernelError> {
        let (mut map, stride) = (TensorMap::default(), u64::from(rows.width) * 2);
        let (count, [width, height]) = (rows.memory.bytes() as u64 / stride.max(1), rows.box_shape);
        // SAFETY: there is room for a map, and the call uses only the memory's address.
        let code = unsafe {
            (self.tensor_map)(&raw mut map, host(rows.memory.at()), rows.width.into(), count, stride, width, height)
        };
        let why = || format!("{rows:?} cannot be copied by boxes");
        if code == 0 { Ok(map) } else { Err(KernelError::Device { operation: "tensor map".to_owned(), why: why() }) }
    }

    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller vouches for the parameters; the memory is valid as in `fill`.
        unsafe { self.put(stream, Work::Launch(Kept::of(call))) }
    }

    fn product(&self, stream: Stream, gemm: &Gemm<'_>) -> Result<(), KernelError> {
        let (rows, outs, cols, stride) = (gemm.rows as u64, gemm.outs as u64, gemm.cols as u64, gemm.stride as u64);
        let bias = gemm.bias.map(|bias| bias.at());
        let (weight, x, out) = (gemm.weight.at(), gemm.x.at(), gemm.out.at());
        let work = match gemm.operands {
            Operands::Bf16 => Work::Product { weight, x, bias, out, rows, outs, cols, stride },
            Operands::E4m3(scales) => {
                let scales = scales.map(|scales| [scales.weight.at(), scales.x.at()]);
                Work::ProductE4m3 { weight, x, scales, out, rows, outs, cols, stride }
            }
        };
        // SAFETY: pieces lie inside memory that is still allocated and have the sizes that a `Gemm` has; for a graph as in `fill`.
        unsafe { self.put(stream, work) }
    }

    fn synchronise(&self, stream: Stream) -> Result<(), KernelError> {
        self.captures().refuse("wait", Some(stream))
    }

    fn begin_capture(&self, stream: Stream) -> Result<(), KernelError> {
        self.captures().begin(stream)
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph, KernelError> {
        let graph = Graph(self.next());
        self.captures().end(stream, graph)
    }

    unsafe fn replay(&self, _stream: Stream, graph: Graph) -> Result<(), KernelError> {
        let work = self.captures().work(graph)?;
        // SAFETY: the caller vouches for all of the graph's memory.
        work.iter().try_for_each(|work| unsafe { self.run(work) })
    }

    fn forget(&self, graph: Graph) {
        self.captures().forget(graph);
    }
}

/// The host pointer of a device address: on this device they are the same.
fn host(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at.0 as usize)
}
