//! Activations rounded to 8 bits, once for all products of an input, and normed on the way where the layer starts with that.
//!
//! A span has one scale: a group of 32, or for weights in super-blocks eight of them. So the sums over a super-block stay integers, which
//! are exact however they are made (I1).
//!
//! Bytes moved: the rows once (twice when normed), and a quarter of them out. Bound: in cache, by arithmetic: about 60 vector
//! instructions per 32 elements. What is one number for a group, its largest element, scale and sums, is a lane of eight groups.

use super::elementwise::{normed, rms_factor};
use super::isa::dispatch;
use super::packing::SUPER;
use super::simd::{LANES, Simd};
use super::unpack::GROUP;
use crate::KernelError;
use crate::pages::Pages;

/// Which elements have a scale together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// A group.
    Group,
    /// The groups of a super-block.
    Super,
}

impl Span {
    /// Elements of a span.
    pub fn elements(self) -> usize {
        match self {
            Span::Group => GROUP,
            Span::Super => SUPER * GROUP,
        }
    }
}

/// Rows rounded to 8 bits: `x[t][k] ≈ scale[t][k / span] · q[t][k]`.
pub struct Quantised {
    pub q: Pages<i8>,
    pub scale: Pages<f32>,
    /// Of spans of a group, `-scale · Σ q`, for weights with a minimum.
    pub minus_sum: Pages<f32>,
    /// Of each group of longer spans, `-Σ q`, for the same.
    pub minus: Pages<i16>,
    /// `halves[t][k / 16] = Σ q`, for products that raise signed weights.
    pub halves: Pages<i16>,
    /// Of each group, what undoes the raising of weights: `-32 · Σ q` of either half, and `-128 · Σ q` of both.
    pub raised: Pages<[i32; 3]>,
}

impl Quantised {
    /// Where rows are rounded to.
    pub fn rounded(&mut self) -> Rounded {
        Rounded {
            q: self.q.as_mut_ptr(),
            scale: self.scale.as_mut_ptr(),
            minus_sum: self.minus_sum.as_mut_ptr(),
            minus: self.minus.as_mut_ptr(),
            halves: self.halves.as_mut_ptr(),
            raised: self.raised.as_mut_ptr(),
        }
    }

    /// Room for `elements` activations.
    pub fn with_capacity(elements: usize) -> Result<Self, KernelError> {
        let groups = elements.div_ceil(GROUP);
        Ok(Quantised {
            q: Pages::zeroed(groups * GROUP)?,
            scale: Pages::zeroed(groups)?,
            minus_sum: Pages::zeroed(groups)?,
            minus: Pages::zeroed(groups)?,
            halves: Pages::zeroed(2 * groups)?,
            raised: Pages::zeroed(groups)?,
        })
    }
}

/// Where rounded groups go: pointers into a [`Quantised`].
#[derive(Clone, Copy)]
pub struct Rounded {
    q: *mut i8,
    scale: *mut f32,
    minus_sum: *mut f32,
    minus: *mut i16,
    halves: *mut i16,
    raised: *mut [i32; 3],
}

// SAFETY: tasks write disjoint groups.
unsafe impl Send for Rounded {}
// SAFETY: as above.
unsafe impl Sync for Rounded {}

impl Rounded {
    /// From group `first` on, with which a span begins.
    ///
    /// # Safety
    /// The group is inside.
    pub unsafe fn from(self, first: usize, span: Span) -> Rounded {
        // SAFETY: the caller's promise; a group has 32 elements and two halves.
        unsafe {
            Rounded {
                q: self.q.add(first * GROUP),
                scale: self.scale.add(first * GROUP / span.elements()),
                minus_sum: self.minus_sum.add(first),
                minus: self.minus.add(first),
                halves: self.halves.add(2 * first),
                raised: self.raised.add(first),
            }
        }
    }
}

/// Rounds group `g`, a span, whose elements are `v`.
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
        let mut rounded = v;
        for (i, v) in rounded.iter_mut().enumerate() {
            *v = S::round(S::mul(*v, S::splat(inverse)));
            halves[i / 2] = S::add(halves[i / 2], *v);
        }
        S::store_group_i8(out.q.add(g * GROUP), rounded);
        // Sums of small integers: exact in any order.
        let halves = halves.map(|half| S::sum(half));
        *out.scale.add(g) = largest / 127.0;
        *out.minus_sum.add(g) = -largest / 127.0 * (halves[0] + halves[1]);
        store_sums(halves.map(|half| half as i32), g, out);
    }
}

/// Rounds eight groups from `g` on, whose elements are at `v`: each as a span, or all as one. The bits are those of [`round_group`]: the largest
/// element and sums of small integers are the same in any order.
#[inline(always)]
unsafe fn round_groups<S: Simd>(v: *const f32, g: usize, span: Span, out: Rounded) {
    const { assert!(LANES == SUPER) };
    // SAFETY: the caller gives the elements, and room for the groups.
    unsafe {
        let at = |group: usize, i: usize| S::load(v.add(group * GROUP + i * LANES));
        let mut largest = [S::splat(0.0); LANES];
        for i in 0..LANES {
            let pair = (S::max(S::abs(at(i, 0)), S::abs(at(i, 1))), S::max(S::abs(at(i, 2)), S::abs(at(i, 3))));
            largest[i] = S::max(pair.0, pair.1);
        }
        let columns = S::transpose(largest);
        let mut largest = columns[0];
        for column in &columns[1..] {
            largest = S::max(largest, *column);
        }
        if span == Span::Super {
            largest = S::splat(S::max_lane(largest));
        }
        let (mut top, mut inverse) = ([0.0f32; LANES], [0.0f32; LANES]);
        S::store(top.as_mut_ptr(), largest);
        S::store(inverse.as_mut_ptr(), S::div(S::splat(127.0), largest));
        for i in 0..LANES {
            if !inverse[i].is_finite() {
                (top[i], inverse[i]) = (0.0, 0.0);
            }
        }
        let mut halves = [[S::splat(0.0); LANES]; 2];
        for i in 0..LANES {
            let mut rounded = [S::splat(0.0); GROUP / LANES];
            for k in 0..GROUP / LANES {
                rounded[k] = S::round(S::mul(at(i, k), S::splat(inverse[i])));
            }
            S::store_group_i8(out.q.add((g + i) * GROUP), rounded);
            halves[0][i] = S::add(rounded[0], rounded[1]);
            halves[1][i] = S::add(rounded[2], rounded[3]);
        }
        let mut sums = [[0.0f32; LANES]; 2];
        for half in 0..2 {
            // From a positive zero on, so that nothing sums to a negative one.
            let mut sum = S::splat(0.0);
            for column in &S::transpose(halves[half]) {
                sum = S::add(sum, *column);
            }
            S::store(sums[half].as_mut_ptr(), sum);
        }
        let scale = S::div(S::load(top.as_ptr()), S::splat(127.0));
        let both = S::add(S::load(sums[0].as_ptr()), S::load(sums[1].as_ptr()));
        match span {
            Span::Group => {
                S::store(out.scale.add(g), scale);
                S::store(out.minus_sum.add(g), S::mul(S::mul(scale, S::splat(-1.0)), both));
            }
            Span::Super => *out.scale.add(g / SUPER) = top[0] / 127.0,
        }
        for i in 0..LANES {
            store_sums([sums[0][i] as i32, sums[1][i] as i32], g + i, out);
        }
    }
}

/// Stores what depends on the sums of the halves of group `g`.
#[inline(always)]
unsafe fn store_sums([first, second]: [i32; 2], g: usize, out: Rounded) {
    // SAFETY: the caller gives room for the group.
    unsafe {
        *out.halves.add(2 * g) = first as i16;
        *out.halves.add(2 * g + 1) = second as i16;
        *out.minus.add(g) = -(first + second) as i16;
        *out.raised.add(g) = [-32 * first, -32 * second, -128 * (first + second)];
    }
}

#[inline(always)]
unsafe fn quantise_kernel<S: Simd>(_: S, x: *const f32, groups: usize, span: Span, out: Rounded) {
    // SAFETY: the caller gives `groups * 32` readable elements and room for as many.
    unsafe {
        let eights = groups / LANES * LANES;
        for g in (0..eights).step_by(LANES) {
            round_groups::<S>(x.add(g * GROUP), g, span, out);
        }
        for g in eights..groups {
            let at = |i| x.add(g * GROUP + LANES * i);
            round_group::<S>([S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3))], g, out);
        }
    }
}

dispatch! {
    /// Rounds `groups` groups of 32 activations, whole spans, to 8 bits.
    ///
    /// # Safety
    /// `x` is readable and `out` writable for as many.
    pub unsafe fn quantise(x: *const f32, groups: usize, span: Span, out: Rounded) = quantise_kernel
}

#[inline(always)]
unsafe fn norm_quantise_kernel<S: Simd>(
    _: S,
    x: *const f32,
    weight: *const f32,
    eps: f32,
    groups: usize,
    span: Span,
    out: Rounded,
) {
    // SAFETY: the caller gives `groups * 32` readable elements and weights, and room for as many.
    unsafe {
        let factor = rms_factor::<S>(x, eps, groups * GROUP);
        let eights = groups / LANES * LANES;
        for g in (0..eights).step_by(LANES) {
            let mut row = [0.0f32; LANES * GROUP];
            for i in (0..LANES * GROUP).step_by(LANES) {
                let at = g * GROUP + i;
                S::store(row.as_mut_ptr().add(i), normed::<S>(x.add(at), factor, weight.add(at)));
            }
            round_groups::<S>(row.as_ptr(), g, span, out);
        }
        for g in eights..groups {
            let at = |i| normed::<S>(x.add(g * GROUP + LANES * i), factor, weight.add(g * GROUP + LANES * i));
            round_group::<S>([at(0), at(1), at(2), at(3)], g, out);
        }
    }
}

dispatch! {
    /// Norms a row of `groups` groups of 32 activations, whole spans, and rounds it to 8 bits; the bits are those of norming first and then rounding.
    ///
    /// # Safety
    /// `x` and `weight` are readable and `out` writable for as many.
    pub unsafe fn norm_quantise(
        x: *const f32,
        weight: *const f32,
        eps: f32,
        groups: usize,
        span: Span,
        out: Rounded,
    ) = norm_quantise_kernel
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    /// Groups of ordinary numbers, of zeros, of numbers too small to be scaled, and of one large element.
    fn row(groups: usize) -> Vec<f32> {
        let element = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 7.0;
        let mut row: Vec<f32> = (0..groups * GROUP).map(element).collect();
        row[GROUP..2 * GROUP].fill(0.0);
        row[2 * GROUP..3 * GROUP].fill(-1e-40);
        row[3 * GROUP + 5] = -1e30;
        row
    }

    #[test]
    fn groups_rounded_together_have_the_bits_of_each_alone() {
        const GROUPS: usize = 19;
        let (row, weight) = (row(GROUPS), [1.5; GROUPS * GROUP]);
        for isa in Isa::available() {
            let [mut together, mut alone, mut normed] =
                [(); 3].map(|()| Quantised::with_capacity(GROUPS * GROUP).unwrap());
            let mut normed_row = vec![0.0; GROUPS * GROUP];
            let mut apart = Quantised::with_capacity(GROUPS * GROUP).unwrap();
            // SAFETY: all have room for the groups; the instruction set is available.
            unsafe {
                quantise(isa, row.as_ptr(), GROUPS, Span::Group, together.rounded());
                norm_quantise(isa, row.as_ptr(), weight.as_ptr(), 1e-6, GROUPS, Span::Group, normed.rounded());
                let (x, w, out) = (row.as_ptr(), weight.as_ptr(), normed_row.as_mut_ptr());
                super::super::elementwise::rms_norm(isa, x, w, 1e-6, GROUPS * GROUP, out);
                for g in 0..GROUPS {
                    quantise(isa, row.as_ptr().add(g * GROUP), 1, Span::Group, alone.rounded().from(g, Span::Group));
                    let out = apart.rounded().from(g, Span::Group);
                    quantise(isa, normed_row.as_ptr().add(g * GROUP), 1, Span::Group, out);
                }
            }
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (what, [got, want]) in [("plain", [&together, &alone]), ("normed", [&normed, &apart])] {
                assert_eq!(got.q[..], want.q[..], "{what}, {}", isa.name());
                assert_eq!(bits(&got.scale), bits(&want.scale), "{what}, {}", isa.name());
                assert_eq!(bits(&got.minus_sum), bits(&want.minus_sum), "{what}, {}", isa.name());
                assert_eq!(
                    (&got.halves[..], &got.raised[..]),
                    (&want.halves[..], &want.raised[..]),
                    "{what}, {}",
                    isa.name()
                );
            }
            assert_eq!((together.q[0], together.scale[1], together.scale[2]), (-127, 0.0, 0.0));
            let half = |h: usize| together.q[h * 16..][..16].iter().map(|&q| i32::from(q)).sum::<i32>();
            assert_eq!(together.raised[0], [-32 * half(0), -32 * half(1), -128 * (half(0) + half(1))]);
        }
    }

    /// Spans of eight groups: a scale for all, from the largest element of all, and sums of each.
    #[test]
    fn a_super_block_has_one_scale() {
        const GROUPS: usize = 2 * SUPER;
        let (row, weight) = (row(GROUPS), [1.0; GROUPS * GROUP]);
        for isa in Isa::available() {
            let [mut plain, mut normed, mut apart] =
                [(); 3].map(|()| Quantised::with_capacity(GROUPS * GROUP).unwrap());
            let mut normed_row = vec![0.0; GROUPS * GROUP];
            // SAFETY: all have room for the groups; the instruction set is available.
            unsafe {
                quantise(isa, row.as_ptr(), GROUPS, Span::Super, plain.rounded());
                let (x, w, out) = (row.as_ptr(), weight.as_ptr(), normed_row.as_mut_ptr());
                norm_quantise(isa, x, w, 1e-6, GROUPS, Span::Super, normed.rounded());
                super::super::elementwise::rms_norm(isa, x, w, 1e-6, GROUPS * GROUP, out);
                quantise(isa, out, GROUPS, Span::Super, apart.rounded());
            }
            for (u, elements) in row.chunks(SUPER * GROUP).enumerate() {
                let largest = elements.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                assert_eq!(plain.scale[u], largest / 127.0, "{}", isa.name());
                for (k, x) in elements.iter().enumerate() {
                    let q = (x * (127.0 / largest)).round_ties_even() as i8;
                    assert_eq!(plain.q[u * SUPER * GROUP + k], q, "element {k} of {u}, {}", isa.name());
                }
            }
            for g in 0..GROUPS {
                let half = |h: usize| plain.q[h * 16..][..16].iter().map(|&q| i32::from(q)).sum::<i32>();
                let (first, second) = (half(2 * g), half(2 * g + 1));
                assert_eq!(i32::from(plain.minus[g]), -(first + second), "{}", isa.name());
                assert_eq!([plain.halves[2 * g], plain.halves[2 * g + 1]].map(i32::from), [first, second]);
                assert_eq!(plain.raised[g], [-32 * first, -32 * second, -128 * (first + second)]);
            }
            assert_eq!((&normed.q[..], &normed.scale[..]), (&apart.q[..], &apart.scale[..]), "{}", isa.name());
        }
    }
}
