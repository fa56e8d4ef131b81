//! Paged attention for a ragged batch of prefill chunks and decode rows.
//!
//! A task is up to 16 query rows with all query heads of one KV head: rows of one sequence, or of several that have blocks in
//! common ([`super::together`]). Each 16 slots of a block are read and widened to f32 once per task. A row's result depends only on
//! its own position and sequence: slots are taken in ascending order, 16 at a time counted from position 0, into a softmax of the
//! row's own, whoever else takes them (I1); the arithmetic is [`super::fold`]'s. Bytes moved per task: K and V of the
//! visible slots, once. Bound: memory bandwidth for decode, fused multiply-adds for prefill and for shared blocks (4 · head_dim ·
//! visible slots per row and head).
//!
//! A group with sinks shows its first slots before those of the window, to queries rotated for them: then keys are as far away as
//! they stand within the cache (StreamingLLM, Xiao et al. 2023).

use baton_types::{BlockId, KvDtype};
use half::{bf16, f16};

use super::codes::Codes;
use super::fold::{Query, SLOTS, Slots, Softmax, TOGETHER, fold, scale_row};
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvRow, MAX_PARAMETERS, Planes, Q8, Row};
use super::simd::LANES;
use super::together::{Tables, Tile};
use crate::backend::{MAX_HEADS_PER_KV_HEAD, TILE_ROWS};

/// Largest head dimension.
pub const MAX_DIM: usize = 512;

/// One task's view.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub planes: Planes,
    /// Whose rows these are, at most [`TILE_ROWS`] in all.
    pub tiles: &'a [Tile],
    /// Behind the last position of which two neighbours share the block.
    pub shared: usize,
    pub tables: Tables<'a>,
    pub kv_head: usize,
    /// Query heads in all, and per KV head.
    pub heads: usize,
    pub group: usize,
    pub scale: f32,
    /// The queries as the sinks see them; not read without sinks.
    pub sink_q: *const f32,
    pub q: *const f32,
    pub out: *mut f32,
}

/// A part of a task's slots that is taken in ascending order, 16 of all its tiles before the next 16 of any.
#[derive(Clone, Copy)]
struct Pass<'a> {
    tiles: &'a [Tile],
    from: usize,
    to: usize,
}

impl<'a> Task<'a> {
    /// Where a query begins in q and out: a row of a tile, a head of this KV head.
    fn offset(&self, tile: &Tile, row: usize, head: usize) -> usize {
        ((tile.row + row) * self.heads + self.kv_head * self.group + head) * self.planes.head_dim
    }

    /// Position of the first 16 slots that a tile sees.
    fn first(&self, tile: &Tile) -> usize {
        self.tables.sight.first(tile.position) / SLOTS * SLOTS
    }

    /// What neighbours share, and the rest of each tile.
    fn passes(&self) -> impl Iterator<Item = Pass<'a>> {
        let task = *self;
        let from = task.tiles.iter().map(|tile| task.first(tile)).min().unwrap_or(0);
        let together = Pass { tiles: task.tiles, from, to: task.shared };
        let alone = task.tiles.chunks(1).map(move |tiles| {
            let from = task.first(&tiles[0]).max(task.shared);
            Pass { tiles, from, to: tiles[0].end() }
        });
        std::iter::once(together).chain(alone)
    }

    /// The next tiles of a pass that take 16 slots from one block, perhaps with some between them that take none, and those
    /// behind them.
    fn split<'b>(&self, tiles: &'b [Tile], base: usize) -> Option<(&'b [Tile], &'b [Tile])> {
        let sees = |tile: &Tile| self.first(tile) <= base && base < tile.end();
        let tiles = &tiles[tiles.iter().position(sees)?..];
        let block = |tile: &Tile| self.tables.block(tile, base / self.tables.sight.block_size);
        let other = |tile: &Tile| sees(tile) && block(tile) != block(&tiles[0]);
        Some(tiles.split_at(if tiles.len() == 1 { 1 } else { tiles.iter().position(other).unwrap_or(tiles.len()) }))
    }

    /// Of the 16 slots from `base` on, the first that a row sees, and the one behind the last.
    fn seen(&self, base: usize, position: usize) -> (usize, usize) {
        let (low, end) = (self.tables.sight.first(position), position + 1);
        (low.saturating_sub(base).min(SLOTS), end.saturating_sub(base).min(SLOTS))
    }
}

/// Where [`Slots`] are widened to. Uninitialised until loaded: clearing 64 KiB a task would cost more than a short decode row.
struct Widened {
    k: *mut f32,
    v: *mut f32,
}

/// K and V of 16 slots, aligned so that no load of a wide vector straddles two cache lines.
#[repr(C, align(64))]
struct Memory([[f32; MAX_DIM * SLOTS]; 2]);

/// Parameters of 16 rows, widened.
type Parameters = [f32; MAX_PARAMETERS * SLOTS];

/// Widens the parameters of 16 rows, which lie one behind the other.
#[inline(always)]
unsafe fn widen<S: Codes, T: KvRow>(row: Row, each: usize, out: *mut f32) {
    for i in (0..each * SLOTS).step_by(LANES) {
        // SAFETY: 16 rows of one block have `each` parameters each, a multiple of 8 in all; `out` has room for them.
        unsafe { S::store(out.add(i), S::mul(S::load_f16(row.parameters.add(i)), S::splat(T::UNIT))) }
    }
}

/// Elements `d..d + 8` of the row `slot` slots behind `first`, with the parameters of `first` and the 15 rows behind it.
#[inline(always)]
unsafe fn load<S: Codes, T: KvRow>(planes: &Planes, first: Row, slot: usize, parameters: *const f32, d: usize) -> S::F {
    // SAFETY: the slot is one of the 16, all in one block.
    unsafe { T::load::<S>(planes.elements(first, slot), parameters.add(slot * planes.parameters), d) }
}

#[inline(always)]
unsafe fn load_slots<S: Codes, T: KvRow>(task: &Task<'_>, block: BlockId, position: usize, slots: &Widened) {
    let (planes, dim) = (&task.planes, task.planes.head_dim);
    let (table, position) = (&[block], position % task.tables.sight.block_size);
    let mut memory = std::mem::MaybeUninit::<Parameters>::uninit();
    let parameters = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: 16 slots from `position`, a multiple of 16, lie in one block of the pool; parameters are widened before use.
    unsafe {
        let [key, value] = planes.rows(table, task.kv_head, position);
        widen::<S, T>(key, planes.parameters, parameters);
        for d in (0..dim).step_by(LANES) {
            for octet in 0..SLOTS / LANES {
                let mut rows = [S::splat(0.0); LANES];
                for (s, row) in rows.iter_mut().enumerate() {
                    *row = load::<S, T>(planes, key, octet * LANES + s, parameters, d);
                }
                for (i, column) in S::transpose(rows).into_iter().enumerate() {
                    S::store(slots.k.add((d + i) * SLOTS + octet * LANES), column);
                }
            }
        }
        widen::<S, T>(value, planes.parameters, parameters);
        for s in 0..SLOTS {
            for d in (0..dim).step_by(LANES) {
                S::store(slots.v.add(s * dim + d), load::<S, T>(planes, value, s, parameters, d));
            }
        }
    }
}

/// Takes 16 slots into the queries, read from `q`, of those rows of `tiles` that see any: `seen` says of a position the first
/// slot and the one behind the last.
#[inline(always)]
unsafe fn take<S: Codes>(
    task: &Task<'_>,
    tiles: &[Tile],
    q: *const f32,
    slots: &Slots,
    states: &mut [Softmax],
    seen: impl Fn(usize) -> (usize, usize),
) {
    // Where a row's first query lies, its softmax, and what it sees.
    let mut rows = [(0, 0, (0, 0)); TILE_ROWS];
    let mut seeing = 0;
    for tile in tiles {
        for row in 0..tile.rows {
            let seen = seen(tile.position + row);
            rows[seeing] = (task.offset(tile, row, 0), (tile.place + row) * task.group, seen);
            seeing += usize::from(seen.0 < seen.1);
        }
    }
    let (mut row, mut head) = (0, 0);
    while row < seeing {
        let mut queries = [Query { q, out: task.out, seen: (0, 0), state: 0 }; TOGETHER];
        let mut count = 0;
        while count < TOGETHER && row < seeing {
            let (offset, state, seen) = rows[row];
            let offset = offset + head * task.planes.head_dim;
            // SAFETY: rows of q and out belong to these tiles and this KV head.
            queries[count] =
                unsafe { Query { q: q.add(offset), out: task.out.add(offset), seen, state: state + head } };
            count += 1;
            (row, head) = if head + 1 < task.group { (row, head + 1) } else { (row + 1, 0) };
        }
        // SAFETY: as above; each query sees a slot, and the slots are loaded.
        unsafe { fold::<S>(&queries[..count], states, task.scale, slots) };
    }
}

#[inline(always)]
unsafe fn attend_kernel<S: Codes, T: KvRow>(_: S, task: &Task<'_>) {
    let (dim, width) = (task.planes.head_dim, task.group * task.planes.head_dim);
    let mut memory = std::mem::MaybeUninit::<Memory>::uninit();
    let k = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: the second half of the array just made; `load_slots` fills `dim * 16` elements of each before they are read.
    let widened = Widened { k, v: unsafe { k.add(MAX_DIM * SLOTS) } };
    let slots = Slots { k: widened.k, v: widened.v, dim };
    let mut states = [Softmax::EMPTY; TILE_ROWS * MAX_HEADS_PER_KV_HEAD];
    let rows = || task.tiles.iter().flat_map(|tile| (0..tile.rows).map(move |row| (tile, row)));
    // SAFETY: rows of q and out belong to these tiles and this KV head alone; the tables cover the visible positions.
    unsafe {
        for (tile, row) in rows() {
            std::ptr::write_bytes(task.out.add(task.offset(tile, row, 0)), 0, width);
        }
        for tile in task.tiles {
            let sinks = task.tables.sight.sinks;
            for base in (0..sinks.min(tile.end())).step_by(SLOTS) {
                let block = task.tables.blocks[tile.sinks + base / task.tables.sight.block_size];
                load_slots::<S, T>(task, block, base, &widened);
                take::<S>(task, std::slice::from_ref(tile), task.sink_q, &slots, &mut states, |position| {
                    (0, (position + 1).min(sinks).saturating_sub(base).min(SLOTS))
                });
            }
        }
        for pass in task.passes() {
            for base in (pass.from..pass.to).step_by(SLOTS) {
                let mut rest = pass.tiles;
                while let Some((tiles, others)) = task.split(rest, base) {
                    let block = task.tables.block(&tiles[0], base / task.tables.sight.block_size);
                    load_slots::<S, T>(task, block, base, &widened);
                    take::<S>(task, tiles, task.q, &slots, &mut states, |position| task.seen(base, position));
                    rest = others;
                }
            }
        }
        for (tile, row) in rows() {
            for head in 0..task.group {
                let state = &states[(tile.place + row) * task.group + head];
                scale_row::<S>(task.out.add(task.offset(tile, row, head)), dim, 1.0 / state.sum);
            }
        }
    }
}

/// The attention kernel of a KV type.
///
/// # Safety
/// Of what it returns: the tables name pool blocks that cover the positions of the task's tiles and are not written meanwhile;
/// these have 16 rows at most, numbered in [`Tile::place`]; their rows and heads of `q` are readable, those of `out` writable
/// by this task alone.
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
