//! Speed of attention over each KV type: `cargo run --release -p baton-kernels --example kv_attention`. Options: `--types f16,q8`,
//! `--rows 1,16`, `--isa`, `--threads`, `--layers`.
//!
//! One layer at a time over a context (`--context`, 2,048 tokens), decode (one row) and prefill (16 rows), on one thread unless told. The
//! pool holds more layers than a cache does, so that K and V come from memory as they do in a model; `--layers 1` leaves them in a cache.
//! Types alternate; printed are medians, the share of the ceiling of fused multiply-adds, measured in the same run, and the ratio to f16,
//! or to the first type where that is left out. Every core must be idle.

use std::sync::Arc;
use std::time::Instant;

use baton_kernels::conformance::Random;
use baton_kernels::{
    AttentionShape, Backend, Ceilings, CpuBackend, CpuOptions, HostPool, Isa, KernelError, Ragged, Rope,
};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};

const LAYERS: u32 = 30;
const ROUNDS: usize = 7;

/// Query heads, KV heads, head dimension.
const SHAPES: [(&str, usize, usize, usize); 3] =
    [("smollm2", 9, 3, 64), ("qwen2.5-1.5b", 12, 2, 128), ("gemma-3-270m", 4, 1, 256)];

struct Bench {
    backend: CpuBackend,
    /// Layers that are read, of those of the pool.
    layers: usize,
    heads: usize,
    dim: usize,
    blocks: Vec<BlockId>,
    context: usize,
    bytes: usize,
}

/// The value behind `--name`.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg.strip_prefix("--") != Some(name)).nth(1)
}

fn name(dtype: KvDtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

fn main() -> Result<(), KernelError> {
    let isa = option("isa").unwrap_or_else(|| Isa::detect().name().into());
    let Some(isa) = Isa::available().into_iter().find(|found| found.name() == isa) else {
        println!("this CPU has no {isa}");
        return Ok(());
    };
    let threads = option("threads").and_then(|text| text.parse().ok()).unwrap_or(1);
    let options = CpuOptions { threads, isa, pinned: false };
    let wanted = option("types");
    let wanted = |dtype: &KvDtype| wanted.as_ref().is_none_or(|names| names.split(',').any(|n| n == name(*dtype)));
    let dtypes: Vec<KvDtype> = KvDtype::ALL.into_iter().filter(wanted).collect();
    let context = option("context").and_then(|text| text.parse().ok()).unwrap_or(2048);
    let base = dtypes.iter().position(|&dtype| dtype == KvDtype::F16).unwrap_or(0);
    let rows = option("rows").unwrap_or_else(|| "1,16".into());
    let ceiling = Ceilings::measure(options)?.f32;
    for (shape, heads, kv_heads, dim) in SHAPES {
        println!("{shape}: {heads} query heads, {kv_heads} KV heads of {dim}, {context} tokens");
        let made = dtypes.iter().map(|&dtype| Bench::new(options, dtype, (heads, kv_heads, dim), context));
        let mut benches = made.collect::<Result<Vec<_>, _>>()?;
        for rows in rows.split(',').filter_map(|text| text.parse::<usize>().ok()) {
            let mut seconds = vec![Vec::new(); benches.len()];
            for _ in 0..ROUNDS {
                for (bench, seconds) in benches.iter_mut().zip(&mut seconds) {
                    seconds.push(bench.attend(rows)?);
                }
            }
            let medians: Vec<f64> = seconds.into_iter().map(median).collect();
            for ((dtype, bench), seconds) in dtypes.iter().zip(&benches).zip(&medians) {
                let work = (4 * dim * heads * rows * context) as f64 / seconds;
                println!(
                    "  {rows:2} rows  {:<5} {:8.1} us a layer  {:5.2} GB/s  {:2.0}% of the ceiling  {:.2} x {}",
                    name(*dtype),
                    seconds * 1e6,
                    bench.bytes as f64 / seconds / 1e9,
                    work / ceiling * 100.0,
                    medians[base] / seconds,
                    name(dtypes[base]),
                );
            }
        }
    }
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

impl Bench {
    fn new(
        options: CpuOptions,
        dtype: KvDtype,
        (heads, kv_heads, dim): (usize, usize, usize),
        context: usize,
    ) -> Result<Bench, KernelError> {
        let (kv, layers) = (kv_heads as u32, (0..LAYERS).collect());
        let group = KvGroup { layers, planes: 2, kv_heads: kv, head_dim: dim as u32, window: None, sinks: 0 };
        let layout = KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size: 16, groups: vec![group] };
        let count = layout.blocks_for(context);
        let bytes = layout.block_bytes(0) * count;
        let pool = HostPool::in_memory(PoolGeometry::uniform(layout, count as u32))?;
        let mut backend = CpuBackend::new(options, Arc::new(pool))?;
        let blocks: Vec<_> = (0..count as u32).map(BlockId).collect();
        let (mut random, rope) = (Random(1), vec![0.7; context * dim / 2]);
        let rope = Rope { cos: backend.upload(&rope)?, sin: backend.upload(&rope)? };
        let mut batch = Ragged::with_capacity(context, count);
        batch.push(0, context, &blocks);
        let mut q = backend.buffer(context * heads * dim)?;
        let (k, v) = (random.vector(context * kv_heads * dim), random.vector(context * kv_heads * dim));
        let (k, v) = (backend.upload(&k)?, backend.upload(&v)?);
        for layer in 0..LAYERS as usize {
            let shape = AttentionShape { group: 0, layer, heads, scale: 0.1 };
            backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
        }
        let layers =
            option("layers").and_then(|text| text.parse().ok()).unwrap_or(LAYERS as usize).clamp(1, LAYERS as usize);
        Ok(Bench { backend, layers, heads, dim, blocks, context, bytes })
    }

    /// Seconds a layer for the last `rows` positions.
    fn attend(&mut self, rows: usize) -> Result<f64, KernelError> {
        let q = self.backend.upload(&Random(2).vector(rows * self.heads * self.dim))?;
        let mut out = self.backend.buffer(rows * self.heads * self.dim)?;
        let mut batch = Ragged::with_capacity(rows, self.blocks.len());
        batch.push(self.context - rows, rows, &self.blocks);
        let started = Instant::now();
        for layer in (0..self.layers).cycle().take(LAYERS as usize) {
            let shape = AttentionShape { group: 0, layer, heads: self.heads, scale: 0.1 };
            self.backend.attention(shape, &batch, &q, &mut out);
        }
        Ok(started.elapsed().as_secs_f64() / LAYERS as f64)
    }
}
