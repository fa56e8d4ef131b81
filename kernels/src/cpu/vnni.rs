//! The third instantiation of [`Simd`]: AVX2's float arithmetic with AVX-512 VNNI's integer dot products, on vectors of 256 bits.
//!
//! One instruction sums four byte products into 32 bits, where AVX2 takes three. The dot products of a group are exact in integers
//! either way, so the bits are the same (I1). Plain loops instead of `map`: a closure that is not inlined is compiled without the CPU's
//! features.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::{Avx2, nibbles, u5, u6, word};
use super::simd::{LANES, Simd};

/// AVX2, FMA, F16C, AVX-512 VNNI and VL.
#[derive(Clone, Copy)]
pub struct Vnni;

/// Methods that are AVX2's.
macro_rules! as_avx2 {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {
        $(#[inline(always)]
        unsafe fn $name($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the caller's promise is the same, and a CPU with VNNI has AVX2.
            unsafe { Avx2::$name($($arg),*) }
        })*
    };
}

// SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller; all loads used are the
// unaligned ones.
unsafe impl Simd for Vnni {
    type F = __m256;
    type I = __m256i;
    // Thirty-two registers.
    const TILE: usize = 8;

    as_avx2! {
        splat(x: f32) -> __m256;
        load(p: *const f32) -> __m256;
        load_f16(p: *const f16) -> __m256;
        load_bf16(p: *const bf16) -> __m256;
        load_u8(p: *const u8) -> __m256;
        store(p: *mut f32, x: __m256);
        store_f16(p: *mut f16, x: __m256);
        store_bf16(p: *mut bf16, x: __m256);
        add(a: __m256, b: __m256) -> __m256;
        sub(a: __m256, b: __m256) -> __m256;
        mul(a: __m256, b: __m256) -> __m256;
        div(a: __m256, b: __m256) -> __m256;
        fma(a: __m256, b: __m256, c: __m256) -> __m256;
        max(a: __m256, b: __m256) -> __m256;
        min(a: __m256, b: __m256) -> __m256;
        abs(a: __m256) -> __m256;
        round(a: __m256) -> __m256;
        exp2i(n: __m256) -> __m256;
        sum(a: __m256) -> f32;
        max_lane(a: __m256) -> f32;
        select_range(a: __m256, low: usize, high: usize, other: f32) -> __m256;
        store_i8(p: *mut i8, x: __m256);
        to_f32(x: __m256i) -> __m256;
        add_i(a: __m256i, b: __m256i) -> __m256i;
        transpose(rows: [__m256; LANES]) -> [__m256; LANES];
    }

    #[inline(always)]
    unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 128 weight bytes and 32 bytes of each activation group are readable.
        unsafe { dot_unsigned::<4, T>(w, a) }
    }

    #[inline(always)]
    unsafe fn dot_u5<const T: usize>(w: *const u8, a: [*const i8; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 160 weight bytes and 32 bytes of each activation group are readable.
        unsafe { dot_unsigned::<5, T>(w, a) }
    }

    #[inline(always)]
    unsafe fn dot_u6<const T: usize>(w: *const u8, a: [*const i8; T], sums: [*const i16; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 208 weight bytes, 32 bytes and two sums of each activation group are readable.
        // The weights are raised by 32, which is taken off with the sums; all in 32 bits.
        unsafe {
            let scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(w.add(192).cast()));
            let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(scales));
            let second = _mm256_srai_epi32::<16>(scales);
            let (mut low, mut high) = ([_mm256_setzero_si256(); T], [_mm256_setzero_si256(); T]);
            for t in 0..T {
                low[t] = _mm256_set1_epi32(-32 * i32::from(*sums[t]));
                high[t] = _mm256_set1_epi32(-32 * i32::from(*sums[t].add(1)));
            }
            for i in 0..4 {
                let weights = u6(w, i);
                for t in 0..T {
                    low[t] = _mm256_dpbusd_epi32(low[t], weights.0, word(a[t], i));
                    high[t] = _mm256_dpbusd_epi32(high[t], weights.1, word(a[t], 4 + i));
                }
            }
            for t in 0..T {
                low[t] = _mm256_add_epi32(_mm256_mullo_epi32(low[t], first), _mm256_mullo_epi32(high[t], second));
            }
            low
        }
    }

    #[inline(always)]
    unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T], sums: [i16; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 128 weight bytes and 16 bytes of each activation half group are readable.
        // The instruction multiplies unsigned by signed: 128 is added to each weight and taken off the sum, all in 32 bits.
        unsafe {
            let sign = _mm256_set1_epi8(-128);
            let mut acc = [_mm256_setzero_si256(); T];
            for t in 0..T {
                acc[t] = _mm256_set1_epi32(-128 * i32::from(sums[t]));
            }
            for i in 0..4 {
                let raised = _mm256_xor_si256(_mm256_loadu_si256(w.add(32 * i).cast()), sign);
                for t in 0..T {
                    acc[t] = _mm256_dpbusd_epi32(acc[t], raised, word(a[t], i));
                }
            }
            acc
        }
    }
}

/// Dot products of a group of unsigned weights of 4 or 5 bits with `T` activation groups.
///
/// # Safety
/// The group's bytes and 32 bytes of each activation group are readable, and the CPU has VNNI.
#[inline(always)]
unsafe fn dot_unsigned<const BITS: usize, const T: usize>(w: *const u8, a: [*const i8; T]) -> [__m256i; T] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [_mm256_setzero_si256(); T];
        for i in 0..4 {
            let (low, high) = if BITS == 4 { nibbles(w, i) } else { u5(w, i) };
            for t in 0..T {
                acc[t] = _mm256_dpbusd_epi32(acc[t], low, word(a[t], i));
                acc[t] = _mm256_dpbusd_epi32(acc[t], high, word(a[t], 4 + i));
            }
        }
        acc
    }
}
