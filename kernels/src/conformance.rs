//! The suite every [`Backend`] passes: each operation against a plain f64 reference, and the bitwise promises of I1.
//!
//! [`run`] panics with the operation and sizes at the first failure.

use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry, WeightDtype};
use half::f16;

use crate::backend::{AttentionShape, Backend, Norm, Ragged, Rope};

mod attention;
pub(crate) mod kv;
mod long;
mod products;
mod shared;

pub use baton_types::testing::Random;
pub use long::Long;

/// Makes a backend over a fresh pool of the given shape.
pub trait Factory {
    /// The backend.
    type Backend: Backend;
    /// Makes one; every slot of its pool should hold garbage that is not a number.
    fn make(&self, geometry: &PoolGeometry) -> Self::Backend;
    /// Bytes of one layer's part of a block of its pool.
    fn block(&self, backend: &Self::Backend, group: usize, layer_in_group: usize, block: BlockId) -> Vec<u8>;
    /// How exact the backend is.
    fn promises(&self) -> Promises {
        Promises::default()
    }
    /// Whether the backend takes pools of this layout.
    fn serves(&self, _layout: &KvLayout) -> bool {
        true
    }
    /// How long a sequence attention is checked with.
    fn long(&self) -> Long {
        Long::FULL
    }
}

/// How exact a backend is; the default is what f32 throughout allows.
#[derive(Clone, Copy, Debug)]
pub struct Promises {
    /// Relative rounding of weights, and of the rows they are multiplied with.
    pub operands: f64,
    /// The same of weights that only products read.
    pub linear: f64,
    /// How far attention may be from the reference, relative to 1 plus its size.
    pub attention: f64,
    /// How far the attention of a row may differ from that of the same row in another chunk, likewise; None: not by a bit (I1).
    pub chunks: Option<f64>,
}

impl Default for Promises {
    fn default() -> Self {
        Promises { operands: 0.0, linear: 0.0, attention: 1e-5, chunks: None }
    }
}

#[cfg(feature = "cuda")]
impl Promises {
    /// Those of the GPU backend: weights and activations of products are bf16, or E4M3 where they may be; operands of attention have 16 bits.
    pub fn of_gpu(options: crate::cuda::CudaOptions) -> Promises {
        let chunks = if options.invariant { None } else { Some(0.02) };
        let operands = 2f64.powi(-8);
        Promises { operands, linear: if options.fp8 { 2f64.powi(-5) } else { operands }, attention: 0.03, chunks }
    }
}

/// Every weight type.
pub const DTYPES: [WeightDtype; 11] = [
    WeightDtype::F32,
    WeightDtype::F16,
    WeightDtype::Bf16,
    WeightDtype::Q4_0,
    WeightDtype::Q4_1,
    WeightDtype::Q5_0,
    WeightDtype::Q5_1,
    WeightDtype::Q8_0,
    WeightDtype::Q4K,
    WeightDtype::Q5K,
    WeightDtype::Q6K,
];

/// Random stored rows of any type, with scales of a sensible size.
pub fn random_weight(dtype: WeightDtype, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let size = rows * cols / dtype.block_elements() * dtype.block_bytes();
    let mut data: Vec<u8> = (0..size).map(|_| random.bits() as u8).collect();
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        let scale = random.unit() * 0.02 + 0.03;
        let mut half = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        match dtype {
            WeightDtype::F32 => block.copy_from_slice(&random.unit().to_le_bytes()),
            WeightDtype::F16 => half(0, random.unit()),
            WeightDtype::Bf16 => block.copy_from_slice(&half::bf16::from_f32(random.unit()).to_le_bytes()),
            WeightDtype::Q4_0 | WeightDtype::Q5_0 | WeightDtype::Q8_0 => half(0, scale),
            WeightDtype::Q4_1 | WeightDtype::Q5_1 => {
                half(0, scale);
                half(2, -scale * 7.0);
            }
            WeightDtype::Q4K | WeightDtype::Q5K => {
                half(0, scale / 32.0);
                half(2, scale / 8.0);
            }
            WeightDtype::Q6K => half(208, scale / 64.0),
        }
    }
    data
}

fn read<B: Backend>(backend: &mut B, buffer: &B::Buffer, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    backend.read(buffer, 0, &mut out);
    out
}

fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!((g as f64 - w).abs() <= tolerance * (1.0 + w.abs()), "{what}[{i}]: {g}, reference {w}");
    }
}

fn geometry(dtype: KvDtype, kv_heads: u32, head_dim: u32, window: Option<u32>, block_size: u32) -> PoolGeometry {
    let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads, head_dim, window, sinks: 0 };
    let layout = KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size, groups: vec![group] };
    PoolGeometry::uniform(layout, 24)
}

/// Runs everything.
pub fn run<F: Factory>(factory: &F) {
    products::run(factory);
    elementwise(factory);
    attention::run(factory);
    long::run(factory);
    shared::run(factory);
    copy(factory);
}

/// A copy has its source's bits in both layers, whatever becomes of the source afterwards.
fn copy<F: Factory>(factory: &F) {
    let geometry = geometry(KvDtype::F16, 2, 8, None, 16);
    let mut backend = factory.make(&geometry);
    let mut random = Random(3);
    // One position of a block of both layers.
    let mut store = |backend: &mut F::Backend, block: u32| {
        let mut batch = Ragged::default();
        batch.push(0, 1, &[BlockId(block)]);
        let rope = Rope { cos: backend.upload(&[1.0; 4]).expect("cos"), sin: backend.upload(&[0.0; 4]).expect("sin") };
        let mut row = |len| backend.upload(&random.vector(len)).expect("row");
        let (mut q, k, v) = (row(16), row(16), row(16));
        for layer in 0..2 {
            let shape = AttentionShape { group: 0, layer, heads: 2, scale: 1.0 };
            backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
        }
    };
    let bytes = |backend: &F::Backend, block| [0, 1].map(|layer| factory.block(backend, 0, layer, BlockId(block)));
    store(&mut backend, 0);
    store(&mut backend, 1);
    let before = [0, 1].map(|block| bytes(&backend, block));
    backend.copy_block(0, BlockId(0), BlockId(7));
    assert_eq!([0, 1].map(|block| bytes(&backend, block)), before, "a copy leaves its source and others alone");
    store(&mut backend, 0);
    assert_ne!(bytes(&backend, 0), before[0]);
    assert_eq!(bytes(&backend, 7), before[0]);
    backend.copy_block(0, BlockId(1), BlockId(7));
    assert_eq!(bytes(&backend, 7), before[1]);
}

fn elementwise<F: Factory>(factory: &F) {
    let mut backend = factory.make(&geometry(KvDtype::F16, 1, 8, None, 16));
    let mut random = Random(2);
    for (rows, width) in [(1, 8), (3, 64), (17, 24)] {
        let x: Vec<f32> = random.vector(rows * width).iter().map(|v| v * 8.0).collect();
        let y = random.vector(rows * width);
        let weight = random.vector(width);
        let norm = Norm { weight: backend.upload(&weight).expect("weight"), eps: 1e-5 };
        let mut xb = backend.upload(&x).expect("x");
        let yb = backend.upload(&y).expect("y");
        let mut out = backend.upload(&x).expect("out");
        backend.rms_norm(&norm, &mut out, rows);
        let want: Vec<f64> = (0..rows * width)
            .map(|i| {
                let row = &x[i / width * width..][..width];
                let mean = row.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / width as f64;
                x[i] as f64 / (mean + 1e-5).sqrt() * weight[i % width] as f64
            })
            .collect();
        close("rms_norm", &read(&mut backend, &out, rows * width), &want, 1e-6);
        backend.add(&mut xb, &yb, rows * width);
        let want: Vec<f64> = x.iter().zip(&y).map(|(&a, &b)| (a + b) as f64).collect();
        close("add", &read(&mut backend, &xb, rows * width), &want, 0.0);
        let mut gathered = backend.buffer(2 * width).expect("gathered");
        backend.gather_rows(&xb, width, &[rows as u32 - 1, 0], &mut gathered);
        let (all, got) = (read(&mut backend, &xb, rows * width), read(&mut backend, &gathered, 2 * width));
        assert_eq!(got[..width], all[(rows - 1) * width..]);
        assert_eq!(got[width..], all[..width]);
    }
}
