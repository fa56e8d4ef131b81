//! Paged attention for a ragged batch of prefill chunks and decode rows.
//!
//! Source of the online softmax: Milakov and Gimelshein 2018, as used by FlashAttention (Dao et al. 2022).
//!
//! A task is up to 16 query rows of one sequence with all query heads of one KV head, so each 16 slots of K and V are
//! read and widened to f32 once per task. A row's result depends only on its own position: slots are taken in ascending
//! order, 16 at a time counted from position 0, scores accumulate over head_dim in ascending order, values over slots in
//! ascending order (I1). Bytes moved per task: K and V of the visible slots, once. Bound: memory bandwidth for decode,
//! fused multiply-adds for prefill (4 · head_dim · visible slots per row and head).

use baton_types::{BlockId, KvDtype};
use half::{bf16, f16};

use super::codes::Codes;
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvType, MAX_PARAMETERS, Planes, Q8, Row};
use super::simd::{LANES, Simd, exp};
use crate::backend::{MAX_HEADS_PER_KV_HEAD, Span, TILE_ROWS};

/// Slots taken together.
const SLOTS: usize = 16;
/// Largest head dimension.
pub const MAX_DIM: usize = 512;
/// Query heads scored together.
const PAIRS: usize = 4;

/// One task's view.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub planes: Planes,
    pub span: Span,
    /// First row of the tile inside the span.
    pub first: usize,
    pub table: &'a [BlockId],
    pub kv_head: usize,
    /// Query heads in all, and per KV head.
    pub heads: usize,
    pub group: usize,
    pub scale: f32,
    pub window: Option<usize>,
    pub q: *const f32,
    pub out: *mut f32,
}

/// K transposed to `[dim][slot]` and V as `[slot][dim]`, widened. Uninitialised until loaded: clearing 64 KiB a task would
/// cost more than a short decode row.
struct Tile {
    k: *mut f32,
    v: *mut f32,
}

/// Parameters of 16 rows, widened.
type Parameters = [f32; MAX_PARAMETERS * SLOTS];

/// Widens the parameters of 16 rows, which lie one behind the other.
#[inline(always)]
unsafe fn widen<S: Codes, T: KvType>(row: Row, each: usize, out: *mut f32) {
    for i in (0..each * SLOTS).step_by(LANES) {
        // SAFETY: 16 rows of one block have `each` parameters each, a multiple of 8 in all; `out` has room for them.
        unsafe { S::store(out.add(i), S::mul(S::load_f16(row.parameters.add(i)), S::splat(T::UNIT))) }
    }
}

/// Elements `d..d + 8` of the row `slot` slots behind `first`, with the parameters of `first` and the 15 rows behind it.
#[inline(always)]
unsafe fn load<S: Codes, T: KvType>(
    planes: &Planes,
    first: Row,
    slot: usize,
    parameters: *const f32,
    d: usize,
) -> S::F {
    // SAFETY: the slot is one of the 16, all in one block.
    unsafe { T::load::<S>(planes.elements(first, slot), parameters.add(slot * planes.parameters), d) }
}

#[inline(always)]
unsafe fn load_tile<S: Codes, T: KvType>(task: &Task<'_>, position: usize, tile: &Tile) {
    let (planes, dim) = (&task.planes, task.planes.head_dim);
    let mut memory = std::mem::MaybeUninit::<Parameters>::uninit();
    let parameters = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: 16 slots from `position`, a multiple of 16, lie in one block of the pool; parameters are widened before use.
    unsafe {
        let [key, value] = planes.rows(task.table, task.kv_head, position);
        widen::<S, T>(key, planes.parameters, parameters);
        for d in (0..dim).step_by(LANES) {
            for octet in 0..SLOTS / LANES {
                let mut rows = [S::splat(0.0); LANES];
                for (s, row) in rows.iter_mut().enumerate() {
                    *row = load::<S, T>(planes, key, octet * LANES + s, parameters, d);
                }
                for (i, column) in S::transpose(rows).into_iter().enumerate() {
                    S::store(tile.k.add((d + i) * SLOTS + octet * LANES), column);
                }
            }
        }
        widen::<S, T>(value, planes.parameters, parameters);
        for s in 0..SLOTS {
            for d in (0..dim).step_by(LANES) {
                S::store(tile.v.add(s * dim + d), load::<S, T>(planes, value, s, parameters, d));
            }
        }
    }
}

/// Scores of `N` queries against 16 slots.
#[inline(always)]
unsafe fn scores<S: Simd, const N: usize>(q: [*const f32; N], k: *const f32, dim: usize) -> [[S::F; 2]; N] {
    // SAFETY: each query has `dim` elements, k has `dim * 16`.
    unsafe {
        let mut acc = [[S::splat(0.0); 2]; N];
        for d in 0..dim {
            let (low, high) = (S::load(k.add(d * SLOTS)), S::load(k.add(d * SLOTS + LANES)));
            for n in 0..N {
                let x = S::splat(*q[n].add(d));
                acc[n] = [S::fma(x, low, acc[n][0]), S::fma(x, high, acc[n][1])];
            }
        }
        acc
    }
}

/// [`scores`] of the first `N` of four queries.
#[inline(always)]
unsafe fn scores_of<S: Simd, const N: usize>(q: [*const f32; PAIRS], k: *const f32, dim: usize) -> [[S::F; 2]; PAIRS] {
    // SAFETY: as for `scores`.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; PAIRS];
        out[..N].copy_from_slice(&scores::<S, N>(std::array::from_fn(|n| q[n]), k, dim));
        out
    }
}

/// `out += Σ_s p[s] · v[s]` over slots `low..high`, `W` vectors wide.
#[inline(always)]
unsafe fn add_values<S: Simd, const W: usize>(
    out: *mut f32,
    p: &[f32; SLOTS],
    v: *const f32,
    dim: usize,
    low: usize,
    high: usize,
) {
    // SAFETY: `out` has `W * 8` elements, v 16 rows of `dim`, `W * 8` of which belong to this call.
    unsafe {
        let mut acc = [S::splat(0.0); W];
        for (w, acc) in acc.iter_mut().enumerate() {
            *acc = S::load(out.add(w * LANES));
        }
        for s in low..high {
            let x = S::splat(p[s]);
            for (w, acc) in acc.iter_mut().enumerate() {
                *acc = S::fma(x, S::load(v.add(s * dim + w * LANES)), *acc);
            }
        }
        for (w, acc) in acc.into_iter().enumerate() {
            S::store(out.add(w * LANES), acc);
        }
    }
}

#[inline(always)]
unsafe fn scale_row<S: Simd>(out: *mut f32, dim: usize, factor: f32) {
    for d in (0..dim).step_by(LANES) {
        // SAFETY: the row has `dim` elements.
        unsafe { S::store(out.add(d), S::mul(S::load(out.add(d)), S::splat(factor))) }
    }
}

/// Running maximum and sum of a query's softmax.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

/// Folds 16 scores, of which `low..high` are visible, into a query's softmax and output.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn fold<S: Simd>(
    state: &mut Softmax,
    scores: [S::F; 2],
    scale: f32,
    low: usize,
    high: usize,
    v: *const f32,
    out: *mut f32,
    dim: usize,
) {
    // SAFETY: the output row has `dim` elements, v 16 rows of them.
    unsafe {
        let visible =
            |half: usize| (low.saturating_sub(half * LANES).min(LANES), high.saturating_sub(half * LANES).min(LANES));
        let (a, b) = (visible(0), visible(1));
        let scale = S::splat(scale);
        let x0 = S::select_range(S::mul(scores[0], scale), a.0, a.1, f32::NEG_INFINITY);
        let x1 = S::select_range(S::mul(scores[1], scale), b.0, b.1, f32::NEG_INFINITY);
        let largest = S::max_lane(S::max(x0, x1));
        let mut row = [0.0f32; LANES];
        if largest > state.max {
            if state.max > f32::NEG_INFINITY {
                S::store(row.as_mut_ptr(), exp::<S>(S::splat(state.max - largest)));
                state.sum *= row[0];
                scale_row::<S>(out, dim, row[0]);
            }
            state.max = largest;
        }
        let max = S::splat(state.max);
        let p0 = S::select_range(exp::<S>(S::sub(x0, max)), a.0, a.1, 0.0);
        let p1 = S::select_range(exp::<S>(S::sub(x1, max)), b.0, b.1, 0.0);
        state.sum += S::sum(S::add(p0, p1));
        let mut p = [0.0f32; SLOTS];
        S::store(p.as_mut_ptr(), p0);
        S::store(p.as_mut_ptr().add(LANES), p1);
        let mut d = 0;
        while d + 8 * LANES <= dim {
            add_values::<S, 8>(out.add(d), &p, v.add(d), dim, low, high);
            d += 8 * LANES;
        }
        while d < dim {
            add_values::<S, 1>(out.add(d), &p, v.add(d), dim, low, high);
            d += LANES;
        }
    }
}

/// First position a query at `position` sees.
fn first_visible(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w))
}

#[inline(always)]
unsafe fn attend_kernel<S: Codes, T: KvType>(_: S, task: &Task<'_>) {
    let dim = task.planes.head_dim;
    let rows = TILE_ROWS.min(task.span.len - task.first);
    let position = task.span.start + task.first;
    let pairs = rows * task.group;
    // Query `i` of the tile: row i / group, head i % group of this KV head.
    let row_offset = |i: usize| {
        let row = task.span.row + task.first + i / task.group;
        (row * task.heads + task.kv_head * task.group + i % task.group) * dim
    };
    let mut memory = std::mem::MaybeUninit::<[[f32; MAX_DIM * SLOTS]; 2]>::uninit();
    let k = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: the second half of the array just made; `load_tile` fills `dim * 16` elements of each before they are read.
    let tile = Tile { k, v: unsafe { k.add(MAX_DIM * SLOTS) } };
    let mut softmax = [Softmax { max: f32::NEG_INFINITY, sum: 0.0 }; TILE_ROWS * MAX_HEADS_PER_KV_HEAD];
    // SAFETY: rows of q and out belong to this tile and KV head alone; the table covers the visible positions.
    unsafe {
        for i in 0..pairs {
            std::ptr::write_bytes(task.out.add(row_offset(i)), 0, dim);
        }
        let mut base = first_visible(position, task.window) / SLOTS * SLOTS;
        while base < position + rows {
            load_tile::<S, T>(task, base, &tile);
            let mut i = 0;
            while i < pairs {
                let n = PAIRS.min(pairs - i);
                // Unused places repeat the last query; they are not read.
                let q = [0, 1, 2, 3].map(|j| task.q.add(row_offset(i + j.min(n - 1))));
                let both = match n {
                    1 => scores_of::<S, 1>(q, tile.k, dim),
                    2 => scores_of::<S, 2>(q, tile.k, dim),
                    3 => scores_of::<S, 3>(q, tile.k, dim),
                    _ => scores_of::<S, PAIRS>(q, tile.k, dim),
                };
                for (j, score) in both.into_iter().take(n).enumerate() {
                    let at = position + (i + j) / task.group;
                    let low = first_visible(at, task.window).saturating_sub(base);
                    let high = (at + 1).saturating_sub(base).min(SLOTS);
                    if low < high {
                        let out = task.out.add(row_offset(i + j));
                        fold::<S>(&mut softmax[i + j], score, task.scale, low, high, tile.v, out, dim);
                    }
                }
                i += n;
            }
            base += SLOTS;
        }
        for (i, state) in softmax[..pairs].iter().enumerate() {
            scale_row::<S>(task.out.add(row_offset(i)), dim, 1.0 / state.sum);
        }
    }
}

/// The attention kernel of a KV type.
///
/// # Safety
/// Of what it returns: the table names pool blocks that cover the task's positions and are not written meanwhile; the task's
/// rows and heads of `q` are readable, those of `out` writable by this task alone.
pub fn kernel(dtype: KvDtype) -> unsafe fn(Isa, &Task<'_>) {
    match dtype {
        KvDtype::F32 => attend_f32,
        KvDtype::F16 => attend_f16,
        KvDtype::Bf16 => attend_bf16,
        KvDtype::Q8 => attend_q8,
        KvDtype::Fp8 => attend_fp8,
        KvDtype::Int4 => attend_int4,
    }
}

macro_rules! attend {
    ($($name:ident: $ty:ty),*) => {
        $(dispatch! {
            /// One attention task.
            ///
            /// # Safety
            /// See [`kernel`].
            unsafe fn $name(task: &Task<'_>) = attend_kernel::<_, $ty>
        })*
    };
}
attend!(attend_f32: f32, attend_f16: f16, attend_bf16: bf16, attend_q8: Q8, attend_fp8: Fp8, attend_int4: Int4);
