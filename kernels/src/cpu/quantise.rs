//! Activations rounded to 8 bits, once for all products of an input, and normed on the way where the layer starts with that.
//!
//! Bytes moved: the rows once (twice when normed), and a quarter of them out. Bound: in cache, by arithmetic: about 40 vector instructions per 32 elements.

use super::elementwise::{normed, rms_factor};
use super::isa::dispatch;
use super::simd::{LANES, Simd};
use super::unpack::GROUP;

/// Rows rounded to 8 bits: `x[t][k] ≈ scale[t][k / 32] · q[t][k]`; `minus_sum[t][g] = -scale · Σ q` for weights with a minimum, and
/// `halves[t][k / 16] = Σ q` for products that raise signed weights.
#[derive(Default)]
pub struct Quantised {
    /// Rows that were only normed, for products with floats.
    pub normed: Vec<f32>,
    pub q: Vec<i8>,
    pub scale: Vec<f32>,
    pub minus_sum: Vec<f32>,
    pub halves: Vec<i16>,
    /// Of each group, what undoes the raising of weights: `-32 · Σ q` of either half, and `-128 · Σ q` of both.
    pub raised: Vec<[i32; 3]>,
}

impl Quantised {
    /// Where rows are rounded to.
    pub fn rounded(&mut self) -> Rounded {
        Rounded {
            q: self.q.as_mut_ptr(),
            scale: self.scale.as_mut_ptr(),
            minus_sum: self.minus_sum.as_mut_ptr(),
            halves: self.halves.as_mut_ptr(),
            raised: self.raised.as_mut_ptr(),
        }
    }

    /// Room for `elements` activations.
    pub fn with_capacity(elements: usize) -> Self {
        let groups = elements.div_ceil(GROUP);
        Quantised {
            normed: vec![0.0; elements],
            q: vec![0; groups * GROUP],
            scale: vec![0.0; groups],
            minus_sum: vec![0.0; groups],
            halves: vec![0; 2 * groups],
            raised: vec![[0; 3]; groups],
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
    raised: *mut [i32; 3],
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
                raised: self.raised.add(first),
            }
        }
    }
}

/// Rounds group `g`, whose elements are `v`.
#[inline(always)]
unsafe fn round_group<S: Simd>(v: [S::F; GROUP / LANES], g: usize, out: Rounded) {
    // SAFETY: the caller gives room for the group.
    unsafe {
        let pair = (S::max(S::abs(v[0]), S::abs(v[1])), S::max(S::abs(v[2]), S::abs(v[3])));
        let largest = S::max_lane(S::max(pair.0, pair.1));
        // Below the least normal number's neighbourhood the inverse overflows; such a group counts as zero.
        let inverse = 127.0 / largest;
        let (largest, inverse) = if inverse.is_finite() { (largest, inverse) } else { (0.0, 0.0) };
        let mut halves = [S::splat(0.0); 2];
        for (i, v) in v.into_iter().enumerate() {
            let rounded = S::round(S::mul(v, S::splat(inverse)));
            halves[i / 2] = S::add(halves[i / 2], rounded);
            S::store_i8(out.q.add(g * GROUP + LANES * i), rounded);
        }
        // Sums of small integers: exact in any order.
        let halves = halves.map(|half| S::sum(half));
        *out.scale.add(g) = largest / 127.0;
        *out.minus_sum.add(g) = -largest / 127.0 * (halves[0] + halves[1]);
        let [first, second] = halves.map(|half| half as i32);
        *out.halves.add(2 * g) = first as i16;
        *out.halves.add(2 * g + 1) = second as i16;
        *out.raised.add(g) = [-32 * first, -32 * second, -128 * (first + second)];
    }
}

#[inline(always)]
unsafe fn quantise_kernel<S: Simd>(_: S, x: *const f32, groups: usize, out: Rounded) {
    // SAFETY: the caller gives `groups * 32` readable elements and room for as many.
    unsafe {
        for g in 0..groups {
            let at = |i| x.add(g * GROUP + LANES * i);
            round_group::<S>([S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3))], g, out);
        }
    }
}

dispatch! {
    /// Rounds `groups` groups of 32 activations to 8 bits.
    ///
    /// # Safety
    /// `x` is readable and `out` writable for as many.
    pub unsafe fn quantise(x: *const f32, groups: usize, out: Rounded) = quantise_kernel
}

#[inline(always)]
unsafe fn norm_quantise_kernel<S: Simd>(
    _: S,
    x: *const f32,
    weight: *const f32,
    eps: f32,
    groups: usize,
    out: Rounded,
) {
    // SAFETY: the caller gives `groups * 32` readable elements and weights, and room for as many.
    unsafe {
        let factor = rms_factor::<S>(x, eps, groups * GROUP);
        for g in 0..groups {
            let at = |i| normed::<S>(x.add(g * GROUP + LANES * i), factor, weight.add(g * GROUP + LANES * i));
            round_group::<S>([at(0), at(1), at(2), at(3)], g, out);
        }
    }
}

dispatch! {
    /// Norms a row of `groups` groups of 32 activations and rounds it to 8 bits; the bits are those of norming first and then rounding.
    ///
    /// # Safety
    /// `x` and `weight` are readable and `out` writable for as many.
    pub unsafe fn norm_quantise(
        x: *const f32,
        weight: *const f32,
        eps: f32,
        groups: usize,
        out: Rounded,
    ) = norm_quantise_kernel
}
