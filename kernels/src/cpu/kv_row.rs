//! Rows of K and V in the pool: where they lie, and how each KV type rounds and reads them.
//!
//! A row is the K or V of one token and head. It is rounded alone, with parameters of its own, so what is read back does not
//! depend on its neighbours, on the batch or on who stored it (I1).

use baton_types::{BlockId, KvDtype, KvLayout};
use half::f16;

use super::codes::{Codes, E4M3_MAX, E4M3_UNIT, to_e4m3};
use super::element::Element;
use super::simd::{LANES, Wide};

/// Most parameters of a row: scale and minimum of the groups of 512 elements.
pub const MAX_PARAMETERS: usize = 512 / KvDtype::INT4_GROUP * 2;

/// Where one layer's K and V lie.
#[derive(Clone, Copy)]
pub struct Planes {
    base: *mut u8,
    /// Bytes from one block to the next, from the K plane to the V plane, and from one head's slice to the next.
    block: usize,
    value: usize,
    head: usize,
    /// Bytes of a row's elements, and where the parameters of a slice begin.
    row: usize,
    parameters_at: usize,
    /// Parameters of a row.
    pub parameters: usize,
    block_size: usize,
    /// Elements of a row.
    pub head_dim: usize,
}

// SAFETY: tasks write disjoint slots and read only slots that nobody writes meanwhile.
unsafe impl Send for Planes {}
// SAFETY: as above.
unsafe impl Sync for Planes {}

/// A row; those of the following slots of its block come right behind it.
#[derive(Clone, Copy)]
pub struct Row {
    /// Its elements.
    pub elements: *mut u8,
    /// Its parameters, of no particular alignment.
    pub parameters: *mut f16,
}

impl Planes {
    /// The planes of a layer of a group; `base` is the K plane of its block 0.
    pub fn new(layout: &KvLayout, group: usize, base: *mut u8) -> Planes {
        let head_dim = layout.groups[group].head_dim as usize;
        Planes {
            base,
            block: layout.block_bytes(group),
            value: layout.plane_bytes(group),
            head: layout.head_bytes(group),
            row: layout.dtype.row_bytes(head_dim),
            parameters_at: layout.parameters_offset(group),
            parameters: layout.dtype.row_parameters(head_dim),
            block_size: layout.block_size as usize,
            head_dim,
        }
    }

    /// K and V of `position` of a KV head.
    ///
    /// # Safety
    /// The table names blocks of the pool and covers the position.
    #[inline(always)]
    pub unsafe fn rows(&self, table: &[BlockId], head: usize, position: usize) -> [Row; 2] {
        let block = table[position / self.block_size].0 as usize;
        let slot = position % self.block_size;
        // SAFETY: inside the block, by the layout's arithmetic; the block is the caller's promise.
        let row = |plane: usize| unsafe {
            let slice = self.base.add(block * self.block + plane * self.value + head * self.head);
            let parameters = slice.add(self.parameters_at + slot * self.parameters * size_of::<f16>());
            Row { elements: slice.add(slot * self.row), parameters: parameters.cast() }
        };
        [row(0), row(1)]
    }

    /// Bytes of a row's elements.
    pub fn row_bytes(&self) -> usize {
        self.row
    }
}

/// How rows of one KV type are read and written.
pub trait KvRow: Copy {
    /// What a widened parameter is multiplied by before [`KvRow::load`] gets it.
    const UNIT: f32 = 1.0;
    /// Whether elements are floats of 16 bits, which few queries read as they lie in the pool.
    const SIXTEEN_BITS: bool = false;
    /// Those floats; f32 for all other types.
    type Float: Element;

    /// Elements `d..d + 8` of a row.
    ///
    /// # Safety
    /// The row has elements up to `d + 8` and its parameters, and the CPU has `S`'s features.
    unsafe fn load<S: Codes>(elements: *const u8, parameters: *const f32, d: usize) -> S::F;

    /// Elements `d..d + 16`.
    ///
    /// # Safety
    /// As for [`KvRow::load`].
    #[inline(always)]
    unsafe fn load_wide<S: Codes>(elements: *const u8, parameters: *const f32, d: usize) -> Wide<S> {
        // SAFETY: the caller's promise.
        unsafe { S::join(Self::load::<S>(elements, parameters, d), Self::load::<S>(elements, parameters, d + LANES)) }
    }

    /// Rounds a row of `dim` elements, a multiple of 8.
    ///
    /// # Safety
    /// `x` has `dim` elements, the row is writable, and the CPU has `S`'s features.
    unsafe fn store<S: Codes>(row: Row, x: *const f32, dim: usize);
}

impl<E: Element> KvRow for E {
    const SIXTEEN_BITS: bool = size_of::<E>() == 2;
    type Float = E;

    #[inline(always)]
    unsafe fn load<S: Codes>(elements: *const u8, _: *const f32, d: usize) -> S::F {
        // SAFETY: the caller's promise; loads need no alignment.
        unsafe { E::load::<S>(elements.cast::<E>().add(d)) }
    }

    #[inline(always)]
    unsafe fn load_wide<S: Codes>(elements: *const u8, _: *const f32, d: usize) -> Wide<S> {
        // SAFETY: the caller's promise; loads need no alignment.
        unsafe { E::load_wide::<S>(elements.cast::<E>().add(d)) }
    }

    #[inline(always)]
    unsafe fn store<S: Codes>(row: Row, x: *const f32, dim: usize) {
        for d in (0..dim).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe { E::store::<S>(row.elements.cast::<E>().add(d), S::load(x.add(d))) }
        }
    }
}

/// [`KvDtype::Q8`].
#[derive(Clone, Copy)]
pub struct Q8;

/// [`KvDtype::Fp8`].
#[derive(Clone, Copy)]
pub struct Fp8;

/// [`KvDtype::Int4`].
#[derive(Clone, Copy)]
pub struct Int4;

/// Rounds a parameter, stores it, and says what a reader will see.
#[inline(always)]
unsafe fn store_parameter(at: *mut f16, x: f32) -> f32 {
    let x = f16::from_f32(x);
    // SAFETY: the row's parameters are writable.
    unsafe { at.write_unaligned(x) };
    x.to_f32()
}

/// 1 / scale, and 0 for a scale of 0: a row without a spread has the code 0 everywhere.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

/// Eight elements, those that are not finite replaced by the largest numbers. Their row gets parameters that are not
/// finite either: the fault is not hidden, and the instruction sets agree on it.
#[inline(always)]
unsafe fn finite<S: Codes>(x: *const f32) -> S::F {
    // SAFETY: x has eight elements.
    unsafe { clamp::<S>(S::load(x), f32::MIN, f32::MAX) }
}

/// Largest magnitude of a row.
#[inline(always)]
unsafe fn largest<S: Codes>(x: *const f32, dim: usize) -> f32 {
    // SAFETY: x has `dim` elements.
    unsafe {
        let mut largest = S::splat(0.0);
        for d in (0..dim).step_by(LANES) {
            largest = S::max(largest, S::abs(finite::<S>(x.add(d))));
        }
        S::max_lane(largest)
    }
}

/// `x` within `low..=high`; not a number becomes `high`, so that every conversion to a code is defined.
#[inline(always)]
unsafe fn clamp<S: Codes>(x: S::F, low: f32, high: f32) -> S::F {
    // SAFETY: the caller vouches for the CPU features; no memory is touched.
    unsafe { S::max(S::min(x, S::splat(high)), S::splat(low)) }
}

impl KvRow for Q8 {
    type Float = f32;

    #[inline(always)]
    unsafe fn load<S: Codes>(elements: *const u8, parameters: *const f32, d: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::mul(S::load_i8(elements.add(d)), S::splat(*parameters)) }
    }

    #[inline(always)]
    unsafe fn store<S: Codes>(row: Row, x: *const f32, dim: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = store_parameter(row.parameters, largest::<S>(x, dim) / 127.0);
            let inverse = S::splat(inverse(scale));
            for d in (0..dim).step_by(LANES) {
                let q = S::round(S::mul(S::load(x.add(d)), inverse));
                S::store_i8(row.elements.add(d).cast(), clamp::<S>(q, -127.0, 127.0));
            }
        }
    }
}

impl KvRow for Fp8 {
    const UNIT: f32 = E4M3_UNIT;
    type Float = f32;

    #[inline(always)]
    unsafe fn load<S: Codes>(elements: *const u8, parameters: *const f32, d: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::mul(S::load_e4m3(elements.add(d)), S::splat(*parameters)) }
    }

    /// Saturates: the rounded scale may leave the largest magnitude a little above 448.
    #[inline(always)]
    unsafe fn store<S: Codes>(row: Row, x: *const f32, dim: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = store_parameter(row.parameters, largest::<S>(x, dim) / E4M3_MAX);
            let inverse = S::splat(inverse(scale));
            let mut scaled = [0.0f32; LANES];
            for d in (0..dim).step_by(LANES) {
                let y = clamp::<S>(S::mul(S::load(x.add(d)), inverse), -E4M3_MAX, E4M3_MAX);
                S::store(scaled.as_mut_ptr(), y);
                row.elements.add(d).cast::<[u8; LANES]>().write(scaled.map(to_e4m3));
            }
        }
    }
}

impl KvRow for Int4 {
    type Float = f32;

    #[inline(always)]
    unsafe fn load<S: Codes>(elements: *const u8, parameters: *const f32, d: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            let group = parameters.add(d / KvDtype::INT4_GROUP * 2);
            S::fma(S::load_u4(elements.add(d / 2)), S::splat(*group), S::splat(*group.add(1)))
        }
    }

    #[inline(always)]
    unsafe fn store<S: Codes>(row: Row, x: *const f32, dim: usize) {
        for first in (0..dim).step_by(KvDtype::INT4_GROUP) {
            let octets = (dim - first).min(KvDtype::INT4_GROUP) / LANES;
            // SAFETY: the caller's promise; a group has two parameters.
            unsafe { store_int4_group::<S>(row, x.add(first), first, octets) }
        }
    }
}

/// The group of `octets * 8` elements that begins with element `first` of the row.
#[inline(always)]
unsafe fn store_int4_group<S: Codes>(row: Row, x: *const f32, first: usize, octets: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut low = finite::<S>(x);
        let mut high = low;
        for i in 1..octets {
            let x = finite::<S>(x.add(i * LANES));
            (low, high) = (S::min(low, x), S::max(high, x));
        }
        let low = -S::max_lane(S::sub(S::splat(0.0), low));
        let parameters = row.parameters.add(first / KvDtype::INT4_GROUP * 2);
        let scale = store_parameter(parameters, (S::max_lane(high) - low) / 15.0);
        let minimum = S::splat(store_parameter(parameters.add(1), low));
        let inverse = S::splat(inverse(scale));
        let mut codes = [0i8; LANES];
        for i in 0..octets {
            let q = S::round(S::mul(S::sub(S::load(x.add(i * LANES)), minimum), inverse));
            S::store_i8(codes.as_mut_ptr(), clamp::<S>(q, 0.0, 15.0));
            let word = codes.iter().rev().fold(0u32, |word, &code| word << 4 | code as u32);
            row.elements.add(first / 2 + i * 4).cast::<[u8; 4]>().write(word.to_le_bytes());
        }
    }
}
