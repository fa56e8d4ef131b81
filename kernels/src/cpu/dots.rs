//! The integer dot products of quantised weights, with the instantiations of [`super::simd`].
//!
//! A product's lanes are outputs. AVX-512 takes the panels of sixteen outputs side by side, the others one panel of eight; since
//! lanes never meet, and a group's dot product is exact in integers, the bits are the same (I1). Knows nothing of tiles, rows of
//! output or threads.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;
#[cfg(target_arch = "x86_64")]
pub(super) mod vnni;

use super::element::Element;
use super::simd::{Floats, Simd};

/// The same place in the panels that are taken side by side.
#[derive(Clone, Copy)]
pub struct Panels {
    /// In the first panel.
    pub first: *const u8,
    /// Bytes from there to the same place in the second one; 0 where there is none, or none is taken.
    pub apart: usize,
}

impl Panels {
    /// `bytes` further on.
    ///
    /// # Safety
    /// Still inside the panels.
    #[inline(always)]
    pub unsafe fn add(self, bytes: usize) -> Panels {
        // SAFETY: the caller's promise.
        Panels { first: unsafe { self.first.add(bytes) }, ..self }
    }
}

/// Dot products of the groups of panels with those of activation rows.
///
/// # Safety
/// As for [`Simd`].
pub unsafe trait Dots: Simd {
    /// One lane an output of the panels taken side by side.
    type Outputs: Floats;
    /// As many i32.
    type I: Copy;
    /// Panels side by side, 1 or 2.
    const PANELS: usize;

    /// Outputs of the first panel and of the second, which is left out where panels are taken one by one.
    unsafe fn beside(first: Self::F, second: Self::F) -> Outputs<Self>;
    /// Integers as f32.
    unsafe fn to_f32(x: Self::I) -> Outputs<Self>;
    /// No sum yet.
    unsafe fn zero() -> Self::I;
    /// `a + b` in 32 bits.
    unsafe fn plus(a: Self::I, b: Self::I) -> Self::I;
    /// `a · b + c` in 32 bits.
    unsafe fn mul_add(a: Self::I, b: Self::I, c: Self::I) -> Self::I;
    /// Eight unsigned bytes of each panel.
    unsafe fn bytes(at: Panels) -> Self::I;
    /// The same of two places, as pairs of 16 bits.
    unsafe fn pairs(first: Panels, second: Panels) -> Self::I;
    /// `sum`, and each pair times the two numbers at `by`, added.
    unsafe fn add_pairs(sum: Self::I, pairs: Self::I, by: *const i16) -> Self::I;
    /// Dot products of one group of 32 unsigned 4-bit weights of each output with `T` activation groups.
    /// `w`: 128 bytes a panel; the low nibbles of 32-byte vector i hold weights 4i..4i+4 of each row, the high nibbles
    /// 16+4i..16+4i+4.
    unsafe fn dot_u4<const T: usize>(w: Panels, a: [*const i8; T]) -> [Self::I; T];
    /// The same for 5-bit weights. `w`: the nibbles, then 32 bytes of fifth bits as [`super::packing`] lays them.
    unsafe fn dot_u5<const T: usize>(w: Panels, a: [*const i8; T]) -> [Self::I; T];
    /// The same for 6-bit weights raised by 32, each half group times its scale. `w`: the nibbles, 64 bytes of upper bits, 16 signed
    /// scales, two a row. `sums`: of the two half groups of each activation group.
    unsafe fn dot_u6<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [Self::I; T];
    /// The same for signed 8-bit weights. `w`: 256 bytes a panel; 32-byte vector i holds weights 4i..4i+4 of each row. `sums`: of the
    /// two half groups of each activation group.
    unsafe fn dot_i8<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [Self::I; T];
}

/// A vector of outputs.
pub type Outputs<S> = <<S as Dots>::Outputs as Floats>::F;

/// Eight elements of each panel, as outputs.
///
/// # Safety
/// They are readable, and the CPU has `S`'s features.
#[inline(always)]
pub unsafe fn load<S: Dots, E: Element>(at: Panels) -> Outputs<S> {
    // SAFETY: the caller's promise.
    unsafe { S::beside(E::load::<S>(at.first.cast()), E::load::<S>(at.first.add(at.apart).cast())) }
}

/// A number for every output.
///
/// # Safety
/// The CPU has `S`'s features.
#[inline(always)]
pub unsafe fn splat<S: Dots>(x: f32) -> Outputs<S> {
    // SAFETY: the caller's promise.
    unsafe { S::Outputs::splat(x) }
}
