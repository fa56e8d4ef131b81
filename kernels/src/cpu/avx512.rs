//! The instantiation of [`Simd`] with AVX-512: AVX2's eight lanes, and sixteen in one register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::Avx2;
use super::simd::{Floats, LANES, Simd};

/// AVX2, FMA, F16C, and AVX-512 with BW, VL and VNNI.
#[derive(Clone, Copy)]
pub struct Vnni;

/// Sixteen lanes of AVX-512.
#[derive(Clone, Copy)]
pub struct Avx512;

/// Methods that are one instruction on vectors alone.
macro_rules! instructions {
    ($($name:ident($($arg:ident),*) = $instruction:ident;)*) => {
        $(#[inline(always)]
        unsafe fn $name($($arg: __m512),*) -> __m512 {
            // SAFETY: see the impl block.
            unsafe { $instruction($($arg),*) }
        })*
    };
}

// SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller; all loads and stores used are
// the unaligned ones.
unsafe impl Floats for Avx512 {
    type F = __m512;
    const COUNT: usize = 2 * LANES;

    instructions! {
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see the impl block.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: see the impl block.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: see the impl block.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: see the impl block. No digits after the point.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2i(n: __m512) -> __m512 {
        // SAFETY: see the impl block.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn any_larger(a: __m512, b: __m512) -> bool {
        // SAFETY: see the impl block.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0 }
    }
    #[inline(always)]
    unsafe fn select_range(a: __m512, low: usize, high: usize, other: f32) -> __m512 {
        let keep = ((1u32 << high) - 1) & !((1u32 << low) - 1);
        // SAFETY: see the impl block.
        unsafe { _mm512_mask_blend_ps(keep as __mmask16, _mm512_set1_ps(other), a) }
    }
}

/// Methods that are AVX2's.
macro_rules! as_avx2 {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {
        $(#[inline(always)]
        unsafe fn $name($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the caller's promise is the same, and a CPU with AVX-512 has AVX2.
            unsafe { Avx2::$name($($arg),*) }
        })*
    };
}

// SAFETY: as above.
unsafe impl Floats for Vnni {
    type F = __m256;
    const COUNT: usize = LANES;

    as_avx2! {
        splat(x: f32) -> __m256;
        load(p: *const f32) -> __m256;
        store(p: *mut f32, x: __m256);
        add(a: __m256, b: __m256) -> __m256;
        sub(a: __m256, b: __m256) -> __m256;
        mul(a: __m256, b: __m256) -> __m256;
        div(a: __m256, b: __m256) -> __m256;
        fma(a: __m256, b: __m256, c: __m256) -> __m256;
        max(a: __m256, b: __m256) -> __m256;
        min(a: __m256, b: __m256) -> __m256;
        round(a: __m256) -> __m256;
        exp2i(n: __m256) -> __m256;
        any_larger(a: __m256, b: __m256) -> bool;
        select_range(a: __m256, low: usize, high: usize, other: f32) -> __m256;
    }
}

// SAFETY: as above.
unsafe impl Simd for Vnni {
    type Wide = Avx512;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn join(low: __m256, high: __m256) -> __m512 {
        // SAFETY: see the impl block.
        unsafe {
            let low = _mm512_castpd256_pd512(_mm256_castps_pd(low));
            _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_castps_pd(high)))
        }
    }
    #[inline(always)]
    unsafe fn split(x: __m512) -> [__m256; 2] {
        // SAFETY: see the impl block.
        unsafe {
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x));
            [_mm512_castps512_ps256(x), _mm256_castpd_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn wide_f16(p: *const f16) -> __m512 {
        // SAFETY: see the impl block.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn wide_bf16(p: *const bf16) -> __m512 {
        // SAFETY: see the impl block.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    as_avx2! {
        load_f16(p: *const f16) -> __m256;
        load_bf16(p: *const bf16) -> __m256;
        store_f16(p: *mut f16, x: __m256);
        store_bf16(p: *mut bf16, x: __m256);
        abs(a: __m256) -> __m256;
        sum(a: __m256) -> f32;
        max_lane(a: __m256) -> f32;
        store_i8(p: *mut i8, x: __m256);
        store_group_i8(p: *mut i8, x: [__m256; 4]);
        transpose(rows: [__m256; LANES]) -> [__m256; LANES];
        transpose_16(rows: *const u8, apart: usize, out: *mut u16);
    }
}
