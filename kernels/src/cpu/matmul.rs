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
use super::packing::{Form, SUPER};
use super::simd::{LANES, Simd};
use super::unpack::GROUP;
use super::weight::CpuWeight;

/// Rows rounded to 8 bits: `x[t][k] ≈ scale[t][k / 32] · q[t][k]`; `minus_sum[t][g] = -scale · Σ q` for weights with a minimum, and
/// `halves[t][k / 16] = Σ q` for products that raise signed weights.
#[derive(Default)]
pub struct Quantised {
    pub q: Vec<i8>,
    pub scale: Vec<f32>,
    pub minus_sum: Vec<f32>,
    pub halves: Vec<i16>,
}

impl Quantised {
    /// Where rows are rounded to.
    pub fn rounded(&mut self) -> Rounded {
        Rounded {
            q: self.q.as_mut_ptr(),
            scale: self.scale.as_mut_ptr(),
            minus_sum: self.minus_sum.as_mut_ptr(),
            halves: self.halves.as_mut_ptr(),
        }
    }

    /// Room for `elements` activations.
    pub fn with_capacity(elements: usize) -> Self {
        let groups = elements.div_ceil(GROUP);
        Quantised {
            q: vec![0; groups * GROUP],
            scale: vec![0.0; groups],
            minus_sum: vec![0.0; groups],
            halves: vec![0; 2 * groups],
        }
    }
}

/// Where rounded groups go: pointers into a [`Quantised`].
#[derive(Clone, Copy)]
pub struct Rounded {
    q: *mut i8,
    scale: *mut f32,
    minus_sum: *mut f32,
    halves: *mut i16,
}

// SAFETY: tasks write disjoint groups.
unsafe impl Send for Rounded {}
// SAFETY: as above.
unsafe impl Sync for Rounded {}

impl Rounded {
    /// From group `first` on.
    ///
    /// # Safety
    /// The group is inside.
    pub unsafe fn from(self, first: usize) -> Rounded {
        // SAFETY: the caller's promise; a group has 32 elements and two halves.
        unsafe {
            Rounded {
                q: self.q.add(first * GROUP),
                scale: self.scale.add(first),
                minus_sum: self.minus_sum.add(first),
                halves: self.halves.add(2 * first),
            }
        }
    }
}

/// Rounds `groups` groups of 32 starting at `x`.
#[inline(always)]
unsafe fn quantise_kernel<S: Simd>(_: S, x: *const f32, groups: usize, out: Rounded) {
    // SAFETY: the caller gives `groups * 32` readable elements and room for as many.
    unsafe {
        for g in 0..groups {
            let x = x.add(g * GROUP);
            let v = [S::load(x), S::load(x.add(8)), S::load(x.add(16)), S::load(x.add(24))];
            let pair = (S::max(S::abs(v[0]), S::abs(v[1])), S::max(S::abs(v[2]), S::abs(v[3])));
            let largest = S::max_lane(S::max(pair.0, pair.1));
            // Below the least normal number's neighbourhood the inverse overflows; such a group counts as zero.
            let inverse = 127.0 / largest;
            let (largest, inverse) = if inverse.is_finite() { (largest, inverse) } else { (0.0, 0.0) };
            let mut halves = [S::splat(0.0); 2];
            for (i, v) in v.into_iter().enumerate() {
                let rounded = S::round(S::mul(v, S::splat(inverse)));
                halves[i / 2] = S::add(halves[i / 2], rounded);
                S::store_i8(out.q.add(g * GROUP + 8 * i), rounded);
            }
            // Sums of small integers: exact in any order.
            let halves = halves.map(|half| S::sum(half));
            *out.scale.add(g) = largest / 127.0;
            *out.minus_sum.add(g) = -largest / 127.0 * (halves[0] + halves[1]);
            *out.halves.add(2 * g) = halves[0] as i16;
            *out.halves.add(2 * g + 1) = halves[1] as i16;
        }
    }
}

dispatch! {
    /// Rounds `groups` groups of 32 activations to 8 bits.
    pub unsafe fn quantise(x: *const f32, groups: usize, out: Rounded) = quantise_kernel
}

/// Operands of a product, as raw parts so that tasks on several threads can share them.
#[derive(Clone, Copy)]
pub struct Operands {
    pub rows: usize,
    pub x: *const f32,
    pub q: *const i8,
    pub scale: *const f32,
    pub minus_sum: *const f32,
    pub halves: *const i16,
    pub bias: Option<*const f32>,
    pub out: *mut f32,
}

// SAFETY: tasks read the inputs and write disjoint columns of `out`.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

/// Rows of a dense product computed together: as many as keep weights and accumulators in 16 registers.
const DENSE_TILE: usize = 8;

/// One panel times rows `first..first + T`.
trait PanelKernel<S: Simd> {
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T];
}

/// Unsigned weights of 4 or 5 bits with a scale and a minimum, a group a unit.
struct Plain<const BITS: usize>;
/// The same in super-blocks.
struct Super<const BITS: usize>;
/// 6-bit weights in super-blocks.
struct U6Super;
/// Signed bytes.
struct I8;
struct Dense<E>(std::marker::PhantomData<E>);

/// Row `first + t`'s activations of group `g`.
#[inline(always)]
unsafe fn groups_of<const T: usize>(x: &Operands, first: usize, cols: usize, g: usize) -> [*const i8; T] {
    let mut p = [x.q; T];
    for (t, p) in p.iter_mut().enumerate() {
        // SAFETY: inside the quantised rows.
        *p = unsafe { x.q.add((first + t) * cols + g * GROUP) };
    }
    p
}

/// The two sums of row `first + t`'s half groups of group `g`.
#[inline(always)]
unsafe fn sums_of<const T: usize>(x: &Operands, first: usize, cols: usize, g: usize) -> [*const i16; T] {
    let mut p = [x.halves; T];
    for (t, p) in p.iter_mut().enumerate() {
        // SAFETY: inside the quantised rows.
        *p = unsafe { x.halves.add(2 * ((first + t) * (cols / GROUP) + g)) };
    }
    p
}

/// Adds a group's products, of weights `scale · q - min`, to `acc`.
#[inline(always)]
unsafe fn add_group<S: Simd, const BITS: usize, const T: usize>(
    acc: &mut [S::F; T],
    w: *const u8,
    (scale, min): (S::F, S::F),
    x: &Operands,
    (first, cols, g): (usize, usize, usize),
) {
    // SAFETY: the caller's promise: a group of weights at `w`, `first + T` rows of activations.
    unsafe {
        let activations = groups_of::<T>(x, first, cols, g);
        let dot = if BITS == 4 { S::dot_u4::<T>(w, activations) } else { S::dot_u5::<T>(w, activations) };
        for t in 0..T {
            let at = (first + t) * (cols / GROUP) + g;
            let s = S::mul(scale, S::splat(*x.scale.add(at)));
            acc[t] = S::fma(S::to_f32(dot[t]), s, acc[t]);
            acc[t] = S::fma(min, S::splat(*x.minus_sum.add(at)), acc[t]);
        }
    }
}

const fn plain(bits: usize) -> Form {
    if bits == 4 { Form::U4 } else { Form::U5 }
}

const fn in_super(bits: usize) -> Form {
    if bits == 4 { Form::U4Super } else { Form::U5Super }
}

impl<S: Simd, const BITS: usize> PanelKernel<S> for Plain<BITS> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let form = const { plain(BITS) };
        // SAFETY: the panel holds a unit for each group, the operands `first + T` rows of them.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for g in 0..cols / GROUP {
                let w = panel.add(g * form.unit_bytes());
                let scales = w.add(form.weight_bytes());
                let scale = (S::load_f16(scales.cast()), S::load_f16(scales.add(2 * LANES).cast()));
                add_group::<S, BITS, T>(&mut acc, w, scale, x, (first, cols, g));
            }
            acc
        }
    }
}

impl<S: Simd, const BITS: usize> PanelKernel<S> for Super<BITS> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let form = const { in_super(BITS) };
        // SAFETY: the panel holds a unit for each super-block, the operands `first + T` rows of them.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for u in 0..cols / (SUPER * GROUP) {
                let unit = panel.add(u * form.unit_bytes());
                let (d, dmin) = (S::load_f16(unit.cast()), S::load_f16(unit.add(2 * LANES).cast()));
                for g in 0..SUPER {
                    let w = unit.add(form.header_bytes() + g * form.group_bytes());
                    let scales = w.add(form.weight_bytes());
                    // Halves times small integers: exact.
                    let scale = (S::mul(d, S::load_u8(scales)), S::mul(dmin, S::load_u8(scales.add(LANES))));
                    add_group::<S, BITS, T>(&mut acc, w, scale, x, (first, cols, u * SUPER + g));
                }
            }
            acc
        }
    }
}

impl<S: Simd> PanelKernel<S> for U6Super {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panel: *const u8, cols: usize, x: &Operands, first: usize) -> [S::F; T] {
        let (form, groups) = (Form::U6Super, cols / GROUP);
        // SAFETY: as above.
        unsafe {
            let mut acc = [S::splat(0.0); T];
            for u in 0..groups / SUPER {
                let unit = panel.add(u * form.unit_bytes());
                let d = S::load_f16(unit.cast());
                for g in 0..SUPER {
                    let w = unit.add(form.header_bytes() + g * form.group_bytes());
                    let at = u * SUPER + g;
                    let sums = sums_of::<T>(x, first, cols, at);
                    let dot = S::dot_u6::<T>(w, groups_of::<T>(x, first, cols, at), sums);
                    for t in 0..T {
                        let s = S::mul(d, S::splat(*x.scale.add((first + t) * groups + at)));
                        acc[t] = S::fma(S::to_f32(dot[t]), s, acc[t]);
                    }
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
                let w = panel.add(g * Form::I8.unit_bytes());
                let (q, sums) = (groups_of::<T>(x, first, cols, g), sums_of::<T>(x, first, cols, g));
                let a = S::dot_i8::<T>(w.cast(), q, sums.map(|sum| *sum));
                let b = S::dot_i8::<T>(w.add(128).cast(), q.map(|q| q.add(16)), sums.map(|sum| *sum.add(1)));
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

/// Bytes of panels that are taken together when rows are few: they stay in the second-level cache.
const TOGETHER: usize = 128 << 10;
/// Most rows that count as few.
const FEW: usize = 64;

/// Panels `first..last` times all rows. With few rows a tile goes over several panels before the next one does: output rows can be a
/// multiple of a cache's size apart, and more of them written in turn than a cache has ways would push each other out.
#[inline(always)]
unsafe fn panel_rows<S: Simd, K: PanelKernel<S>>(w: &CpuWeight, x: &Operands, first: usize, last: usize, tile: usize) {
    let together = if x.rows <= FEW { (TOGETHER / w.panel_bytes().max(1)).max(1) } else { 1 };
    for start in (first..last).step_by(together) {
        let end = last.min(start + together);
        let mut row = 0;
        while row < x.rows {
            let left = (x.rows - row).min(tile);
            macro_rules! tile {
                ($t:literal) => {{
                    for p in start..end {
                        // SAFETY: the caller's promise; the panel is inside the weight, the rows inside the operands.
                        unsafe {
                            let panel = w.data.as_ptr().add(p * w.panel_bytes());
                            let acc = K::tile::<$t>(panel, w.cols, x, row);
                            store_tile::<S, $t>(acc, x, row, p, w.rows);
                        }
                    }
                    row += $t;
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
    // SAFETY: the caller's promise.
    unsafe {
        match w.form {
            Form::U4 => panel_rows::<S, Plain<4>>(w, x, first, last, S::TILE),
            Form::U5 => panel_rows::<S, Plain<5>>(w, x, first, last, S::TILE),
            Form::I8 => panel_rows::<S, I8>(w, x, first, last, S::TILE),
            Form::U4Super => panel_rows::<S, Super<4>>(w, x, first, last, S::TILE),
            Form::U5Super => panel_rows::<S, Super<5>>(w, x, first, last, S::TILE),
            Form::U6Super => panel_rows::<S, U6Super>(w, x, first, last, S::TILE),
            Form::F32 => panel_rows::<S, Dense<f32>>(w, x, first, last, DENSE_TILE),
            Form::F16 => panel_rows::<S, Dense<f16>>(w, x, first, last, DENSE_TILE),
            Form::Bf16 => panel_rows::<S, Dense<bf16>>(w, x, first, last, DENSE_TILE),
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
