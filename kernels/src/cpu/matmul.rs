//! Matrix products: `out[t][o] = Σ_k x[t][k] · w[o][k] (+ bias[o])`.
//!
//! One kernel serves one row (decode) and many (prefill): an output element is the same chain of fused multiply-adds over k
//! in ascending order either way (I1). For quantised weights, activations are rounded to 8 bits per group of 32, the dot
//! product inside a group is exact in integers, and one or two fused multiply-adds per group apply the scales.
//!
//! Bytes moved: the packed weights once per call, from memory; activations and outputs from cache. Bound: memory bandwidth
//! for few rows; for many, integer multiply-adds (about 18 vector instructions per 256 products and row, plus 12 to
//! unpack the group, shared by the `T` rows of a tile).

use half::{bf16, f16};

use super::isa::dispatch;
use super::simd::{LANES, Simd};
use super::unpack::GROUP;
use super::weight::{CpuWeight, Form};

/// Rows rounded to 8 bits: `x[t][k] ≈ scale[t][k / 32] · q[t][k]`, and `sum[t][g] = scale · Σ q` for weights with a minimum.
#[derive(Default)]
pub struct Quantised {
    pub q: Vec<i8>,
    pub scale: Vec<f32>,
    pub sum: Vec<f32>,
}

impl Quantised {
    /// Room for `elements` activations.
    pub fn with_capacity(elements: usize) -> Self {
        let groups = elements.div_ceil(GROUP);
        Quantised { q: vec![0; groups * GROUP], scale: vec![0.0; groups], sum: vec![0.0; groups] }
    }
}

/// Rounds `groups` groups of 32 starting at `x`.
#[inline(always)]
unsafe fn quantise_kernel<S: Simd>(_: S, x: *const f32, groups: usize, q: *mut i8, scale: *mut f32, sum: *mut f32) {
    // SAFETY: the caller gives `groups * 32` readable and as many writable elements.
    unsafe {
        for g in 0..groups {
            let x = x.add(g * GROUP);
            let v = [S::load(x), S::load(x.add(8)), S::load(x.add(16)), S::load(x.add(24))];
            let pair = (S::max(S::abs(v[0]), S::abs(v[1])), S::max(S::abs(v[2]), S::abs(v[3])));
            let largest = S::max_lane(S::max(pair.0, pair.1));
            // Below the least normal number's neighbourhood the inverse overflows; such a group counts as zero.
            let inverse = 127.0 / largest;
            let (largest, inverse) = if inverse.is_finite() { (largest, inverse) } else { (0.0, 0.0) };
            let mut total = S::splat(0.0);
            for (i, v) in v.into_iter().enumerate() {
                let rounded = S::round(S::mul(v, S::splat(inverse)));
                total = S::add(total, rounded);
                S::store_i8(q.add(g * GROUP + 8 * i), rounded);
            }
            *scale.add(g) = largest / 127.0;
            *sum.add(g) = largest / 127.0 * S::sum(total);
        }
    }
}

dispatch! {
    /// Rounds `groups` groups of 32 activations to 8 bits.
    pub unsafe fn quantise(x: *const f32, groups: usize, q: *mut i8, scale: *mut f32, sum: *mut f32) = quantise_kernel
}

/// Operands of a product, as raw parts so that tasks on several threads can share them.
#[derive(Clone, Copy)]
pub struct Operands {
    pub rows: usize,
    pub x: *const f32,
    pub q: *const i8,
    pub scale: *const f32,
    pub sum: *const f32,
    pub bias: Option<*const f32>,
    pub out: *mut f32,
}

// SAFETY: tasks read the inputs and write disjoint columns of `out`.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

/// Rows computed together per panel: as many as keep weights, accumulators and one activation in 16 registers.
const TILE: usize = 4;
const DENSE_TILE: usize = 8;

/// One panel times rows `first..first + T`.
trait PanelKernel<S: Simd> {
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T];
}

struct U4<const WIDE: bool>;
struct I8;
struct I8Two;
struct Dense<E>(std::marker::PhantomData<E>);

#[inline(always)]
unsafe fn group_pointers<const T: usize>(x: &Operands, first: usize, cols: usize, k: usize) -> [*const i8; T] {
    let mut p = [x.q; T];
    for (t, p) in p.iter_mut().enumerate() {
        // SAFETY: inside the quantised rows.
        *p = unsafe { x.q.add((first + t) * cols + k) };
    }
    p
}

impl<S: Simd, const WIDE: bool> PanelKernel<S> for U4<WIDE> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let groups = cols / GROUP;
        let unit = if WIDE { Form::U4Single } else { Form::U4Half }.unit_bytes();
        // SAFETY: the panel holds `groups` units, the operands `first + T` rows of `groups` groups.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for g in 0..groups {
                let w = panel.add(g * unit);
                let dot = S::dot_u4::<T>(w, group_pointers::<T>(x, first, cols, g * GROUP));
                let (scale, min) = if WIDE {
                    (S::load(w.add(128).cast()), S::load(w.add(160).cast()))
                } else {
                    (S::load_f16(w.add(128).cast()), S::load_f16(w.add(144).cast()))
                };
                for t in 0..T {
                    let at = (first + t) * groups + g;
                    let s = S::mul(scale, S::splat(*x.scale.add(at)));
                    acc[t] = S::fma(S::to_f32(dot[t]), s, acc[t]);
                    acc[t] = S::fma(min, S::splat(*x.sum.add(at)), acc[t]);
                }
            }
            acc
        }
    }
}

impl<S: Simd> PanelKernel<S> for I8 {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let groups = cols / GROUP;
        // SAFETY: as above.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for g in 0..groups {
                let w = panel.add(g * Form::I8Half.unit_bytes());
                let a = S::dot_i8::<T>(w.cast(), group_pointers::<T>(x, first, cols, g * GROUP));
                let b = S::dot_i8::<T>(w.add(128).cast(), group_pointers::<T>(x, first, cols, g * GROUP + 16));
                let scale = S::load_f16(w.add(256).cast());
                for t in 0..T {
                    let s = S::mul(scale, S::splat(*x.scale.add((first + t) * groups + g)));
                    acc[t] = S::fma(S::to_f32(S::add_i(a[t], b[t])), s, acc[t]);
                }
            }
            acc
        }
    }
}

impl<S: Simd> PanelKernel<S> for I8Two {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let groups = cols / GROUP;
        // SAFETY: as above.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for g in 0..groups {
                let w = panel.add(g * Form::I8Halves.unit_bytes());
                let a = S::dot_i8::<T>(w.cast(), group_pointers::<T>(x, first, cols, g * GROUP));
                let b = S::dot_i8::<T>(w.add(128).cast(), group_pointers::<T>(x, first, cols, g * GROUP + 16));
                let scale = [S::load(w.add(256).cast()), S::load(w.add(288).cast())];
                let min = S::load(w.add(320).cast());
                for t in 0..T {
                    let at = (first + t) * groups + g;
                    let s = S::splat(*x.scale.add(at));
                    acc[t] = S::fma(S::to_f32(a[t]), S::mul(scale[0], s), acc[t]);
                    acc[t] = S::fma(S::to_f32(b[t]), S::mul(scale[1], s), acc[t]);
                    acc[t] = S::fma(min, S::splat(*x.sum.add(at)), acc[t]);
                }
            }
            acc
        }
    }
}

/// An element type that loads as eight f32 lanes.
pub trait Element: Copy {
    /// Loads eight elements.
    ///
    /// # Safety
    /// Eight elements are readable at `p`, and the CPU has `S`'s features.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Stores eight elements, rounded to nearest.
    ///
    /// # Safety
    /// Eight elements are writable at `p`, and the CPU has `S`'s features.
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F);
}

macro_rules! element {
    ($ty:ty, $load:ident, $store:ident) => {
        impl Element for $ty {
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::F {
                // SAFETY: the caller's promise.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
                // SAFETY: the caller's promise.
                unsafe { S::$store(p, x) }
            }
        }
    };
}
element!(f32, load, store);
element!(f16, load_f16, store_f16);
element!(bf16, load_bf16, store_bf16);

impl<S: Simd, E: Element> PanelKernel<S> for Dense<E> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        // SAFETY: the panel holds `cols` units of eight elements, the operands `first + T` rows of `cols`.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            let panel = panel.cast::<E>();
            for k in 0..cols {
                let w = E::load::<S>(panel.add(k * LANES));
                for t in 0..T {
                    acc[t] = S::fma(w, S::splat(*x.x.add((first + t) * cols + k)), acc[t]);
                }
            }
            acc
        }
    }
}

/// Stores a tile's columns, without the padding of the last panel.
#[inline(always)]
unsafe fn store_tile<S: Simd, const T: usize>(acc: [S::F; T], x: &Operands, first: usize, panel: usize, rows: usize) {
    let column = panel * LANES;
    // SAFETY: columns `column..rows` of output rows `first..first + T` belong to this panel alone.
    unsafe {
        for (t, acc) in acc.into_iter().enumerate() {
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), acc);
            let count = LANES.min(rows - column);
            if let Some(bias) = x.bias {
                for (i, lane) in lanes[..count].iter_mut().enumerate() {
                    *lane += *bias.add(column + i);
                }
            }
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), x.out.add((first + t) * rows + column), count);
        }
    }
}

#[inline(always)]
unsafe fn panel_rows<S: Simd, K: PanelKernel<S>>(w: &CpuWeight, x: &Operands, p: usize, tile: usize) {
    // SAFETY: the caller's promise; the panel index is inside the weight.
    unsafe {
        let panel = w.data.as_ptr().add(p * w.panel_bytes());
        let mut first = 0;
        while first < x.rows {
            let left = (x.rows - first).min(tile);
            macro_rules! tile {
                ($t:literal) => {{
                    let acc = K::tile::<$t>(panel, w.cols, x, first);
                    store_tile::<S, $t>(acc, x, first, p, w.rows);
                    first += $t;
                }};
            }
            match left {
                8.. => tile!(8),
                4..8 => tile!(4),
                2..4 => tile!(2),
                _ => tile!(1),
            }
        }
    }
}

#[inline(always)]
unsafe fn panels_kernel<S: Simd>(_: S, w: &CpuWeight, x: &Operands, first: usize, last: usize) {
    for p in first..last {
        // SAFETY: the caller's promise.
        unsafe {
            match w.form {
                Form::U4Half => panel_rows::<S, U4<false>>(w, x, p, TILE),
                Form::U4Single => panel_rows::<S, U4<true>>(w, x, p, TILE),
                Form::I8Half => panel_rows::<S, I8>(w, x, p, TILE),
                Form::I8Halves => panel_rows::<S, I8Two>(w, x, p, TILE),
                Form::F32 => panel_rows::<S, Dense<f32>>(w, x, p, DENSE_TILE),
                Form::F16 => panel_rows::<S, Dense<f16>>(w, x, p, DENSE_TILE),
                Form::Bf16 => panel_rows::<S, Dense<bf16>>(w, x, p, DENSE_TILE),
            }
        }
    }
}

dispatch! {
    /// Panels `first..last` of the product.
    ///
    /// # Safety
    /// The operands hold `rows` rows of `w.cols` inputs (rounded ones for quantised weights) and room for
    /// `rows · w.rows` outputs; no other thread touches these panels' columns.
    pub unsafe fn panels(w: &CpuWeight, x: &Operands, first: usize, last: usize) = panels_kernel
}
