//! Slots of a block on their way into attention: K and V of sixteen are read, widened to f32, and K is transposed to `[dim][slot]`. For few
//! queries floats of 16 bits stay such: K is transposed as it is, V is not copied.
//!
//! Bytes moved: the rows once, from memory in decode and from a cache in prefill. Blocks lie anywhere in the pool, and processors fetch
//! ahead only within a page, so what is needed next is asked for while what is there is worked on ([`Ahead`]). For few queries of 16 bits that
//! is done evenly: a core waits for few lines at a time, and one that asks for more stands still. Knows nothing of queries.

use baton_types::BlockId;

use super::codes::Codes;
use super::fold::{SLOTS, Slots};
use super::kv_row::{KvRow, MAX_PARAMETERS, Planes, Row};
use super::simd::{Floats, LANES, prefetch};

/// Largest head dimension.
pub const MAX_DIM: usize = 512;

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// What slots are widened to: K of sixteen and of sixteen more, then V of both; or, for few queries, K alone, transposed and not widened.
/// Uninitialised until loaded: clearing so much for each task would cost more than a short decode row. Aligned so that no load of a wide
/// vector straddles two lines.
#[repr(C, align(64))]
pub struct Memory {
    k: [f32; 2 * MAX_DIM * SLOTS],
    gap: [f32; 528],
    v: [f32; 2 * MAX_DIM * SLOTS],
}

/// Memory for the slots of a task.
#[derive(Clone, Copy)]
pub struct Widened {
    k: *mut f32,
    v: *mut f32,
    dim: usize,
}

impl Widened {
    /// Slots of rows of `dim` elements.
    ///
    /// # Safety
    /// The memory is writable as long as this and its slots are used.
    pub unsafe fn new(memory: *mut Memory, dim: usize) -> Widened {
        // SAFETY: the caller's promise.
        unsafe { Widened { k: (&raw mut (*memory).k).cast(), v: (&raw mut (*memory).v).cast(), dim } }
    }

    /// All 32.
    #[inline(always)]
    pub fn slots(self) -> Slots<f32> {
        let next = [std::ptr::null(); 2];
        Slots { k: self.k, v: [self.v, self.v.wrapping_add(self.dim * SLOTS)], dim: self.dim, next: [next; 2] }
    }
}

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

/// Rows of 16 slots. All that a loop needs is here: read through a reference it would be read again after each store.
#[derive(Clone, Copy)]
struct Rows {
    elements: *const u8,
    /// Bytes from one to the next.
    apart: usize,
    parameters: *const f32,
    /// Parameters of a row.
    each: usize,
}

impl Rows {
    #[inline(always)]
    unsafe fn of(self, slot: usize) -> (*const u8, *const f32) {
        // SAFETY: the slot is one of the 16.
        unsafe { (self.elements.add(slot * self.apart), self.parameters.add(slot * self.each)) }
    }
}

/// Loads 16 slots of a KV head, from `slot` of a block on, into a half of `into`.
///
/// # Safety
/// The block is one of the pool and holds the slots; the memory of `into` is writable; the CPU has `S`'s features.
#[inline(always)]
pub unsafe fn load<S: Codes, T: KvRow>(
    planes: &Planes,
    kv_head: usize,
    (block, slot): (BlockId, usize),
    (into, half): (Widened, usize),
) {
    let (dim, offset) = (planes.head_dim, half * planes.head_dim * SLOTS);
    let (k, v) = (into.k.wrapping_add(offset), into.v.wrapping_add(offset));
    let mut memory = std::mem::MaybeUninit::<Parameters>::uninit();
    let parameters = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: the caller's promise; parameters are widened before use.
    unsafe {
        let [key, value] = planes.rows(&[block], kv_head, slot);
        let (apart, each) = (planes.row_bytes(), planes.parameters);
        widen::<S, T>(key, each, parameters);
        let rows = Rows { elements: key.elements, apart, parameters, each };
        for d in (0..dim).step_by(LANES) {
            for octet in 0..SLOTS / LANES {
                let mut columns = [S::splat(0.0); LANES];
                for (s, row) in columns.iter_mut().enumerate() {
                    let (elements, parameters) = rows.of(octet * LANES + s);
                    *row = T::load::<S>(elements, parameters, d);
                }
                for (i, column) in S::transpose(columns).into_iter().enumerate() {
                    S::store(k.add((d + i) * SLOTS + octet * LANES), column);
                }
            }
        }
        widen::<S, T>(value, each, parameters);
        let rows = Rows { elements: value.elements, ..rows };
        for s in 0..SLOTS {
            let ((elements, parameters), out) = (rows.of(s), v.add(s * dim));
            let mut d = 0;
            while d + SLOTS <= dim {
                S::Wide::store(out.add(d), T::load_wide::<S>(elements, parameters, d));
                d += SLOTS;
            }
            if d < dim {
                S::store(out.add(d), T::load::<S>(elements, parameters, d));
            }
        }
    }
}

/// Takes slots of a KV head from where they lie, as far as there are any, 16 and 16 more: K is transposed, V stays in the
/// pool. `next` is asked for while they are used ([`Slots::next`]).
///
/// # Safety
/// As for [`load`], and the type has [`KvRow::SIXTEEN_BITS`]. The slots may be used as long as nobody writes to the blocks.
#[inline(always)]
pub unsafe fn transpose<S: Codes, T: KvRow>(
    planes: &Planes,
    kv_head: usize,
    halves: [Option<(BlockId, usize)>; 2],
    into: Widened,
    next: Option<[[*const u8; 2]; 2]>,
) -> Slots<T::Float> {
    let (dim, k) = (planes.head_dim, into.k.cast::<u16>());
    let mut v = [std::ptr::null(); 2];
    for (half, at) in halves.into_iter().enumerate() {
        if let Some((block, slot)) = at {
            // SAFETY: the caller's promise: the rows of 16 slots lie one behind the other, and k has room for those of 32.
            unsafe {
                let [key, value] = planes.rows(&[block], kv_head, slot);
                let out = k.add(half * dim * SLOTS);
                for d in (0..dim).step_by(LANES) {
                    S::transpose_16(key.elements.add(2 * d), planes.row_bytes(), out.add(d * SLOTS));
                }
                v[half] = value.elements.cast_const().cast();
            }
        }
    }
    // To ask for what a cache has anyway costs less than to look whether there is anything to ask for.
    let next = next.unwrap_or([[k.cast_const().cast(); 2]; 2]);
    Slots { k: k.cast_const().cast(), v, dim, next }
}

/// Rows that are needed next, asked for a part at a time.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// Where K and V of sixteen slots begin, and of sixteen more; null where there are none.
    rows: [*const u8; 4],
    /// Bytes of each, and how many of them are asked for at a time.
    bytes: usize,
    step: usize,
    done: usize,
}

impl Default for Ahead {
    /// None.
    fn default() -> Ahead {
        Ahead { rows: [std::ptr::null(); 4], bytes: 0, step: 0, done: 0 }
    }
}

impl Ahead {
    /// 16 slots of a KV head, from a slot of a block on, or none, and as many more.
    pub fn new(planes: &Planes, kv_head: usize, halves: [Option<(BlockId, usize)>; 2]) -> Ahead {
        let mut rows = [std::ptr::null(); 4];
        for (i, (block, slot)) in halves.into_iter().flatten().enumerate() {
            // SAFETY: the block is one of the pool, as for `load`, and holds the slots.
            let [k, v] = unsafe { planes.rows(&[block], kv_head, slot) };
            (rows[2 * i], rows[2 * i + 1]) = (k.elements.cast_const(), v.elements.cast_const());
        }
        Ahead { rows, bytes: SLOTS * planes.row_bytes(), step: 0, done: 0 }
    }

    /// Where K of both halves begins, and V. The only one stands for both.
    pub fn halves(&self) -> Option<[[*const u8; 2]; 2]> {
        let [k, v, more_k, more_v] = self.rows;
        let both = |one: *const u8, more: *const u8| [one, if more.is_null() { one } else { more }];
        (!k.is_null()).then(|| [both(k, more_k), both(v, more_v)])
    }

    /// They are asked for in so many parts.
    #[inline(always)]
    pub fn share(&mut self, parts: usize) {
        self.step = self.bytes.div_ceil(parts.max(1)).next_multiple_of(LINE);
    }

    /// Asks for the next part.
    #[inline(always)]
    pub fn fetch(&mut self) {
        let end = self.bytes.min(self.done + self.step);
        for row in self.rows {
            if !row.is_null() {
                for at in (self.done..end).step_by(LINE) {
                    prefetch(row.wrapping_add(at));
                }
            }
        }
        self.done = end;
    }
}
