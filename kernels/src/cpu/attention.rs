//! Paged attention for a ragged batch of prefill chunks and decode rows.
//!
//! A task is up to 16 query rows of one sequence with all query heads of one KV head, so each 16 slots of K and V are
//! read and widened to f32 once per task. A row's result depends only on its own position: slots are taken in ascending
//! order, 16 at a time counted from position 0 (I1); the arithmetic is [`super::fold`]'s. Bytes moved per task: K and V of the
//! visible slots, once. Bound: memory bandwidth for decode, fused multiply-adds for prefill (4 · head_dim · visible slots per
//! row and head).

use baton_types::{BlockId, KvDtype};
use half::{bf16, f16};

use super::codes::Codes;
use super::fold::{Query, SLOTS, Slots, Softmax, TOGETHER, fold, scale_row};
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvType, MAX_PARAMETERS, Planes, Q8, Row};
use super::simd::LANES;
use crate::backend::{MAX_HEADS_PER_KV_HEAD, Span, TILE_ROWS};

/// Largest head dimension.
pub const MAX_DIM: usize = 512;

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

/// Where [`Slots`] are widened to. Uninitialised until loaded: clearing 64 KiB a task would cost more than a short decode row.
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

/// First position a query at `position` sees.
fn first_visible(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w))
}

#[inline(always)]
unsafe fn attend_kernel<S: Codes, T: KvType>(_: S, task: &Task<'_>) {
    let dim = task.planes.head_dim;
    let rows = TILE_ROWS.min(task.span.len - task.first);
    let position = task.span.start + task.first;
    let row_offset = |row: usize, head: usize| {
        ((task.span.row + task.first + row) * task.heads + task.kv_head * task.group + head) * dim
    };
    let mut memory = std::mem::MaybeUninit::<[[f32; MAX_DIM * SLOTS]; 2]>::uninit();
    let k = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: the second half of the array just made; `load_tile` fills `dim * 16` elements of each before they are read.
    let tile = Tile { k, v: unsafe { k.add(MAX_DIM * SLOTS) } };
    let slots = Slots { k: tile.k, v: tile.v, dim };
    let mut softmax = [Softmax::EMPTY; TILE_ROWS * MAX_HEADS_PER_KV_HEAD];
    // SAFETY: rows of q and out belong to this tile and KV head alone; the table covers the visible positions.
    unsafe {
        for row in 0..rows {
            std::ptr::write_bytes(task.out.add(row_offset(row, 0)), 0, task.group * dim);
        }
        let mut base = first_visible(position, task.window) / SLOTS * SLOTS;
        while base < position + rows {
            load_tile::<S, T>(task, base, &tile);
            // Slots of these that a row sees, from the first to behind the last. Rows that see any follow one another.
            let seen = |row: usize| {
                let at = position + row;
                let low = first_visible(at, task.window).saturating_sub(base);
                (low.min(SLOTS), (at + 1).saturating_sub(base).min(SLOTS))
            };
            let sees = |row: &usize| seen(*row).0 < seen(*row).1;
            let skipped = (0..rows).take_while(|row| !sees(row)).count();
            let seeing = (skipped..rows).take_while(sees).count();
            let (mut row, mut head) = (skipped, 0);
            let mut i = row * task.group;
            while i < (skipped + seeing) * task.group {
                let count = TOGETHER.min((skipped + seeing) * task.group - i);
                let mut queries = [Query { q: task.q, out: task.out, seen: (0, 0) }; TOGETHER];
                for query in &mut queries[..count] {
                    let offset = row_offset(row, head);
                    *query = Query { q: task.q.add(offset), out: task.out.add(offset), seen: seen(row) };
                    (row, head) = if head + 1 < task.group { (row, head + 1) } else { (row + 1, 0) };
                }
                fold::<S>(&queries[..count], &mut softmax[i..i + count], task.scale, &slots);
                i += count;
            }
            base += SLOTS;
        }
        for (i, state) in softmax[..rows * task.group].iter().enumerate() {
            scale_row::<S>(task.out.add(row_offset(i / task.group, i % task.group)), dim, 1.0 / state.sum);
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
