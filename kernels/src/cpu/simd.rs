//! Vector arithmetic with three instantiations: AVX2 + FMA + F16C, AVX-512 with VNNI, and portable Rust.
//!
//! Every CPU kernel but the products of many rows with AVX-512 (`strips`) is written once over [`Simd`]. All instantiations do the same operations on an element in the same order
//! and round in the same places (the portable one uses fused `mul_add`), so they give the same bits (I1), and a worker without
//! AVX2 can stand in for one that has it. What mixes lanes is done on eight of them everywhere; where lanes stay apart, a kernel
//! may take sixteen ([`Simd::Wide`]), one register with AVX-512 and two elsewhere. All methods are unsafe because those of
//! instruction sets need the CPU to have the features; the safe dispatch is in [`super::isa`].

use half::{bf16, f16};

/// Rows of a weight panel and lanes of a narrow vector.
pub const LANES: usize = 8;

/// Lane-wise f32 arithmetic.
///
/// # Safety
/// Callers of any method must run on a CPU with the instantiation's features, and pointers must be valid for the lanes read
/// or written. There is no alignment requirement.
pub unsafe trait Floats: Copy + 'static {
    /// `COUNT` f32.
    type F: Copy;
    /// Lanes.
    const COUNT: usize;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `b` unless `a` is larger.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `b` unless `a` is smaller.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// 2 to the power of integers in [-126, 127].
    unsafe fn exp2i(n: Self::F) -> Self::F;
    /// Whether any lane of `a` is larger than that of `b`.
    unsafe fn any_larger(a: Self::F, b: Self::F) -> bool;
    /// Lanes `low..high` of `a`, the others replaced by `other`.
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F;
}

/// Eight f32 lanes, and what mixes or converts them.
///
/// # Safety
/// As for [`Floats`].
pub unsafe trait Simd: Floats {
    /// Sixteen lanes.
    type Wide: Floats;
    /// Vector registers, which say how much a kernel takes together.
    const REGISTERS: usize;

    unsafe fn join(low: Self::F, high: Self::F) -> Wide<Self>;
    unsafe fn split(x: Wide<Self>) -> [Self::F; 2];
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    /// Sixteen of them.
    #[inline(always)]
    unsafe fn wide_f16(p: *const f16) -> Wide<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::join(Self::load_f16(p), Self::load_f16(p.add(LANES))) }
    }
    /// Sixteen of them.
    #[inline(always)]
    unsafe fn wide_bf16(p: *const bf16) -> Wide<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::join(Self::load_bf16(p), Self::load_bf16(p.add(LANES))) }
    }
    unsafe fn store_f16(p: *mut f16, x: Self::F);
    unsafe fn store_bf16(p: *mut bf16, x: Self::F);
    unsafe fn abs(a: Self::F) -> Self::F;
    /// Sum of lanes in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
    unsafe fn sum(a: Self::F) -> f32;
    /// Largest lane; no lane is NaN.
    unsafe fn max_lane(a: Self::F) -> f32;
    /// Stores lanes (integers in [-128, 127]) as bytes.
    unsafe fn store_i8(p: *mut i8, x: Self::F);
    /// The same of four vectors.
    unsafe fn store_group_i8(p: *mut i8, x: [Self::F; 4]);
    /// Rows become columns.
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES];
    /// Eight elements of 16 bits of each of sixteen rows, whose beginnings are `apart` bytes from each other, become eight columns of
    /// sixteen, one behind the other.
    unsafe fn transpose_16(rows: *const u8, apart: usize, out: *mut u16);
}

/// A vector of sixteen lanes.
pub type Wide<S> = <<S as Simd>::Wide as Floats>::F;

/// Two vectors as one, for instruction sets without wide registers.
#[derive(Clone, Copy)]
pub struct Twice<S>(std::marker::PhantomData<S>);

/// Methods of [`Twice`] on vectors alone.
macro_rules! twice {
    ($($name:ident($($arg:ident),*);)*) => {
        $(#[inline(always)]
        unsafe fn $name($($arg: Self::F),*) -> Self::F {
            // SAFETY: the caller's promise.
            unsafe { [S::$name($($arg[0]),*), S::$name($($arg[1]),*)] }
        })*
    };
}

// SAFETY: passes its callers' promises on.
unsafe impl<S: Floats> Floats for Twice<S> {
    type F = [S::F; 2];
    const COUNT: usize = 2 * S::COUNT;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { [S::splat(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { [S::load(p), S::load(p.add(S::COUNT))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the caller's promise.
        unsafe {
            S::store(p, x[0]);
            S::store(p.add(S::COUNT), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn any_larger(a: Self::F, b: Self::F) -> bool {
        // SAFETY: the caller's promise.
        unsafe { S::any_larger(a[0], b[0]) || S::any_larger(a[1], b[1]) }
    }
    #[inline(always)]
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F {
        let count = S::COUNT;
        // SAFETY: the caller's promise.
        unsafe {
            [
                S::select_range(a[0], low.min(count), high.min(count), other),
                S::select_range(a[1], low.max(count) - count, high.max(count) - count, other),
            ]
        }
    }
    twice! {
        add(a, b);
        sub(a, b);
        mul(a, b);
        div(a, b);
        fma(a, b, c);
        max(a, b);
        min(a, b);
        round(a);
        exp2i(n);
    }
}

/// Asks for the 64 bytes around an address, which are read soon. Nothing is read, so any address will do.
#[inline(always)]
pub fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, valid for any address; all x86-64 have it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// e to the power of each lane, within 2 units in the last place on [-87, 88]; arguments outside are clamped.
/// Cody-Waite reduction and a degree-6 polynomial.
#[inline(always)]
pub unsafe fn exp<S: Floats>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the CPU features; no memory is touched.
    unsafe {
        let x = S::max(S::min(x, S::splat(88.0)), S::splat(-87.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::mul(p, S::exp2i(n))
    }
}
