//! How fast attention is, and whether the two kernels that can take a batch agree about it at the size that was measured.

use std::sync::Arc;

use baton_kernels::conformance::Random;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device};
use baton_kernels::{AttentionShape, Backend, KernelError, Ragged, Rope};
use baton_types::BlockId;

use crate::{BLOCK, Figure, HEAD_DIMS, Sizes, geometry, timed};

/// Tokens that are stored together.
const STORED: usize = 4096;

/// How far two kernels may be apart, as a share of the size of a row's head (its root mean square): over a pool of bf16 each rounds a
/// row's weights to within 2^-9 of themselves, against another maximum. A mean over many positions is small, so that a bound
/// beside 1 would see nothing.
const APART: f64 = 1.0 / 32.0;

/// A layer's pool, full, and rows that attend.
struct Layer<D: Device> {
    backend: CudaBackend<D>,
    shape: AttentionShape,
    q: <CudaBackend<D> as Backend>::Buffer,
    out: <CudaBackend<D> as Backend>::Buffer,
    floats: usize,
}

impl<D: Device> Layer<D> {
    /// The same values each time. Sequences have blocks of their own, each one's behind those of the one before.
    fn new(
        device: &Arc<D>,
        sizes: &Sizes,
        options: CudaOptions,
        batch: &Ragged,
        blocks: u32,
    ) -> Result<Self, KernelError> {
        let mut backend = CudaBackend::new(Arc::clone(device), geometry(sizes, 1, blocks), options)?;
        let shape = AttentionShape { group: 0, layer: 0, heads: sizes.heads, scale: 0.1 };
        let (width, mut random) = (sizes.heads * sizes.head_dim, Random(3));
        // All slots, as one long sequence that is not rotated.
        let all: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        let slots = (blocks * BLOCK) as usize;
        let most = STORED.min(slots);
        let table = |backend: &CudaBackend<D>, value: f32| backend.upload(&vec![value; slots * sizes.head_dim / 2]);
        let rope = Rope { cos: table(&backend, 1.0)?, sin: table(&backend, 0.0)? };
        let mut q = backend.upload(&random.vector(most * width))?;
        let [k, v] = [0; 2].map(|_| random.vector(most * sizes.kv_heads * sizes.head_dim));
        let (k, v) = (backend.upload(&k)?, backend.upload(&v)?);
        for first in (0..slots).step_by(most) {
            let mut part = Ragged::default();
            part.push(first, most.min(slots - first), &all);
            backend.rope_and_store_kv(shape, &part, &rope, &mut q, &k, &v);
        }
        let floats = batch.rows() * width;
        let q = backend.upload(&random.vector(floats))?;
        let out = backend.buffer(floats)?;
        backend.finish()?;
        Ok(Layer { backend, shape, q, out, floats })
    }

    /// Seconds of a run.
    fn time(&mut self, sizes: &Sizes, batch: &Ragged) -> Result<f64, KernelError> {
        let Layer { backend, shape, q, out, .. } = self;
        timed(backend, sizes.repeats, |b| b.attention(*shape, batch, q, out))
    }

    /// What the last run gave.
    fn output(&mut self) -> Result<Vec<f32>, KernelError> {
        let mut out = vec![0.0; self.floats];
        self.backend.read(&self.out, 0, &mut out);
        self.backend.finish()?;
        Ok(out)
    }

    /// What a run gives.
    fn run(mut self, batch: &Ragged) -> Result<Vec<f32>, KernelError> {
        self.backend.attention(self.shape, batch, &self.q, &mut self.out);
        self.output()
    }
}

/// The largest difference of an element, as a share of the size of its head; not a number where one has such an element.
fn distance(a: &[f32], b: &[f32], head_dim: usize) -> f64 {
    let of_head = |(a, b): (&[f32], &[f32])| {
        let size = (b.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / head_dim as f64).sqrt();
        let far = a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b)).fold(0f64, largest);
        far / size
    };
    a.chunks_exact(head_dim).zip(b.chunks_exact(head_dim)).map(of_head).fold(0f64, largest)
}

/// Of a maximum and another number, either sign; what is none stays none.
fn largest(max: f64, x: f64) -> f64 {
    if max.is_nan() || x.abs() <= max { max } else { x.abs() }
}

/// Prints how far two outputs of a case are apart, and says so if that is too far.
fn compare(sizes: &Sizes, case: &str, a: &[f32], b: &[f32]) -> Option<String> {
    let far = distance(a, b, sizes.head_dim);
    let agree = far <= APART;
    if sizes.json {
        // JSON has no number for what is none.
        let number = if far.is_finite() { format!("{far:e}") } else { "null".to_owned() };
        println!(r#"{{"what": "agreement", "case": "{case}", "largest": {number}, "bound": {APART:e}}}"#);
    } else {
        println!("agreement {case}: {far:.1e} of a head's size, at most {APART:.1e}");
    }
    (!agree).then(|| format!("{case}: kernels are {far:.1e} of a head's size apart, more than {APART:.1e}"))
}

/// Decode steps, beside the kernel of chunks; where they do not agree.
pub fn decode<D: Device>(device: &Arc<D>, sizes: &Sizes) -> Result<Vec<String>, KernelError> {
    let mut apart = Vec::new();
    for &step in sizes.decode {
        let (mut batch, mut blocks, mut seen) = (Ragged::default(), 0, 0);
        for behind in step.iter().flat_map(|&(sequences, behind)| std::iter::repeat_n(behind, sequences)) {
            let end = blocks + (behind + 1).div_ceil(BLOCK as usize) as u32;
            batch.push(behind, 1, &(blocks..end).map(BlockId).collect::<Vec<_>>());
            (blocks, seen) = (end, seen + behind + 1);
        }
        let options = CudaOptions { hopper: sizes.hopper, ..CudaOptions::default() };
        let mut layer = Layer::new(device, sizes, options, &batch, blocks)?;
        let seconds = layer.time(sizes, &batch)?;
        let bytes = seen * sizes.kv_heads * sizes.head_dim * 2 * 2;
        let lengths: Vec<_> = step.iter().map(|(sequences, behind)| format!("{sequences} x {behind}")).collect();
        let case = format!("{} tokens", lengths.join(" + "));
        let out = layer.output()?;
        drop(layer);
        let chunks = CudaOptions { invariant: true, ..options };
        let beside = Layer::new(device, sizes, chunks, &batch, blocks)?.run(&batch)?;
        apart.extend(compare(sizes, &format!("decode of {case}, as chunks"), &out, &beside));
        Figure { what: "decode", case, seconds, bytes, operations: 0 }.print(sizes);
    }
    Ok(apart)
}

/// Prompts, by Hopper's kernel and by mma.sync where there are both; where they do not agree.
pub fn prefill<D: Device>(device: &Arc<D>, sizes: &Sizes) -> Result<Vec<String>, KernelError> {
    let mut apart = Vec::new();
    let cases = HEAD_DIMS.iter().flat_map(|&dim| sizes.prompt.iter().map(move |&tokens| (dim, tokens)));
    for (head_dim, tokens) in cases {
        let sizes = &Sizes { head_dim, ..*sizes };
        let blocks = tokens.div_ceil(BLOCK as usize) as u32;
        let mut batch = Ragged::default();
        batch.push(0, tokens, &(0..blocks).map(BlockId).collect::<Vec<_>>());
        // Two products for each pair of a query and a key it sees.
        let operations = 4 * sizes.heads * sizes.head_dim * tokens * (tokens + 1) / 2;
        let hopper = sizes.hopper && device.properties().capability == (9, 0);
        let dim = if head_dim == HEAD_DIMS[0] { String::new() } else { format!(", head_dim {head_dim}") };
        let mut beside: Option<Vec<f32>> = None;
        for (hopper, how) in [(true, ""), (false, ", mma.sync")].into_iter().skip(usize::from(!hopper)) {
            let options = CudaOptions { hopper, ..CudaOptions::default() };
            let mut layer = Layer::new(device, sizes, options, &batch, blocks)?;
            let seconds = layer.time(sizes, &batch)?;
            let case = format!("{tokens} tokens{dim}{how}");
            let out = layer.output()?;
            match &beside {
                Some(first) => apart.extend(compare(sizes, &format!("prefill of {tokens} tokens{dim}"), first, &out)),
                None => beside = Some(out),
            }
            Figure { what: "prefill", case, seconds, bytes: 0, operations }.print(sizes);
        }
    }
    Ok(apart)
}
