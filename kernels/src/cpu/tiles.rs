//! Tiles of a matrix product: `T` rows of activations times the panels that are taken side by side.
//!
//! An output element is one chain of fused multiply-adds over k in ascending order, whatever the tile (I1). For quantised
//! weights the dot product inside a group of 32 is exact in integers, and one or two fused multiply-adds per group apply the
//! scales; of a super-block, the sums of its groups times their small scales are integers, too, and scales are applied once. Per group and vector
//! of outputs, with AVX-512: 8 dot products, a conversion, a product of scales and one or two fused multiply-adds a row, beside 10 to 40 instructions that unpack the weights for all rows of the tile.
//!
//! Bytes moved: a panel's weights once for the rows of the tile, and those rows once for the panels beside each other, from the nearest
//! cache. Bound: with one row the weights' way from memory; from about eight on, the dot products.

use half::f16;

use super::dots::{Dots, Outputs, Panels, load, splat};
use super::element::Element;
use super::packing::{Form, SUPER};
use super::simd::{Floats, LANES, prefetch};
use super::unpack::GROUP;

/// Operands of a product, as raw parts so that tasks on several threads can share them.
#[derive(Clone, Copy)]
pub struct Operands {
    pub rows: usize,
    pub x: *const f32,
    pub q: *const i8,
    pub scale: *const f32,
    pub minus_sum: *const f32,
    pub minus: *const i16,
    pub halves: *const i16,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only VNNI's products are of raised weights"))]
    pub raised: *const [i32; 3],
    pub bias: Option<*const f32>,
    pub out: *mut f32,
}

// SAFETY: tasks read the inputs and write disjoint columns of `out`.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

/// Where a tile is: its first row of activations, and elements of a row.
#[derive(Clone, Copy)]
pub struct At {
    /// First row.
    pub row: usize,
    /// Elements of a row.
    pub cols: usize,
}

/// The panels that come after those of a tile, fetched into the cache at the pace at which these are read: with many rows to a tile,
/// processors by themselves look too few bytes ahead.
#[derive(Clone, Copy)]
pub struct Next(Option<*const u8>);

impl Next {
    /// None are fetched.
    pub const NONE: Next = Next(None);

    /// Those from an address on, which may lie behind the last.
    pub fn at(panels: *const u8) -> Next {
        Next(Some(panels))
    }

    /// Fetches as many bytes as have been read.
    #[inline(always)]
    fn fetch(&mut self, bytes: usize) {
        const LINE: usize = 64;
        if let Some(at) = &mut self.0 {
            for line in 0..bytes.div_ceil(LINE) {
                prefetch(at.wrapping_add(line * LINE));
            }
            *at = at.wrapping_add(bytes);
        }
    }
}

/// Panels times rows `at.row..at.row + T`.
pub trait Tile<S: Dots> {
    /// The sums; `next` is fetched meanwhile.
    ///
    /// # Safety
    /// The panels hold units for `at.cols` weights of each output, the operands `at.row + T` rows of as many activations.
    unsafe fn tile<const T: usize>(w: Panels, x: &Operands, at: At, next: Next) -> [Outputs<S>; T];
}

/// Unsigned weights of 4 or 5 bits with a scale and a minimum, a group a unit.
pub struct Plain<const BITS: usize>;
/// The same in super-blocks.
pub struct Super<const BITS: usize>;
/// 6-bit weights in super-blocks.
pub struct U6Super;
/// Signed bytes.
pub struct I8;
/// Floats.
pub struct Dense<E>(std::marker::PhantomData<E>);

/// The tile's activations of group `g`.
#[inline(always)]
unsafe fn groups_of<const T: usize>(x: &Operands, at: At, g: usize) -> [*const i8; T] {
    let mut p = [x.q; T];
    for (t, p) in p.iter_mut().enumerate() {
        // SAFETY: inside the quantised rows.
        *p = unsafe { x.q.add((at.row + t) * at.cols + g * GROUP) };
    }
    p
}

/// The two sums of the half groups of the tile's group `g`.
#[inline(always)]
unsafe fn sums_of<const T: usize>(x: &Operands, at: At, g: usize) -> [*const i16; T] {
    let mut p = [x.halves; T];
    for (t, p) in p.iter_mut().enumerate() {
        // SAFETY: inside the quantised rows.
        *p = unsafe { x.halves.add(2 * ((at.row + t) * (at.cols / GROUP) + g)) };
    }
    p
}

/// Adds products of group `g` to `acc`: dot products times the scales of weights and activations.
#[inline(always)]
unsafe fn add_scaled<S: Dots, const T: usize>(
    acc: &mut [Outputs<S>; T],
    dot: [S::I; T],
    scale: Outputs<S>,
    x: &Operands,
    (at, g): (At, usize),
) {
    // SAFETY: inside the quantised rows.
    unsafe {
        for t in 0..T {
            let s = S::Outputs::mul(scale, splat::<S>(*x.scale.add((at.row + t) * (at.cols / GROUP) + g)));
            acc[t] = S::Outputs::fma(S::to_f32(dot[t]), s, acc[t]);
        }
    }
}

/// Adds a group's products, of weights `scale · q - min`, to `acc`.
#[inline(always)]
unsafe fn add_group<S: Dots, const BITS: usize, const T: usize>(
    acc: &mut [Outputs<S>; T],
    w: Panels,
    (scale, min): (Outputs<S>, Outputs<S>),
    x: &Operands,
    (at, g): (At, usize),
) {
    // SAFETY: the caller's promise: a group of weights at `w`, the tile's rows of activations.
    unsafe {
        let activations = groups_of::<T>(x, at, g);
        let dot = if BITS == 4 { S::dot_u4::<T>(w, activations) } else { S::dot_u5::<T>(w, activations) };
        add_scaled::<S, T>(acc, dot, scale, x, (at, g));
        for t in 0..T {
            let sum = splat::<S>(*x.minus_sum.add((at.row + t) * (at.cols / GROUP) + g));
            acc[t] = S::Outputs::fma(min, sum, acc[t]);
        }
    }
}

/// Adds products of super-block `u` to `acc`: its sums times the scale of the weights, the sums of its minima times theirs, if it has any, and
/// both times the scale of the activations.
#[inline(always)]
unsafe fn add_super<S: Dots, const T: usize>(
    acc: &mut [Outputs<S>; T],
    (sums, d): ([S::I; T], Outputs<S>),
    minima: Option<([S::I; T], Outputs<S>)>,
    x: &Operands,
    (at, u): (At, usize),
) {
    // SAFETY: inside the quantised rows.
    unsafe {
        for t in 0..T {
            let mut sum = S::Outputs::mul(S::to_f32(sums[t]), d);
            if let Some((minima, dmin)) = minima {
                sum = S::Outputs::fma(S::to_f32(minima[t]), dmin, sum);
            }
            let scale = splat::<S>(*x.scale.add((at.row + t) * (at.cols / (SUPER * GROUP)) + u));
            acc[t] = S::Outputs::fma(sum, scale, acc[t]);
        }
    }
}

const fn plain(bits: usize) -> Form {
    if bits == 4 { Form::U4 } else { Form::U5 }
}

const fn in_super(bits: usize) -> Form {
    if bits == 4 { Form::U4Super } else { Form::U5Super }
}

impl<S: Dots, const BITS: usize> Tile<S> for Plain<BITS> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panels: Panels, x: &Operands, at: At, mut next: Next) -> [Outputs<S>; T] {
        let form = const { plain(BITS) };
        // SAFETY: the panels hold a unit for each group, the operands the rows.
        unsafe {
            let mut acc = [splat::<S>(0.0); T];
            for g in 0..at.cols / GROUP {
                next.fetch(S::PANELS * form.unit_bytes());
                let w = panels.add(g * form.unit_bytes());
                let scales = w.add(form.weight_bytes());
                let scale = (load::<S, f16>(scales), load::<S, f16>(scales.add(2 * LANES)));
                add_group::<S, BITS, T>(&mut acc, w, scale, x, (at, g));
            }
            acc
        }
    }
}

impl<S: Dots, const BITS: usize> Tile<S> for Super<BITS> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panels: Panels, x: &Operands, at: At, mut next: Next) -> [Outputs<S>; T] {
        let form = const { in_super(BITS) };
        // SAFETY: the panels hold a unit for each super-block, the operands the rows.
        unsafe {
            let mut acc = [splat::<S>(0.0); T];
            for u in 0..at.cols / (SUPER * GROUP) {
                let unit = panels.add(u * form.unit_bytes());
                let (d, dmin) = (load::<S, f16>(unit), load::<S, f16>(unit.add(2 * LANES)));
                let group = |g: usize| unit.add(form.header_bytes() + g * form.group_bytes());
                let mut sums = [S::zero(); T];
                for g in 0..SUPER {
                    next.fetch(S::PANELS * form.group_bytes());
                    let (w, activations) = (group(g), groups_of::<T>(x, at, u * SUPER + g));
                    let dot = if BITS == 4 { S::dot_u4::<T>(w, activations) } else { S::dot_u5::<T>(w, activations) };
                    let scale = S::bytes(w.add(form.weight_bytes()));
                    for t in 0..T {
                        sums[t] = S::mul_add(dot[t], scale, sums[t]);
                    }
                }
                let mut minima = [S::zero(); T];
                for g in (0..SUPER).step_by(2) {
                    let of = |g: usize| group(g).add(form.weight_bytes() + LANES);
                    let pairs = S::pairs(of(g), of(g + 1));
                    for t in 0..T {
                        let minus = x.minus.add((at.row + t) * (at.cols / GROUP) + u * SUPER + g);
                        minima[t] = S::add_pairs(minima[t], pairs, minus);
                    }
                }
                add_super::<S, T>(&mut acc, (sums, d), Some((minima, dmin)), x, (at, u));
            }
            acc
        }
    }
}

impl<S: Dots> Tile<S> for U6Super {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panels: Panels, x: &Operands, at: At, mut next: Next) -> [Outputs<S>; T] {
        let form = Form::U6Super;
        // SAFETY: as above.
        unsafe {
            let mut acc = [splat::<S>(0.0); T];
            for u in 0..at.cols / (SUPER * GROUP) {
                let unit = panels.add(u * form.unit_bytes());
                let d = load::<S, f16>(unit);
                let mut sums = [S::zero(); T];
                for group in 0..SUPER {
                    next.fetch(S::PANELS * form.group_bytes());
                    let w = unit.add(form.header_bytes() + group * form.group_bytes());
                    let g = u * SUPER + group;
                    let dot = S::dot_u6::<T>(w, groups_of::<T>(x, at, g), sums_of::<T>(x, at, g));
                    for t in 0..T {
                        sums[t] = S::plus(sums[t], dot[t]);
                    }
                }
                add_super::<S, T>(&mut acc, (sums, d), None, x, (at, u));
            }
            acc
        }
    }
}

impl<S: Dots> Tile<S> for I8 {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panels: Panels, x: &Operands, at: At, mut next: Next) -> [Outputs<S>; T] {
        let form = Form::I8;
        // SAFETY: as above.
        unsafe {
            let mut acc = [splat::<S>(0.0); T];
            for g in 0..at.cols / GROUP {
                next.fetch(S::PANELS * form.unit_bytes());
                let w = panels.add(g * form.unit_bytes());
                let dot = S::dot_i8::<T>(w, groups_of::<T>(x, at, g), sums_of::<T>(x, at, g));
                add_scaled::<S, T>(&mut acc, dot, load::<S, f16>(w.add(form.weight_bytes())), x, (at, g));
            }
            acc
        }
    }
}

impl<S: Dots, E: Element> Tile<S> for Dense<E> {
    #[inline(always)]
    unsafe fn tile<const T: usize>(panels: Panels, x: &Operands, at: At, _: Next) -> [Outputs<S>; T] {
        // SAFETY: the panels hold `cols` units of eight elements, the operands the rows.
        unsafe {
            let mut acc = [splat::<S>(0.0); T];
            for k in 0..at.cols {
                let w = load::<S, E>(panels.add(k * LANES * size_of::<E>()));
                for t in 0..T {
                    acc[t] = S::Outputs::fma(w, splat::<S>(*x.x.add((at.row + t) * at.cols + k)), acc[t]);
                }
            }
            acc
        }
    }
}
