//! What sharing blocks saves attention: `cargo run --release -p baton-kernels --example shared_prefix`.
//!
//! One decode step of 8 and of 32 sequences that have a prefix of 1,008 tokens in common and 64 tokens of their own, one layer
//! after the other: once with the prefix in blocks that all share, once with a copy for each. Their rows get the same bits. The pool
//! holds more layers than a cache does, so that K and V come from memory as they do in a model. The two alternate; medians and
//! their ratio are printed. Every core must be idle.

use std::sync::Arc;
use std::time::Instant;

use baton_kernels::conformance::Random;
use baton_kernels::{AttentionShape, Backend, CpuBackend, CpuOptions, HostPool, KernelError, Ragged, Rope};
use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};

const BLOCK: usize = 16;
/// Blocks of the prefix, and of each sequence behind it.
const PREFIX: usize = 63;
const OWN: usize = 4;
const CONTEXT: usize = (PREFIX + OWN) * BLOCK;
const LAYERS: u32 = 30;
const ROUNDS: usize = 7;

/// Query heads, KV heads, head dimension.
const SHAPES: [(&str, usize, usize, usize); 4] = [
    ("smollm2", 9, 3, 64),
    ("qwen2.5-1.5b", 12, 2, 128),
    ("gemma-3-270m", 4, 1, 256),
    ("one query head a KV head", 6, 6, 64),
];

struct Bench {
    backend: CpuBackend,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    sequences: usize,
}

fn main() -> Result<(), KernelError> {
    for (name, heads, kv_heads, dim) in SHAPES {
        println!("{name}: {heads} query heads, {kv_heads} KV heads of {dim}, {CONTEXT} tokens");
        for sequences in [8, 32] {
            let mut bench = Bench::new(heads, kv_heads, dim, sequences)?;
            let mut seconds = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (shares, seconds) in [false, true].into_iter().zip(&mut seconds) {
                    seconds.push(bench.attend(shares)?);
                }
            }
            let [apart, shared] = seconds.map(median);
            println!(
                "  {sequences:2} sequences  {:8.1} us a layer apart  {:8.1} shared  {:.2} x",
                apart * 1e6,
                shared * 1e6,
                apart / shared
            );
        }
    }
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

impl Bench {
    fn new(heads: usize, kv_heads: usize, dim: usize, sequences: usize) -> Result<Bench, KernelError> {
        let (kv, layers) = (kv_heads as u32, (0..LAYERS).collect());
        let group = KvGroup { layers, planes: 2, kv_heads: kv, head_dim: dim as u32, window: None, sinks: 0 };
        let (dtype, block_size) = (KvDtype::F16, BLOCK as u32);
        let layout = KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size, groups: vec![group] };
        let pool = HostPool::in_memory(PoolGeometry::uniform(layout, (sequences * (PREFIX + OWN)) as u32))?;
        let backend = CpuBackend::new(CpuOptions::default(), Arc::new(pool))?;
        let mut bench = Bench { backend, heads, kv_heads, dim, sequences };
        bench.store()?;
        Ok(bench)
    }

    /// Blocks of a sequence: the first one's for the prefix, or its own.
    fn table(&self, sequence: usize, shares: bool) -> Vec<BlockId> {
        let own = sequence * (PREFIX + OWN);
        let prefix = if shares { 0 } else { own };
        (prefix..prefix + PREFIX).chain(own + PREFIX..own + PREFIX + OWN).map(|block| BlockId(block as u32)).collect()
    }

    fn store(&mut self) -> Result<(), KernelError> {
        let (dim, kv_heads) = (self.dim, self.kv_heads);
        let (mut random, rope) = (Random(1), vec![0.7; CONTEXT * dim / 2]);
        let rope = Rope { cos: self.backend.upload(&rope)?, sin: self.backend.upload(&rope)? };
        let (k, v) = (random.vector(CONTEXT * kv_heads * dim), random.vector(CONTEXT * kv_heads * dim));
        let (k, v) = (self.backend.upload(&k)?, self.backend.upload(&v)?);
        let mut q = self.backend.buffer(CONTEXT * self.heads * dim)?;
        for sequence in 0..self.sequences {
            let mut batch = Ragged::with_capacity(CONTEXT, PREFIX + OWN);
            batch.push(0, CONTEXT, &self.table(sequence, false));
            for layer in 0..LAYERS as usize {
                let shape = AttentionShape { group: 0, layer, heads: self.heads, scale: 0.1 };
                self.backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
            }
        }
        Ok(())
    }

    /// Seconds a layer for the last position of every sequence.
    fn attend(&mut self, shares: bool) -> Result<f64, KernelError> {
        let elements = self.sequences * self.heads * self.dim;
        let q = self.backend.upload(&Random(2).vector(elements))?;
        let mut out = self.backend.buffer(elements)?;
        let mut batch = Ragged::with_capacity(self.sequences, self.sequences * (PREFIX + OWN));
        for sequence in 0..self.sequences {
            batch.push(CONTEXT - 1, 1, &self.table(sequence, shares));
        }
        let started = Instant::now();
        for layer in 0..LAYERS as usize {
            let shape = AttentionShape { group: 0, layer, heads: self.heads, scale: 0.1 };
            self.backend.attention(shape, &batch, &q, &mut out);
        }
        Ok(started.elapsed().as_secs_f64() / f64::from(LAYERS))
    }
}
