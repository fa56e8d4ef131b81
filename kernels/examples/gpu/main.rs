//! What the GPU backend does on a GPU, as a program that can be carried to one: conformance, and how fast kernels and products are.
//!
//!     cargo run --release -p baton-kernels --example gpu -- conformance
//!     cargo run --release -p baton-kernels --example gpu -- bench
//!     cargo run --release -p baton-kernels --example gpu -- handoff
//!     cargo run --release -p baton-kernels --example gpu -- sharing
//!
//! Each figure is the median of several rounds, over values that are noise: of products of zeros, or attention whose scores are all one,
//! less is done. Where attention has two kernels for a batch, what both give at the measured size is compared. With `--json` a line is an
//! object, which `tests/gpu/table.py` makes a table of. With `--host` the kernels compiled for this processor stand in for the device, in
//! sizes that take seconds: that checks the program, its figures mean nothing. With `--no-hopper` a Hopper GPU is used as any other; with
//! `--fp8` the conformance is of weights of 8 bits.

mod attention;
mod handoff;
mod products;
mod sampling;
mod sharing;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use baton_kernels::conformance::{self, Factory, Promises};
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device, Driver, Fp8, HostDevice};
use baton_kernels::{Backend, KernelError};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PoolGeometry};

/// Tokens of a block.
const BLOCK: u32 = 16;

struct Gpu<D> {
    device: Arc<D>,
    options: CudaOptions,
}

impl<D: Device> Factory for Gpu<D> {
    type Backend = CudaBackend<D>;

    fn make(&self, geometry: &PoolGeometry) -> CudaBackend<D> {
        CudaBackend::new(Arc::clone(&self.device), geometry.clone(), self.options).unwrap_or_else(|e| panic!("{e}"))
    }

    fn block(&self, backend: &CudaBackend<D>, group: usize, layer: usize, block: BlockId) -> Vec<u8> {
        backend.block_bytes(group, layer, block).unwrap_or_else(|e| panic!("{e}"))
    }

    fn promises(&self) -> Promises {
        Promises::of_gpu(self.options)
    }

    fn serves(&self, layout: &KvLayout) -> bool {
        CudaBackend::<D>::check(&PoolGeometry::uniform(layout.clone(), 1)).is_ok()
    }
}

/// Sizes of a run: those of Llama 3.1 8B, or ones for the host.
struct Sizes {
    /// f32 of an addition, for the memory's own bandwidth.
    floats: usize,
    /// Rows, outputs and inputs of the product that shows how fast products can be.
    square: usize,
    /// (outputs, inputs) of products.
    weights: &'static [(usize, usize)],
    rows: &'static [usize],
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Decode steps, each of some (sequences, tokens behind each).
    decode: &'static [&'static [(usize, usize)]],
    /// Tokens of a prompt.
    prompt: &'static [usize],
    /// Logits of a row, and rows that are sampled together.
    vocab: usize,
    samples: &'static [usize],
    /// Runs of a handoff, and bytes of each: a block of a layer.
    runs: (usize, usize),
    repeats: u32,
    json: bool,
    /// Whether Hopper's kernels are measured where they can run.
    hopper: bool,
}

const FULL: Sizes = Sizes {
    floats: 256 << 20,
    square: 8192,
    // Those of attention's output, queries, keys and values together, gate and up together, down, and the logits: as layers have them.
    weights: &[(4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)],
    rows: &[1, 8, 64, 256, 2048, 8192],
    heads: 32,
    kv_heads: 8,
    head_dim: HEAD_DIMS[0],
    decode: &[
        &[(1, 1024)],
        &[(1, 8192)],
        &[(8, 8192)],
        &[(64, 2048)],
        &[(64, 8192)],
        &[(256, 2048)],
        &[(63, 1024), (1, 65_536)],
    ],
    prompt: &[512, 2048, 8192],
    vocab: 128_256,
    samples: &[1, 64],
    // 8,192 tokens in 32 layers.
    runs: (512 * 32, 64 << 10),
    repeats: 20,
    json: false,
    hopper: true,
};

const SMALL: Sizes = Sizes {
    floats: 1 << 14,
    square: 64,
    weights: &[(64, 128)],
    rows: &[1, 3],
    heads: 4,
    kv_heads: 2,
    head_dim: HEAD_DIMS[0],
    decode: &[&[(2, 300)], &[(2, 40), (1, 600)]],
    // The second is more than a turn of Hopper's kernel.
    prompt: &[40, 300],
    vocab: 512,
    samples: &[1, 3],
    runs: (700, 1 << 10),
    repeats: 1,
    json: false,
    hopper: true,
};

/// Head dimensions of the prefill measured; all else has the first.
const HEAD_DIMS: [usize; 2] = [128, 64];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let flag = |name: &str| args.iter().any(|arg| arg == name);
    let (host, json, hopper, fp8) = (flag("--host"), flag("--json"), !flag("--no-hopper"), flag("--fp8"));
    let named: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    let (full, small) = (Sizes { json, hopper, ..FULL }, Sizes { json, hopper, ..SMALL });
    let outcome = match (named.as_slice(), host) {
        (["conformance"], false) => Driver::open(0).map(|device| conform(device, hopper, fp8)),
        (["bench"], false) => Driver::open(0).and_then(|device| bench(Arc::new(device), &full)),
        (["bench"], true) => match HostDevice::for_tests() {
            Some(device) => bench(Arc::new(device), &small),
            None => Ok(()),
        },
        (["conformance"], true) => {
            HostDevice::for_tests().into_iter().for_each(|device| conform(device, hopper, fp8));
            Ok(())
        }
        (["handoff"], false) => Driver::open(0).and_then(|device| handoff::bench(Arc::new(device), &full, host)),
        (["handoff"], true) => match HostDevice::for_tests() {
            Some(device) => handoff::bench(Arc::new(device), &small, host),
            None => Ok(()),
        },
        ([handoff::TARGET], false) => Driver::open(0).and_then(|device| handoff::target(Arc::new(device), &full)),
        ([handoff::TARGET], true) => match HostDevice::for_tests() {
            Some(device) => handoff::target(Arc::new(device), &small),
            None => Ok(()),
        },
        ([sharing::OWNER], false) => Driver::open(0).and_then(|device| sharing::owner(Arc::new(device))),
        ([sharing::GUEST], false) => Driver::open(0).and_then(|device| sharing::guest(Arc::new(device))),
        (["sharing"], false) => Driver::open(0).and_then(|device| {
            let legacy = Driver::open(0)?.with_legacy_handles();
            sharing::check(Arc::new(device), Arc::new(legacy), host)
        }),
        ([role @ ("sharing" | sharing::OWNER | sharing::GUEST)], true) => {
            match (HostDevice::for_tests(), HostDevice::for_tests(), *role) {
                (Some(device), _, sharing::OWNER) => sharing::owner(Arc::new(device)),
                (Some(device), _, sharing::GUEST) => sharing::guest(Arc::new(device)),
                (Some(device), Some(legacy), _) => {
                    sharing::check(Arc::new(device), Arc::new(legacy.with_legacy_handles()), host)
                }
                _ => Ok(()),
            }
        }
        _ => Err(KernelError::NoDevice(
            "usage: gpu conformance|bench|handoff|sharing [--host] [--json] [--no-hopper] [--fp8]".to_owned(),
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Panics at the first failure.
fn conform<D: Device>(device: D, hopper: bool, fp8: bool) {
    let device = Arc::new(device);
    for invariant in [false, true] {
        let options = CudaOptions { invariant, hopper, fp8, ..CudaOptions::default() };
        conformance::run(&Gpu { device: Arc::clone(&device), options });
        println!("conforms (invariant: {invariant}, Hopper's kernel where it can: {hopper}, fp8: {fp8})");
    }
}

/// A table: the memory's bandwidth and the rate of a large product first, then everything as a figure of its own.
fn bench<D: Device>(device: Arc<D>, sizes: &Sizes) -> Result<(), KernelError> {
    let of = device.properties().clone();
    let (major, minor) = of.capability;
    let device_is = format!(
        "{} (sm_{major}{minor}, {} multiprocessors, {} GiB), {}",
        of.name,
        of.multiprocessors,
        of.memory >> 30,
        of.products
    );
    if sizes.json {
        println!(r#"{{"device": "{device_is}"}}"#)
    } else {
        println!("{device_is}")
    }
    add(&device, sizes)?;
    products::square(&device, sizes)?;
    products::all(&device, sizes, false)?;
    let mut apart = attention::decode(&device, sizes)?;
    apart.extend(attention::prefill(&device, sizes)?);
    sampling::all(&device, sizes)?;
    if of.fp8 != Fp8::None {
        products::all(&device, sizes, true)?;
    }
    // Once everything is measured.
    if apart.is_empty() {
        return Ok(());
    }
    Err(KernelError::Device { operation: "attention".to_owned(), why: apart.join("; ") })
}

/// Rounds whose median is taken.
const ROUNDS: usize = 5;

/// Seconds of one run: the median of rounds of `repeats` runs each, after one that does not count. `run` puts so many into a stream and
/// waits for them.
fn median(repeats: u32, mut run: impl FnMut(u32) -> Result<(), KernelError>) -> Result<f64, KernelError> {
    run(1)?;
    let mut rounds = [0.0; ROUNDS];
    for seconds in &mut rounds {
        let began = Instant::now();
        run(repeats)?;
        *seconds = began.elapsed().as_secs_f64() / f64::from(repeats);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

/// The same of what a backend does.
fn timed<D: Device>(
    backend: &mut CudaBackend<D>,
    repeats: u32,
    mut run: impl FnMut(&mut CudaBackend<D>),
) -> Result<f64, KernelError> {
    median(repeats, |times| {
        (0..times).for_each(|_| run(backend));
        backend.finish()
    })
}

/// What was measured, and how much of it a run does.
struct Figure {
    what: &'static str,
    case: String,
    seconds: f64,
    /// Bytes that must be read or written at least; 0 where operations are what counts.
    bytes: usize,
    operations: usize,
}

impl Figure {
    fn print(&self, sizes: &Sizes) {
        let Figure { what, case, seconds, bytes, operations } = self;
        if sizes.json {
            println!(
                r#"{{"what": "{what}", "case": "{case}", "seconds": {seconds:e}, "bytes": {bytes}, "operations": {operations}}}"#
            );
            return;
        }
        let rate = |count: usize| count as f64 / seconds / 1e9;
        let (giga, tera) = (rate(*bytes), rate(*operations) / 1e3);
        println!("{what:<8} {case:<34} {giga:9.1} GB/s {tera:9.2} TFLOP/s {:11.1} us", seconds * 1e6);
    }
}

fn geometry(sizes: &Sizes, layers: u32, blocks: u32) -> PoolGeometry {
    let layers = (0..layers).collect();
    let (kv_heads, head_dim) = (sizes.kv_heads as u32, sizes.head_dim as u32);
    let group = KvGroup { layers, planes: 2, kv_heads, head_dim, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::Bf16, block_size: BLOCK, groups: vec![group] };
    PoolGeometry::uniform(layout, blocks)
}

fn add<D: Device>(device: &Arc<D>, sizes: &Sizes) -> Result<(), KernelError> {
    let mut backend = CudaBackend::new(Arc::clone(device), geometry(sizes, 1, 1), CudaOptions::default())?;
    let (mut x, y) = (backend.buffer(sizes.floats)?, backend.buffer(sizes.floats)?);
    let seconds = timed(&mut backend, sizes.repeats, |b| b.add(&mut x, &y, sizes.floats))?;
    let case = format!("x += y, {} floats", sizes.floats);
    Figure { what: "memory", case, seconds, bytes: sizes.floats * 12, operations: 0 }.print(sizes);
    Ok(())
}
