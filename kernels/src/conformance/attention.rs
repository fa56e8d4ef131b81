//! Attention and the store of K and V: what is stored is within the type's rounding, attention over what is stored agrees
//! with an f64 reference, and chunks, batches and block sizes change no bit (I1).

use baton_types::{BlockId, KvDtype, PoolGeometry};

use super::kv::{read_row, rounding};
use super::{Factory, Random, close, geometry, read};
use crate::backend::{AttentionShape, Backend, Ragged, Rope};

/// Tokens of the two sequences.
const LENS: [usize; 2] = [61, 18];
/// Positions of the rotation tables.
const POSITIONS: usize = 64;
const SCALE: f64 = 0.25;

struct Case {
    dtype: KvDtype,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: Option<u32>,
    sinks: u32,
}

/// Rows `[token, head, dim]` of each sequence.
struct Inputs {
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

/// What a run gave: the output of every row, and K and V `[token, head, dim]` as they can be read back.
struct Outcome {
    out: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

/// Every type and shape.
pub(super) fn run<F: Factory>(factory: &F) {
    for dtype in KvDtype::ALL {
        for (heads, kv_heads, dim) in [(4, 4, 8), (6, 2, 64), (5, 1, 72), (9, 3, 24), (4, 1, 256)] {
            for (window, sinks) in [(None, 0), (Some(21), 0), (Some(21), 16), (Some(5), 3)] {
                let case = Case { dtype, heads, kv_heads, dim, window, sinks };
                if factory.serves(&case.geometry(16).layout) {
                    case.check(factory);
                }
            }
        }
    }
}

/// How far a pair of elements is turned at a position.
fn angle(dim: usize, position: f64, pair: usize) -> f64 {
    position / 10f64.powf(pair as f64 / (dim / 2) as f64 * 4.0)
}

/// A row, rotated to a position; back from there where it is negative.
pub(super) fn rotated(row: &[f64], position: f64) -> Vec<f64> {
    let half = row.len() / 2;
    let rotate = |d: usize| {
        let (sin, cos) = angle(row.len(), position, d % half).sin_cos();
        let (a, b) = (row[d % half], row[half + d % half]);
        if d < half { a * cos - b * sin } else { b * cos + a * sin }
    };
    (0..row.len()).map(rotate).collect()
}

/// The rotation's tables.
pub(super) fn rope<B: Backend>(backend: &B, positions: usize, dim: usize) -> Rope<B::Buffer> {
    let half = dim / 2;
    let table = |f: fn(f64) -> f64| -> Vec<f32> {
        (0..positions * half).map(|j| f(angle(dim, (j / half) as f64, j % half)) as f32).collect()
    };
    let cos = backend.upload(&table(f64::cos)).expect("cos");
    Rope { cos, sin: backend.upload(&table(f64::sin)).expect("sin") }
}

impl Case {
    fn name(&self) -> String {
        let Case { dtype, heads, kv_heads, dim, window, sinks } = self;
        format!("{dtype:?}, {heads}/{kv_heads} heads of {dim}, window {window:?}, {sinks} sinks")
    }

    fn geometry(&self, block_size: u32) -> PoolGeometry {
        let mut geometry = geometry(self.dtype, self.kv_heads as u32, self.dim as u32, self.window, block_size);
        geometry.layout.groups[0].sinks = self.sinks;
        geometry
    }

    fn check<F: Factory>(&self, factory: &F) {
        let inputs = self.inputs();
        let runs = [(16u32, 64usize), (16, 1), (32, 7), (16, 16)];
        let mut runs = runs.map(|(block_size, chunk)| self.compute(factory, &inputs, block_size, chunk)).into_iter();
        let Some(first) = runs.next() else { return };
        let promises = factory.promises();
        for (i, run) in runs.enumerate() {
            let how = format!("I1: chunking {} changes ", i + 1);
            assert!((&run.k, &run.v) == (&first.k, &first.v), "{how}what is stored ({})", self.name());
            match promises.chunks {
                None => assert!(run.out == first.out, "{how}bits ({})", self.name()),
                Some(far) => {
                    for (out, want) in run.out.iter().zip(&first.out) {
                        let want: Vec<f64> = want.iter().map(|&x| x as f64).collect();
                        close(&format!("{how}attention ({})", self.name()), out, &want, far);
                    }
                }
            }
        }
        self.check_store(&inputs, &first);
        for s in 0..LENS.len() {
            let want = self.reference(&inputs, &first, s);
            close(&format!("attention ({})", self.name()), &first.out[s], &want, promises.attention);
        }
    }

    fn inputs(&self) -> Inputs {
        let mut random = Random(3 + self.dim as u64);
        let mut rows =
            |heads: usize| -> Vec<Vec<f32>> { LENS.iter().map(|n| random.vector(n * heads * self.dim)).collect() };
        let mut inputs = Inputs { q: rows(self.heads), k: rows(self.kv_heads), v: rows(self.kv_heads) };
        // Rows of very different size beside each other, one of zeros, one of equal elements, one far from zero.
        for v in &mut inputs.v {
            for (t, row) in v.chunks_exact_mut(self.kv_heads * self.dim).enumerate() {
                row.iter_mut().for_each(|x| match t % 8 {
                    0 => *x *= 10.0,
                    1 => *x *= 1e-4,
                    2 => *x = 0.0,
                    3 => *x = -1.5,
                    4 => *x += 4.0,
                    _ => (),
                });
            }
        }
        inputs
    }

    /// Runs both sequences in chunks, together where both have tokens left.
    fn compute<F: Factory>(&self, factory: &F, inputs: &Inputs, block_size: u32, chunk: usize) -> Outcome {
        let dim = self.dim;
        let geometry = self.geometry(block_size);
        let mut backend = factory.make(&geometry);
        let rope = rope(&backend, POSITIONS, dim);
        let shape = AttentionShape { group: 0, layer: 1, heads: self.heads, scale: SCALE as f32 };
        // Tables out of order and interleaved between the sequences.
        let tables: [Vec<BlockId>; 2] =
            [(0..4).map(|i| BlockId(23 - 2 * i)).collect(), (0..4).map(|i| BlockId(2 * i)).collect()];
        let mut outcome = Outcome { out: vec![Vec::new(); 2], k: vec![Vec::new(); 2], v: vec![Vec::new(); 2] };
        for first in (0..LENS[0]).step_by(chunk) {
            let mut batch = Ragged::with_capacity(128, 16);
            let (mut q, mut k, mut v, mut who) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for s in [1, 0] {
                let end = (first + chunk).min(LENS[s]);
                if first < end {
                    // In short chunks only what the first row and those after it see.
                    let live = geometry.layout.groups[0].live(first as u32, block_size);
                    let hidden = if chunk < 16 { live.missing(0, 4) } else { 0 };
                    let (sinks, rest) = tables[s].split_at(if hidden > 0 { live.sinks as usize } else { 0 });
                    let around = (sinks, &rest[hidden as usize..]);
                    batch.push_around(first, end - first, around, (hidden * block_size) as usize);
                    q.extend_from_slice(&inputs.q[s][first * self.heads * dim..end * self.heads * dim]);
                    k.extend_from_slice(&inputs.k[s][first * self.kv_heads * dim..end * self.kv_heads * dim]);
                    v.extend_from_slice(&inputs.v[s][first * self.kv_heads * dim..end * self.kv_heads * dim]);
                    who.push((s, (end - first) * self.heads * dim));
                }
            }
            if self.sinks > 0 {
                q.resize(q.len() * 2, f32::NAN);
            }
            let mut q = backend.upload(&q).expect("q");
            let (k, v) = (backend.upload(&k).expect("k"), backend.upload(&v).expect("v"));
            let mut out = backend.buffer(batch.rows() * self.heads * dim).expect("out");
            backend.rope_and_store_kv(shape, &batch, &rope, &mut q, &k, &v);
            backend.attention(shape, &batch, &q, &mut out);
            let got = read(&mut backend, &out, batch.rows() * self.heads * dim);
            let mut rest = got.as_slice();
            for (s, len) in who {
                outcome.out[s].extend_from_slice(&rest[..len]);
                rest = &rest[len..];
            }
        }
        for s in 0..LENS.len() {
            for t in 0..LENS[s] {
                let (block, slot) = (tables[s][t / block_size as usize], t % block_size as usize);
                let bytes = factory.block(&backend, 0, 1, block);
                for head in 0..self.kv_heads {
                    outcome.k[s].extend(read_row(&geometry.layout, 0, &bytes, 0, head, slot));
                    outcome.v[s].extend(read_row(&geometry.layout, 0, &bytes, 1, head, slot));
                }
            }
        }
        outcome
    }

    /// The row of a token and head out of `heads`, rotated to a position.
    fn rotated(&self, x: &[f32], heads: usize, token: usize, head: usize, position: usize) -> Vec<f64> {
        let row = x[(token * heads + head) * self.dim..][..self.dim].iter().map(|&x| x as f64);
        rotated(&row.collect::<Vec<_>>(), position as f64)
    }

    /// What was stored is what was given, within the type's rounding.
    fn check_store(&self, inputs: &Inputs, got: &Outcome) {
        for s in 0..LENS.len() {
            for (t, h) in (0..LENS[s]).flat_map(|t| (0..self.kv_heads).map(move |h| (t, h))) {
                let at = (t * self.kv_heads + h) * self.dim;
                let v: Vec<f64> = inputs.v[s][at..][..self.dim].iter().map(|&x| x as f64).collect();
                let k = self.rotated(&inputs.k[s], self.kv_heads, t, h, t);
                for (what, given, stored) in [("K", k, &got.k[s]), ("V", v, &got.v[s])] {
                    for (d, &stored) in stored[at..][..self.dim].iter().enumerate() {
                        let allowed = rounding(self.dtype, &given, d);
                        assert!(
                            (stored as f64 - given[d]).abs() <= allowed,
                            "{what} of token {t} [{d}]: {} stored as {stored}, allowed {allowed:.2e} ({})",
                            given[d],
                            self.name()
                        );
                    }
                }
            }
        }
    }

    /// Attention of a sequence over the stored K and V.
    fn reference(&self, inputs: &Inputs, stored: &Outcome, s: usize) -> Vec<f64> {
        let (k, v) = (&stored.k[s], &stored.v[s]);
        let mut want = Vec::new();
        for (p, h) in (0..LENS[s]).flat_map(|p| (0..self.heads).map(move |h| (p, h))) {
            let query = self.rotated(&inputs.q[s], self.heads, p, h, p);
            // To the sinks it stands where it does in a cache of nothing but sinks and window.
            let (sinks, window) = (self.sinks as usize, self.window.unwrap_or(0) as usize);
            let near = self.rotated(&inputs.q[s], self.heads, p, h, p.min((sinks + window).max(1) - 1));
            let row = |t: usize| (t * self.kv_heads + h / (self.heads / self.kv_heads)) * self.dim;
            let from = self.window.map_or(0, |w| (p + 1).saturating_sub(w as usize));
            let seen = || (0..from.min(sinks)).chain(from..=p);
            let score = |t: usize| {
                let query = if t < from { &near } else { &query };
                SCALE * (0..self.dim).map(|d| query[d] * k[row(t) + d] as f64).sum::<f64>()
            };
            let scores: Vec<f64> = seen().map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|x| (x - max).exp()).sum();
            for d in 0..self.dim {
                let share = |(t, x): (usize, &f64)| (x - max).exp() / total * v[row(t) + d] as f64;
                want.push(seen().zip(&scores).map(share).sum());
            }
        }
        want
    }
}
