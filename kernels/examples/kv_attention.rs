//! Speed of attention over each KV type: `cargo run --release -p baton-kernels --example kv_attention`.
//!
//! One layer at a time over a context of 2,048 tokens, decode (one row) and prefill (16 rows), on one thread. The pool holds
//! more layers than a cache does, so that K and V come from memory as they do in a model. Types alternate; medians and the
//! ratio to f16 are printed. Both cores must be idle.

use std::sync::Arc;
use std::time::Instant;

use baton_kernels::conformance::Random;
use baton_kernels::{AttentionShape, Backend, CpuBackend, CpuOptions, HostPool, KernelError, Ragged, Rope};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};

const CONTEXT: usize = 2048;
const LAYERS: u32 = 30;
const ROUNDS: usize = 7;

/// Query heads, KV heads, head dimension.
const SHAPES: [(&str, usize, usize, usize); 3] =
    [("smollm2", 9, 3, 64), ("qwen2.5-1.5b", 12, 2, 128), ("gemma-3-270m", 4, 1, 256)];

struct Bench {
    backend: CpuBackend,
    heads: usize,
    dim: usize,
    blocks: Vec<BlockId>,
    bytes: usize,
}

fn main() -> Result<(), KernelError> {
    for (name, heads, kv_heads, dim) in SHAPES {
        println!("{name}: {heads} query heads, {kv_heads} KV heads of {dim}, {CONTEXT} tokens");
        let mut benches =
            KvDtype::ALL.iter().map(|&dtype| Bench::new(dtype, heads, kv_heads, dim)).collect::<Result<Vec<_>, _>>()?;
        for rows in [1, 16] {
            let mut seconds = vec![Vec::new(); benches.len()];
            for _ in 0..ROUNDS {
                for (bench, seconds) in benches.iter_mut().zip(&mut seconds) {
                    seconds.push(bench.attend(rows)?);
                }
            }
            let medians: Vec<f64> = seconds.into_iter().map(median).collect();
            for ((dtype, bench), seconds) in KvDtype::ALL.iter().zip(&benches).zip(&medians) {
                println!(
                    "  {rows:2} rows  {:<5} {:8.1} us a layer  {:5.2} GB/s  {:.2} x f16",
                    format!("{dtype:?}").to_lowercase(),
                    seconds * 1e6,
                    bench.bytes as f64 / seconds / 1e9,
                    medians[1] / seconds,
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
    fn new(dtype: KvDtype, heads: usize, kv_heads: usize, dim: usize) -> Result<Bench, KernelError> {
        let (kv, layers) = (kv_heads as u32, (0..LAYERS).collect());
        let group = KvGroup { layers, planes: 2, kv_heads: kv, head_dim: dim as u32, window: None, sinks: 0 };
        let layout = KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size: 16, groups: vec![group] };
        let count = layout.blocks_for(CONTEXT);
        let bytes = layout.block_bytes(0) * count;
        let pool = HostPool::in_memory(PoolGeometry::uniform(layout, count as u32))?;
        let options = CpuOptions { threads: 1, ..CpuOptions::default() };
        let mut backend = CpuBackend::new(options, Arc::new(pool))?;
        let blocks: Vec<_> = (0..count as u32).map(BlockId).collect();
        let (mut random, rope) = (Random(1), vec![0.7; CONTEXT * dim / 2]);
        let rope = Rope { cos: backend.upload(&rope)?, sin: backend.upload(&rope)? };
        let mut batch = Ragged::with_capacity(CONTEXT, count);
        batch.push(0, CONTEXT, &blocks);
        let mut q = backend.buffer(CONTEXT * heads * dim)?;
        let (k, v) = (random.vector(CONTEXT * kv_heads * dim), random.vector(CONTEXT * kv_heads * dim));
        let (k, v) = (backend.upload(&k)?, backend.upload(&v)?);
        for layer in 0..LAYERS as usize {
            let shape = AttentionShape { group: 0, layer, heads, scale: 0.1 };
            backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
        }
        Ok(Bench { backend, heads, dim, blocks, bytes })
    }

    /// Seconds a layer for the last `rows` positions.
    fn attend(&mut self, rows: usize) -> Result<f64, KernelError> {
        let q = self.backend.upload(&Random(2).vector(rows * self.heads * self.dim))?;
        let mut out = self.backend.buffer(rows * self.heads * self.dim)?;
        let mut batch = Ragged::with_capacity(rows, self.blocks.len());
        batch.push(CONTEXT - rows, rows, &self.blocks);
        let started = Instant::now();
        for layer in 0..LAYERS as usize {
            let shape = AttentionShape { group: 0, layer, heads: self.heads, scale: 0.1 };
            self.backend.attention(shape, &batch, &q, &mut out);
        }
        Ok(started.elapsed().as_secs_f64() / LAYERS as f64)
    }
}
