//! Paged attention for a ragged batch of prefill chunks and decode rows.
//!
//! A task is up to 16 query rows with all query heads of one KV head: rows of one sequence, or of several that have blocks in
//! common ([`super::together`]). Each 16 slots of a block are read and widened to f32 once per task; where few queries see them, floats of
//! 16 bits are widened as they are used, since storing them and reading them again costs more. A row's result depends only on
//! its own position and sequence: slots are taken in ascending order, 32 at a time counted from position 0, into a softmax of the
//! row's own, whoever else takes them (I1); the arithmetic is [`super::fold`]'s. Bytes moved per task: K and V of the
//! visible slots, once. Bound: memory bandwidth for decode, fused multiply-adds for prefill and for shared blocks (4 · head_dim ·
//! visible slots per row and head).
//!
//! A query that no longer sees all before it takes its group's sinks before its window, rotated for them: then keys are as far away
//! as they stand within the cache (StreamingLLM, Xiao et al. 2023). Until then it is answered as without sinks, to the bit.

use baton_types::{BlockId, KvDtype};
use half::{bf16, f16};

use super::codes::Codes;
use super::element::Element;
use super::fold::{Fold, GROUP, Query, SLOTS, Slots, Softmax, TOGETHER, scale_row};
use super::isa::{Isa, dispatch};
use super::kv_row::{Fp8, Int4, KvRow, Planes, Q8};
use super::simd::Simd;
use super::slots::{self, Ahead, Memory, Widened};
use super::together::{Tables, Tile};
use crate::backend::{MAX_HEADS_PER_KV_HEAD, TILE_ROWS};

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
    /// A tile and a KV head that this thread will probably take next: what they see first is fetched ahead.
    pub then: Option<(Tile, usize)>,
    /// Query heads in all, and per KV head.
    pub heads: usize,
    pub group: usize,
    pub scale: f32,
    /// The queries as the sinks see them; not read without sinks.
    pub sink_q: *const f32,
    pub q: *const f32,
    pub out: *mut f32,
}

/// A part of a task's slots that is taken in ascending order, a group of all its tiles before the next of any.
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

    /// Position of the first group of slots that a tile sees any of.
    fn first(&self, tile: &Tile) -> usize {
        self.tables.sight.first(tile.position) / GROUP * GROUP
    }

    /// What neighbours share, and the rest of each tile.
    fn passes(&self) -> impl Iterator<Item = Pass<'a>> {
        let task = *self;
        let from = task.tiles.iter().map(|tile| task.first(tile)).min().unwrap_or(0);
        let shared = task.shared / GROUP * GROUP;
        let together = Pass { tiles: task.tiles, from, to: shared };
        let alone = task.tiles.chunks(1).map(move |tiles| {
            let from = task.first(&tiles[0]).max(shared);
            Pass { tiles, from, to: tiles[0].end() }
        });
        std::iter::once(together).chain(alone)
    }

    /// Where the two halves of a group lie, block and slot, as far as a tile sees any of them.
    fn halves(&self, tile: &Tile, base: usize) -> [Option<(BlockId, usize)>; 2] {
        let (first, size) = (self.tables.sight.first(tile.position), self.tables.sight.block_size);
        [base, base + SLOTS].map(|base| {
            let sees = first < base + SLOTS && base < tile.end();
            sees.then(|| (self.tables.block(tile, base / size), base % size))
        })
    }

    /// The next tiles of a pass that take a group from the same blocks, perhaps with some between them that take none, and those
    /// behind them.
    fn split<'b>(&self, tiles: &'b [Tile], base: usize) -> Option<(&'b [Tile], &'b [Tile])> {
        let sees = |tile: &Tile| self.first(tile) <= base && base < tile.end();
        let tiles = &tiles[tiles.iter().position(sees)?..];
        let other = |tile: &Tile| sees(tile) && self.halves(tile, base) != self.halves(&tiles[0], base);
        Some(tiles.split_at(if tiles.len() == 1 { 1 } else { tiles.iter().position(other).unwrap_or(tiles.len()) }))
    }

    /// Of `count` slots from `base` on, the first that a row sees, and the one behind the last.
    fn seen(&self, base: usize, count: usize, position: usize) -> (usize, usize) {
        let (low, end) = (self.tables.sight.first(position), position + 1);
        (low.saturating_sub(base).min(count), end.saturating_sub(base).min(count))
    }
}

/// A row of a tile that sees slots: where its first query lies, its softmax, and what it sees.
type Seeing = (usize, usize, (usize, usize));

/// Rows of a task that see slots.
#[derive(Clone, Copy)]
struct Rows {
    rows: [Seeing; TILE_ROWS],
    count: usize,
}

impl Rows {
    /// Of those of `tiles`, the ones that see any; `seen` says of a position the first slot and the one behind the last.
    fn of(task: &Task<'_>, tiles: &[Tile], seen: impl Fn(usize) -> (usize, usize)) -> Rows {
        let mut found = Rows { rows: [(0, 0, (0, 0)); TILE_ROWS], count: 0 };
        for tile in tiles {
            for row in 0..tile.rows {
                let seen = seen(tile.position + row);
                found.rows[found.count] = (task.offset(tile, row, 0), (tile.place + row) * task.group, seen);
                found.count += usize::from(seen.0 < seen.1);
            }
        }
        found
    }

    /// Queries of all of them.
    fn queries(&self, task: &Task<'_>) -> usize {
        self.count * task.group
    }

    /// The next queries from the `first` one on, read from `q`, at most [`TOGETHER`], and how many.
    #[inline(always)]
    fn some(&self, task: &Task<'_>, q: *const f32, first: usize) -> ([Query; TOGETHER], usize) {
        let mut queries = [Query { q, out: task.out, seen: (0, 0), state: 0 }; TOGETHER];
        let (mut row, mut head, mut count) = (first / task.group, first % task.group, 0);
        while count < TOGETHER && row < self.count {
            let (offset, state, seen) = self.rows[row];
            let offset = offset + head * task.planes.head_dim;
            let (q, out) = (q.wrapping_add(offset), task.out.wrapping_add(offset));
            queries[count] = Query { q, out, seen, state: state + head };
            count += 1;
            (row, head) = if head + 1 < task.group { (row, head + 1) } else { (row + 1, 0) };
        }
        (queries, count)
    }
}

/// What a kernel has beside its task.
struct Work<S: Simd> {
    widened: Widened,
    states: *mut Softmax<S>,
}

impl<S: Codes + Fold> Work<S> {
    /// Takes a half of a group or both into the queries that see any, while what comes next is on its way.
    #[inline(always)]
    unsafe fn take<E: Element, const H: usize>(
        &self,
        task: &Task<'_>,
        (rows, q): (&Rows, *const f32),
        slots: &Slots<E>,
        ahead: &mut Ahead,
    ) {
        let mut done = 0;
        ahead.share(rows.queries(task).div_ceil(TOGETHER));
        while done < rows.queries(task) {
            let (queries, count) = rows.some(task, q, done);
            ahead.fetch();
            // SAFETY: the caller's promise: the slots are loaded; rows of q and out belong to this task.
            unsafe { S::fold::<E, H>(&queries[..count], self.states, task.scale, slots) }
            done += count;
        }
    }

    /// Takes a group of tiles that see the same blocks; behind `end` there is no other.
    #[inline(always)]
    unsafe fn group<T: KvRow>(&self, task: &Task<'_>, tiles: &[Tile], base: usize, end: usize) {
        let halves = task.halves(&tiles[0], base);
        let next_base = base + GROUP;
        let (next, kv_head) = match (next_base, task.then) {
            (next, _) if next < end => (task.halves(&tiles[0], next), task.kv_head),
            (_, Some((tile, kv_head))) => (task.halves(&tile, task.first(&tile)), kv_head),
            _ => ([None; 2], task.kv_head),
        };
        let mut ahead = Ahead::new(&task.planes, kv_head, next);
        let few = tiles.iter().map(|tile| tile.rows).sum::<usize>() * task.group <= TOGETHER;
        // SAFETY: the caller's promise.
        unsafe {
            if T::SIXTEEN_BITS && few {
                // Each line is asked for at its place in these slots, as far as all of them are used and have one; else at once.
                let evenly = next_base < end && halves.iter().all(Option::is_some);
                if !evenly {
                    ahead.share(1);
                    ahead.fetch();
                }
                let next = if evenly { ahead.halves() } else { None };
                let slots = slots::transpose::<S, T>(&task.planes, task.kv_head, halves, self.widened, next);
                return self.seen(task, tiles, (base, halves), &slots, &mut Ahead::default());
            }
            for (half, at) in halves.into_iter().enumerate() {
                if let Some(at) = at {
                    slots::load::<S, T>(&task.planes, task.kv_head, at, (self.widened, half));
                }
            }
            self.seen(task, tiles, (base, halves), &self.widened.slots(), &mut ahead);
        }
    }

    /// Takes the slots of a group, as far as they are seen, into the queries of tiles.
    #[inline(always)]
    unsafe fn seen<E: Element>(
        &self,
        task: &Task<'_>,
        tiles: &[Tile],
        (base, halves): (usize, [Option<(BlockId, usize)>; 2]),
        slots: &Slots<E>,
        ahead: &mut Ahead,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if halves.iter().all(Option::is_some) {
                let rows = Rows::of(task, tiles, |position| task.seen(base, GROUP, position));
                self.take::<E, 2>(task, (&rows, task.q), slots, ahead);
            } else {
                let half = usize::from(halves[0].is_none());
                let rows = Rows::of(task, tiles, |position| task.seen(base + half * SLOTS, SLOTS, position));
                self.take::<E, 1>(task, (&rows, task.q), &slots.half(half), ahead);
            }
        }
    }
}

#[inline(always)]
unsafe fn attend_kernel<S: Codes + Fold, T: KvRow>(_: S, task: &Task<'_>) {
    let (dim, width) = (task.planes.head_dim, task.group * task.planes.head_dim);
    let mut memory = std::mem::MaybeUninit::<Memory>::uninit();
    // Only those of the task's queries are ever touched.
    let mut states = std::mem::MaybeUninit::<[Softmax<S>; TILE_ROWS * MAX_HEADS_PER_KV_HEAD]>::uninit();
    let states = states.as_mut_ptr().cast::<Softmax<S>>();
    // SAFETY: the memory lives until the task is done.
    let work = Work { widened: unsafe { Widened::new(memory.as_mut_ptr(), dim) }, states };
    let rows = || task.tiles.iter().flat_map(|tile| (0..tile.rows).map(move |row| (tile, row)));
    // SAFETY: rows of q and out belong to these tiles and this KV head alone; the tables cover the visible positions.
    unsafe {
        for (tile, row) in rows() {
            std::ptr::write_bytes(task.out.add(task.offset(tile, row, 0)), 0, width);
            for head in 0..task.group {
                states.add((tile.place + row) * task.group + head).write(Softmax::empty());
            }
        }
        for tile in task.tiles {
            let sight = task.tables.sight;
            let sinks = if sight.evicts(tile.end() - 1) { sight.sinks } else { 0 };
            for base in (0..sinks).step_by(SLOTS) {
                let block = task.tables.blocks[tile.sinks + base / sight.block_size];
                let at = (block, base % sight.block_size);
                slots::load::<S, T>(&task.planes, task.kv_head, at, (work.widened, 0));
                let rows = Rows::of(task, std::slice::from_ref(tile), |position| {
                    (0, if sight.evicts(position) { (sinks - base).min(SLOTS) } else { 0 })
                });
                let slots = work.widened.slots();
                work.take::<f32, 1>(task, (&rows, task.sink_q), &slots, &mut Ahead::default());
            }
        }
        for pass in task.passes() {
            for base in (pass.from..pass.to).step_by(GROUP) {
                let mut rest = pass.tiles;
                while let Some((tiles, others)) = task.split(rest, base) {
                    work.group::<T>(task, tiles, base, pass.to);
                    rest = others;
                }
            }
        }
        for (tile, row) in rows() {
            for head in 0..task.group {
                let state = &*states.add((tile.place + row) * task.group + head);
                scale_row::<S>(task.out.add(task.offset(tile, row, head)), dim, 1.0 / state.sum());
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
