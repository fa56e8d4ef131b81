//! The arithmetic of attention on sixteen slots: scores of several queries, the online softmax, and the weighted sum of values.
//!
//! Source of the online softmax: Milakov and Gimelshein 2018, as used by FlashAttention (Dao et al. 2022).
//!
//! A score is one chain of fused multiply-adds over head_dim, an output element one over slots, both ascending; which queries are
//! taken together changes no bit (I1). Bound: fused multiply-adds, one load for each where one query is alone, less than half
//! of one where several share the loads of V. Knows nothing of blocks, KV types or tiles.

use super::simd::{Floats, LANES, Simd, Wide, exp};

/// Slots taken together: one wide vector of scores.
pub const SLOTS: usize = 16;
/// Most queries taken together.
pub const TOGETHER: usize = 8;

/// Scores of `N` queries against 16 slots.
#[inline(always)]
unsafe fn scores<S: Simd, const N: usize>(q: &[*const f32], k: *const f32, dim: usize, out: &mut [Wide<S>]) {
    // SAFETY: each query has `dim` elements, k has `dim * 16`.
    unsafe {
        let mut acc = [S::Wide::splat(0.0); N];
        for d in 0..dim {
            let k = S::Wide::load(k.add(d * SLOTS));
            for n in 0..N {
                acc[n] = S::Wide::fma(S::Wide::splat(*q[n].add(d)), k, acc[n]);
            }
        }
        out[..N].copy_from_slice(&acc);
    }
}

/// Running maximum and sum of a query's softmax.
#[derive(Clone, Copy)]
pub struct Softmax {
    max: f32,
    /// Of the weights so far.
    pub sum: f32,
}

impl Softmax {
    /// Before the first slot.
    pub const EMPTY: Softmax = Softmax { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// A query among those taken together.
#[derive(Clone, Copy)]
pub struct Query {
    /// `head_dim` elements.
    pub q: *const f32,
    /// As many.
    pub out: *mut f32,
    /// Of the 16 slots, the first it sees and the one behind the last.
    pub seen: (usize, usize),
    /// Which of the softmaxes is its.
    pub state: usize,
}

/// K transposed to `[dim][slot]` and V as `[slot][dim]`, of 16 slots, widened.
#[derive(Clone, Copy)]
pub struct Slots {
    /// K.
    pub k: *const f32,
    /// V.
    pub v: *const f32,
    /// head_dim.
    pub dim: usize,
}

/// `row *= factor`.
///
/// # Safety
/// The row has `dim` elements, a multiple of 8.
#[inline(always)]
pub unsafe fn scale_row<S: Simd>(row: *mut f32, dim: usize, factor: f32) {
    for d in (0..dim).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe { S::store(row.add(d), S::mul(S::load(row.add(d)), S::splat(factor))) }
    }
}

/// Lanes `seen` of `x`, the others replaced.
#[inline(always)]
unsafe fn select<S: Simd>(x: [S::F; 2], (low, high): (usize, usize), other: f32) -> [S::F; 2] {
    // SAFETY: the caller vouches for the CPU features; no memory is touched.
    unsafe {
        [
            S::select_range(x[0], low.min(LANES), high.min(LANES), other),
            S::select_range(x[1], low.max(LANES) - LANES, high.max(LANES) - LANES, other),
        ]
    }
}

/// Takes 16 scores, of which `query.seen` count, into a softmax: scales the output when the maximum rises, and leaves the weights in
/// `p`.
#[inline(always)]
unsafe fn weigh<S: Simd>(
    state: &mut Softmax,
    score: Wide<S>,
    scale: f32,
    query: &Query,
    dim: usize,
    p: &mut [f32; SLOTS],
) {
    // SAFETY: the output row has `dim` elements.
    unsafe {
        let all = query.seen == (0, SLOTS);
        let x = S::Wide::mul(score, S::Wide::splat(scale));
        let mut halves = S::split(x);
        if !all {
            halves = select::<S>(halves, query.seen, f32::NEG_INFINITY);
        }
        let largest = S::max_lane(S::max(halves[0], halves[1]));
        let mut row = [0.0f32; LANES];
        if largest > state.max {
            if state.max > f32::NEG_INFINITY {
                S::store(row.as_mut_ptr(), exp::<S>(S::splat(state.max - largest)));
                state.sum *= row[0];
                scale_row::<S>(query.out, dim, row[0]);
            }
            state.max = largest;
        }
        let weights = exp::<S::Wide>(S::Wide::sub(S::join(halves[0], halves[1]), S::Wide::splat(state.max)));
        let mut halves = S::split(weights);
        if !all {
            halves = select::<S>(halves, query.seen, 0.0);
        }
        state.sum += S::sum(S::add(halves[0], halves[1]));
        S::store(p.as_mut_ptr(), halves[0]);
        S::store(p.as_mut_ptr().add(LANES), halves[1]);
    }
}

/// `out[n] += Σ_s p[n][s] · v[s]` over slots `seen`, `W` vectors wide from element `d` on.
#[inline(always)]
unsafe fn add_columns<L: Floats, const N: usize, const W: usize>(
    queries: &[Query],
    p: &[[f32; SLOTS]],
    v: *const f32,
    (dim, d): (usize, usize),
) {
    // SAFETY: outputs and the 16 rows of v have `dim` elements, `W` vectors of them from `d` on.
    unsafe {
        let mut acc = [[L::splat(0.0); W]; N];
        for n in 0..N {
            for w in 0..W {
                acc[n][w] = L::load(queries[n].out.add(d + w * L::COUNT));
            }
        }
        let (low, high) = queries[0].seen;
        for s in low..high {
            let row = v.add(s * dim + d);
            let mut values = [L::splat(0.0); W];
            for w in 0..W {
                values[w] = L::load(row.add(w * L::COUNT));
            }
            for n in 0..N {
                let x = L::splat(p[n][s]);
                for w in 0..W {
                    acc[n][w] = L::fma(x, values[w], acc[n][w]);
                }
            }
        }
        for n in 0..N {
            for w in 0..W {
                L::store(queries[n].out.add(d + w * L::COUNT), acc[n][w]);
            }
        }
    }
}

/// Adds values to `N` outputs that see the same slots.
#[inline(always)]
unsafe fn add_values<S: Simd, const N: usize, const W: usize>(queries: &[Query], p: &[[f32; SLOTS]], slots: &Slots) {
    let (dim, mut d) = (slots.dim, 0);
    // SAFETY: outputs and rows of v have `dim` elements, a multiple of 8.
    unsafe {
        while d + W * SLOTS <= dim {
            add_columns::<S::Wide, N, W>(queries, p, slots.v, (dim, d));
            d += W * SLOTS;
        }
        while d + SLOTS <= dim {
            add_columns::<S::Wide, N, 1>(queries, p, slots.v, (dim, d));
            d += SLOTS;
        }
        if d < dim {
            add_columns::<S, N, 1>(queries, p, slots.v, (dim, d));
        }
    }
}

/// Folds 16 slots into the softmax and output of up to [`TOGETHER`] queries, each of which sees at least one. They may belong to
/// several sequences.
///
/// # Safety
/// Queries, outputs and slots have `slots.dim` elements, a multiple of 8; the CPU has `S`'s features.
#[inline(always)]
pub unsafe fn fold<S: Simd>(queries: &[Query], states: &mut [Softmax], scale: f32, slots: &Slots) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut q = [std::ptr::null(); TOGETHER];
        for (q, query) in q.iter_mut().zip(queries) {
            *q = query.q;
        }
        let mut found = [S::Wide::splat(0.0); TOGETHER];
        let mut n = 0;
        while n < queries.len() {
            let (q, found) = (&q[n..], &mut found[n..]);
            n += match queries.len() - n {
                8.. if S::REGISTERS >= 32 => {
                    scores::<S, 8>(q, slots.k, slots.dim, found);
                    8
                }
                4.. => {
                    scores::<S, 4>(q, slots.k, slots.dim, found);
                    4
                }
                3 => {
                    scores::<S, 3>(q, slots.k, slots.dim, found);
                    3
                }
                2 => {
                    scores::<S, 2>(q, slots.k, slots.dim, found);
                    2
                }
                _ => {
                    scores::<S, 1>(q, slots.k, slots.dim, found);
                    1
                }
            };
        }
        let mut p = [[0.0f32; SLOTS]; TOGETHER];
        for (i, query) in queries.iter().enumerate() {
            weigh::<S>(&mut states[query.state], found[i], scale, query, slots.dim, &mut p[i]);
        }
        let mut n = 0;
        while n < queries.len() {
            let (left, p) = (&queries[n..], &p[n..]);
            let mut alike = 1;
            while alike < left.len() && left[alike].seen == left[0].seen {
                alike += 1;
            }
            n += match (alike, S::REGISTERS) {
                (4.., 32..) => {
                    add_values::<S, 4, 4>(left, p, slots);
                    4
                }
                (2.., 32..) => {
                    add_values::<S, 2, 4>(left, p, slots);
                    2
                }
                (2.., _) => {
                    add_values::<S, 2, 2>(left, p, slots);
                    2
                }
                _ => {
                    add_values::<S, 1, 4>(left, p, slots);
                    1
                }
            };
        }
    }
}
