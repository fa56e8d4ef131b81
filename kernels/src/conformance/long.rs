//! Attention of one long sequence against an f64 reference: a chunk at its end, and single rows along it. Kernels that walk a context in
//! portions (the turns of a ring, the splits of a decode row) have several of them here.
//!
//! Over so many positions weights that are all alike would leave nothing to see: a term too many changes a mean of a thousand by less
//! than 16-bit operands may. So few positions have most of a row's weight, and of each five rows one would look at what is just behind it
//! and just before its window, and one does look at itself and at the first that its window has.

use std::ops::Range;

use baton_types::{BlockId, KvDtype, PoolGeometry};

use super::attention::{rope, rotated};
use super::kv::read_row;
use super::{Factory, Random, close, geometry, read};
use crate::backend::{AttentionShape, Backend, Ragged, Rope};

/// How long.
#[derive(Clone, Copy, Debug)]
pub struct Long {
    /// Positions before the chunk.
    pub behind: usize,
    /// Rows of the chunk.
    pub chunk: usize,
    /// Tokens that a window shows, where there is one.
    pub window: u32,
}

impl Long {
    /// Nine turns of 128 positions and five splits of 256.
    pub const FULL: Long = Long { behind: 900, chunk: 150, window: 300 };
}

const BLOCK: usize = 16;
/// Rows of a prompt that are stored together.
const STORED: usize = 256;
/// How much more a row has of the query that it is bait for than of anything else.
const BAIT: f64 = 4.0;
/// Of the chunk's rows one in so many is compared: all places of a tile of 16 rows and all kinds of rows have their turn.
const SAMPLE: usize = 3;

struct Case {
    long: Long,
    dtype: KvDtype,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: Option<u32>,
}

/// The types that have kernels of their own for long contexts, in their two sizes of a head.
pub(super) fn run<F: Factory>(factory: &F) {
    let long = factory.long();
    for dtype in [KvDtype::F16, KvDtype::Bf16] {
        for (heads, kv_heads, dim) in [(6, 2, 64), (4, 1, 128)] {
            for window in [None, Some(long.window)] {
                let case = Case { long, dtype, heads, kv_heads, dim, window };
                if factory.serves(&case.geometry().layout) {
                    case.check(factory);
                }
            }
        }
    }
}

/// Rows `[token, head, dim]` of q, k and v.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Case {
    fn name(&self) -> String {
        let Case { long, dtype, heads, kv_heads, dim, window } = self;
        let tokens = long.behind + long.chunk;
        format!("{dtype:?}, {heads}/{kv_heads} heads of {dim}, window {window:?}, {tokens} tokens")
    }

    fn tokens(&self) -> usize {
        self.long.behind + self.long.chunk
    }

    fn scale(&self) -> f64 {
        1.0 / (self.dim as f64).sqrt()
    }

    fn geometry(&self) -> PoolGeometry {
        let mut geometry = geometry(self.dtype, self.kv_heads as u32, self.dim as u32, self.window, BLOCK as u32);
        geometry.blocks = vec![self.tokens().div_ceil(BLOCK) as u32 + 3];
        geometry
    }

    /// The row whose bait the K of a position is: one that must not see it, or one that must. Windows are a multiple of five.
    fn bait(&self, position: usize) -> Option<usize> {
        let row = match (position % 5, self.window) {
            (1, _) => position - 1,
            (3, _) => position,
            (0, Some(window)) => position + window as usize,
            (4, Some(window)) => position + window as usize - 1,
            _ => return None,
        };
        (row < self.tokens()).then_some(row)
    }

    fn inputs(&self) -> Inputs {
        let (mut random, dim, tokens) = (Random(11 + self.dim as u64), self.dim, self.tokens());
        let mut rows = |heads: usize| random.vector(tokens * heads * dim);
        let (q, mut k, mut v) = (rows(self.heads), rows(self.kv_heads), rows(self.kv_heads));
        v.iter_mut().for_each(|x| *x *= 2.0);
        let group = self.heads / self.kv_heads;
        for (position, row) in (0..tokens).filter_map(|position| Some((position, self.bait(position)?))) {
            for head in 0..self.kv_heads {
                for h in head * group..(head + 1) * group {
                    // As it is once both are rotated.
                    let query = rotated(&elements(&q, row * self.heads + h, dim), row as f64 - position as f64);
                    let to = &mut k[(position * self.kv_heads + head) * dim..][..dim];
                    to.iter_mut().zip(query).for_each(|(k, q)| *k += (BAIT * q) as f32);
                }
            }
        }
        Inputs { q, k, v }
    }

    fn check<F: Factory>(&self, factory: &F) {
        let (inputs, geometry, tokens) = (self.inputs(), self.geometry(), self.tokens());
        let mut backend = factory.make(&geometry);
        let rope = rope(&backend, tokens, self.dim);
        // Blocks in no order that a kernel could follow without the table.
        let (mut random, mut free) = (Random(12), (0..geometry.blocks[0]).map(BlockId).collect::<Vec<_>>());
        let mut next = || free.swap_remove((random.bits() % free.len() as u64) as usize);
        let table: Vec<BlockId> = (0..tokens.div_ceil(BLOCK)).map(|_| next()).collect();
        for first in (0..self.long.behind).step_by(STORED) {
            let rows = first..(first + STORED).min(self.long.behind);
            self.step(&mut backend, &rope, &inputs, &table, &[rows], false);
        }
        let last = self.long.behind..tokens;
        let chunk = self.step(&mut backend, &rope, &inputs, &table, std::slice::from_ref(&last), true);
        let stored = [0, 1].map(|plane| self.stored(factory, &backend, &geometry, &table, plane));
        let sampled = last.clone().filter(|row| row % SAMPLE == 0 || row + SAMPLE >= tokens);
        self.compare("a chunk", &inputs, &stored, factory.promises().attention, sampled, |row| {
            &chunk[(row - self.long.behind) * self.heads * self.dim..]
        });
        // At both sides of where a split may begin, and the last five: one of each kind.
        let turns = (256..self.long.behind).step_by(256).flat_map(|position| [position - 1, position]);
        let single: Vec<usize> = turns.chain(tokens - 5..tokens).collect();
        let spans: Vec<Range<usize>> = single.iter().map(|&row| row..row + 1).collect();
        let rows = self.step(&mut backend, &rope, &inputs, &table, &spans, true);
        let place = |row: usize| single.iter().position(|&at| at == row).expect("a row of the batch");
        let of = |row: usize| &rows[place(row) * self.heads * self.dim..];
        self.compare("single rows", &inputs, &stored, factory.promises().attention, single.iter().copied(), of);
        for row in tokens - 5..tokens {
            let width = self.heads * self.dim;
            let (alone, among) = (&of(row)[..width], &chunk[(row - self.long.behind) * width..][..width]);
            let name = format!("I1: row {row} alone and in a chunk ({})", self.name());
            match factory.promises().chunks {
                None => assert!(alone == among, "{name}"),
                Some(far) => close(&name, alone, &among.iter().map(|&x| x as f64).collect::<Vec<_>>(), far),
            }
        }
    }

    /// Stores rows of these positions, and may let them attend; their output.
    fn step<B: Backend>(
        &self,
        backend: &mut B,
        rope: &Rope<B::Buffer>,
        inputs: &Inputs,
        table: &[BlockId],
        spans: &[Range<usize>],
        attend: bool,
    ) -> Vec<f32> {
        let shape = AttentionShape { group: 0, layer: 1, heads: self.heads, scale: self.scale() as f32 };
        let group = &self.geometry().layout.groups[0];
        let mut batch = Ragged::default();
        for span in spans {
            // What the window has passed is gone.
            let hidden = group.live(span.start as u32, BLOCK as u32).missing(0, table.len() as u32) as usize;
            batch.push_around(span.start, span.len(), (&[], &table[hidden..]), hidden * BLOCK);
        }
        let of = |x: &[f32], heads: usize| -> Vec<f32> {
            let width = heads * self.dim;
            spans.iter().flat_map(|span| &x[span.start * width..span.end * width]).copied().collect()
        };
        let mut q = backend.upload(&of(&inputs.q, self.heads)).expect("q");
        let k = backend.upload(&of(&inputs.k, self.kv_heads)).expect("k");
        let v = backend.upload(&of(&inputs.v, self.kv_heads)).expect("v");
        backend.rope_and_store_kv(shape, &batch, rope, &mut q, &k, &v);
        if !attend {
            return Vec::new();
        }
        let mut out = backend.buffer(batch.rows() * self.heads * self.dim).expect("out");
        backend.attention(shape, &batch, &q, &mut out);
        read(backend, &out, batch.rows() * self.heads * self.dim)
    }

    /// K or V of the whole sequence as the pool has it, `[head, token, dim]`.
    fn stored<F: Factory>(
        &self,
        factory: &F,
        backend: &F::Backend,
        geometry: &PoolGeometry,
        table: &[BlockId],
        plane: usize,
    ) -> Vec<f32> {
        let blocks: Vec<Vec<u8>> = table.iter().map(|&block| factory.block(backend, 0, 1, block)).collect();
        let places = (0..self.kv_heads).flat_map(|head| (0..self.tokens()).map(move |token| (head, token)));
        let row = |(head, token): (usize, usize)| {
            read_row(&geometry.layout, 0, &blocks[token / BLOCK], plane, head, token % BLOCK)
        };
        places.flat_map(row).collect()
    }

    /// Rows, each where `got` has it, against attention over what is stored.
    fn compare<'a>(
        &self,
        what: &str,
        inputs: &Inputs,
        [k, v]: &[Vec<f32>; 2],
        far: f64,
        rows: impl Iterator<Item = usize>,
        got: impl Fn(usize) -> &'a [f32],
    ) {
        let (dim, tokens) = (self.dim, self.tokens());
        for (row, head) in rows.flat_map(|row| (0..self.heads).map(move |head| (row, head))) {
            let query = rotated(&elements(&inputs.q, row * self.heads + head, dim), row as f64);
            let from = self.window.map_or(0, |window| (row + 1).saturating_sub(window as usize));
            let first = (head / (self.heads / self.kv_heads) * tokens + from) * dim;
            let keys = k[first..].chunks_exact(dim).take(row + 1 - from);
            let dot = |key: &[f32]| query.iter().zip(key).map(|(q, &k)| q * k as f64).sum::<f64>() * self.scale();
            let scores: Vec<f64> = keys.map(dot).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            let mut want = vec![0.0; dim];
            for (score, value) in scores.iter().zip(v[first..].chunks_exact(dim)) {
                let share = (score - max).exp() / total;
                want.iter_mut().zip(value).for_each(|(want, &x)| *want += share * x as f64);
            }
            let name = format!("attention of {what}, row {row}, head {head} ({})", self.name());
            close(&name, &got(row)[head * dim..][..dim], &want, far);
        }
    }
}

/// Row `at` of rows of `dim` elements.
fn elements(rows: &[f32], at: usize, dim: usize) -> Vec<f64> {
    rows[at * dim..][..dim].iter().map(|&x| x as f64).collect()
}
