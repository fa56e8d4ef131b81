//! Paged attention for a ragged batch of prefill chunks and decode rows, and the store of K and V into the pool.
//!
//! Source of the online softmax: Milakov and Gimelshein 2018, as used by FlashAttention (Dao et al. 2022).
//!
//! A task is up to 16 query rows of one sequence with all query heads of one KV head, so each 16 slots of K and V are
//! read and widened to f32 once per task. A row's result depends only on its own position: slots are taken in ascending
//! order, 16 at a time counted from position 0, scores accumulate over head_dim in ascending order, values over slots in
//! ascending order (I1). Bytes moved per task: K and V of the visible slots, once. Bound: memory bandwidth for decode,
//! fused multiply-adds for prefill (4 · head_dim · visible slots per row and head).

use baton_types::BlockId;

use super::isa::dispatch;
use super::matmul::Element;
use super::simd::{LANES, Simd, exp};
use crate::backend::{MAX_HEADS_PER_KV_HEAD, Span, TILE_ROWS};

/// Slots taken together.
const SLOTS: usize = 16;
/// Largest head dimension.
const MAX_DIM: usize = 512;
/// Query heads scored together.
const PAIRS: usize = 4;

/// Where one layer's K and V lie, in elements.
#[derive(Clone, Copy)]
pub struct Planes<E> {
    /// K plane of block 0.
    pub base: *mut E,
    /// Elements from one block to the next.
    pub block: usize,
    /// Elements from the K plane to the V plane.
    pub value: usize,
    pub block_size: usize,
    pub head_dim: usize,
}

// SAFETY: tasks write disjoint slots and read only slots that nobody writes meanwhile.
unsafe impl<E> Send for Planes<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Planes<E> {}

impl<E> Planes<E> {
    /// K of `position` of a KV head.
    #[inline(always)]
    unsafe fn key(&self, table: &[BlockId], head: usize, position: usize) -> *mut E {
        let block = table[position / self.block_size].0 as usize;
        let slot = head * self.block_size + position % self.block_size;
        // SAFETY: the caller's table names blocks of the pool.
        unsafe { self.base.add(block * self.block + slot * self.head_dim) }
    }
}

/// One task's view.
#[derive(Clone, Copy)]
pub struct Task<'a, E> {
    pub planes: Planes<E>,
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

#[inline(always)]
unsafe fn load_tile<S: Simd, E: Element>(task: &Task<'_, E>, position: usize, tile: &Tile) {
    let dim = task.planes.head_dim;
    // SAFETY: 16 slots from `position`, a multiple of 16, lie in one block of the pool.
    unsafe {
        let key = task.planes.key(task.table, task.kv_head, position);
        let value = key.add(task.planes.value);
        for d in (0..dim).step_by(LANES) {
            for octet in 0..SLOTS / LANES {
                let mut rows = [S::splat(0.0); LANES];
                for (s, row) in rows.iter_mut().enumerate() {
                    *row = E::load::<S>(key.add((octet * LANES + s) * dim + d));
                }
                for (i, column) in S::transpose(rows).into_iter().enumerate() {
                    S::store(tile.k.add((d + i) * SLOTS + octet * LANES), column);
                }
            }
            for s in 0..SLOTS {
                S::store(tile.v.add(s * dim + d), E::load::<S>(value.add(s * dim + d)));
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
unsafe fn attend_kernel<S: Simd, E: Element>(_: S, task: &Task<'_, E>) {
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
            load_tile::<S, E>(task, base, &tile);
            let mut i = 0;
            while i < pairs {
                let n = if pairs - i >= PAIRS { PAIRS } else { 1 };
                let mut both = [[S::splat(0.0); 2]; PAIRS];
                if n == PAIRS {
                    let q = [0, 1, 2, 3].map(|j| task.q.add(row_offset(i + j)));
                    both = scores::<S, PAIRS>(q, tile.k, dim);
                } else {
                    both[0] = scores::<S, 1>([task.q.add(row_offset(i))], tile.k, dim)[0];
                }
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

/// K and V of one token and their rotation.
#[derive(Clone, Copy)]
pub struct StoreTask<'a, E> {
    pub planes: Planes<E>,
    pub table: &'a [BlockId],
    pub position: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// This token's rows.
    pub q: *mut f32,
    pub k: *const f32,
    pub v: *const f32,
    /// `[head_dim / 2]` of this position.
    pub cos: *const f32,
    pub sin: *const f32,
}

/// Rotates the pairs (x[i], x[i + dim/2]).
#[inline(always)]
unsafe fn rotate(x: *const f32, out: *mut f32, cos: *const f32, sin: *const f32, dim: usize) {
    let half = dim / 2;
    for i in 0..half {
        // SAFETY: the vectors have `dim` and `dim / 2` elements.
        unsafe {
            let (a, b, c, s) = (*x.add(i), *x.add(half + i), *cos.add(i), *sin.add(i));
            *out.add(i) = a.mul_add(c, -(b * s));
            *out.add(half + i) = b.mul_add(c, a * s);
        }
    }
}

#[inline(always)]
unsafe fn store_kernel<S: Simd, E: Element>(_: S, task: &StoreTask<'_, E>) {
    let dim = task.planes.head_dim;
    let mut rotated = [0.0f32; MAX_DIM];
    // SAFETY: the rows are this token's; its slot is written by this task alone.
    unsafe {
        for h in 0..task.heads {
            let q = task.q.add(h * dim);
            rotate(q, rotated.as_mut_ptr(), task.cos, task.sin, dim);
            std::ptr::copy_nonoverlapping(rotated.as_ptr(), q, dim);
        }
        for h in 0..task.kv_heads {
            rotate(task.k.add(h * dim), rotated.as_mut_ptr(), task.cos, task.sin, dim);
            let key = task.planes.key(task.table, h, task.position);
            let value = key.add(task.planes.value);
            for d in (0..dim).step_by(LANES) {
                E::store::<S>(key.add(d), S::load(rotated.as_ptr().add(d)));
                E::store::<S>(value.add(d), S::load(task.v.add(h * dim + d)));
            }
        }
    }
}

macro_rules! for_element {
    ($attend:ident, $store:ident, $ty:ty) => {
        dispatch! {
            /// One attention task.
            ///
            /// # Safety
            /// The table names pool blocks that cover the task's positions and are not written meanwhile; its rows and
            /// heads of `q` are readable, those of `out` writable by this task alone.
            pub unsafe fn $attend(task: &Task<'_, $ty>) = attend_kernel
        }
        dispatch! {
            /// Rotates and stores one token.
            ///
            /// # Safety
            /// The token's slot in the pool and its rows are accessed by this task alone.
            pub unsafe fn $store(task: &StoreTask<'_, $ty>) = store_kernel
        }
    };
}
for_element!(attend_f32, store_f32, f32);
for_element!(attend_f16, store_f16, half::f16);
for_element!(attend_bf16, store_bf16, half::bf16);
