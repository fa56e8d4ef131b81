//! [`Dots`] with AVX-512 VNNI: one instruction multiplies 64 pairs of bytes and sums them by fours into 32 bits.
//!
//! Plain loops instead of `map`: a closure that is not inlined is compiled without the CPU's features.

use std::arch::x86_64::*;

use super::super::avx512::{Avx512, Vnni};
use super::super::simd::Simd;
use super::{Dots, Panels};

/// 32 bytes of each panel from `at` on.
///
/// # Safety
/// They are readable, and the CPU has AVX-512.
#[inline(always)]
unsafe fn bytes(w: Panels, at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let first = w.first.add(at);
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
        _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(first.add(w.apart).cast()))
    }
}

/// The low and high weights of vector `i`, nibbles alone.
///
/// # Safety
/// 128 bytes of each panel are readable, and the CPU has AVX-512.
#[inline(always)]
unsafe fn nibbles(w: Panels, i: usize) -> (__m512i, __m512i) {
    // SAFETY: the caller's promise.
    unsafe {
        let packed = bytes(w, 32 * i);
        let mask = _mm512_set1_epi8(15);
        (_mm512_and_si512(packed, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(packed), mask))
    }
}

/// Moves bits to higher places by `by`, or to lower ones where `by` is negative, in 16-bit lanes.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(in crate::cpu) unsafe fn moved(x: __m512i, by: i32) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        match by {
            0 => x,
            1.. => _mm512_sll_epi16(x, _mm_cvtsi32_si128(by)),
            _ => _mm512_srl_epi16(x, _mm_cvtsi32_si128(-by)),
        }
    }
}

/// `x`, and the bits of `y` under a mask.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(in crate::cpu) unsafe fn with_bits(x: __m512i, y: __m512i, mask: i8) -> __m512i {
    // SAFETY: the caller's promise. 0xf8 is x | (y & mask).
    unsafe { _mm512_ternarylogic_epi64::<0xf8>(x, y, _mm512_set1_epi8(mask)) }
}

/// The low and high 5-bit weights of vector `i`; `fifth` holds the fifth bits.
///
/// # Safety
/// As for [`nibbles`].
#[inline(always)]
unsafe fn u5(w: Panels, fifth: __m512i, i: usize) -> (__m512i, __m512i) {
    // SAFETY: the caller's promise. What crosses a byte is masked off.
    unsafe {
        let (low, high) = nibbles(w, i);
        (with_bits(low, moved(fifth, 4 - i as i32), 16), with_bits(high, moved(fifth, -(i as i32)), 16))
    }
}

/// The low and high 6-bit weights of vector `i`; `upper` holds the upper bits of low and high ones.
///
/// # Safety
/// As for [`nibbles`].
#[inline(always)]
unsafe fn u6(w: Panels, upper: [__m512i; 2], i: usize) -> (__m512i, __m512i) {
    // SAFETY: the caller's promise. What crosses a byte is masked off.
    unsafe {
        let (low, high) = nibbles(w, i);
        let by = 4 - 2 * i as i32;
        (with_bits(low, moved(upper[0], by), 0x30), with_bits(high, moved(upper[1], by), 0x30))
    }
}

/// Four activations from `4 * i` on, for every output.
///
/// # Safety
/// They are readable, and the CPU has AVX-512.
#[inline(always)]
unsafe fn word(a: *const i8, i: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_set1_epi32(a.cast::<i32>().add(i).read_unaligned()) }
}

/// Adds the products of words `i` and `4 + i` of each activation group with the low and the high weights of vector `i`.
///
/// # Safety
/// 32 bytes of each activation group are readable, and the CPU has AVX-512 VNNI.
#[inline(always)]
unsafe fn add_products<const T: usize>(
    acc: &mut [__m512i; T],
    (low, high): (__m512i, __m512i),
    a: [*const i8; T],
    i: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for t in 0..T {
            acc[t] = _mm512_dpbusd_epi32(acc[t], low, word(a[t], i));
        }
        for t in 0..T {
            acc[t] = _mm512_dpbusd_epi32(acc[t], high, word(a[t], 4 + i));
        }
    }
}

// SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller; all loads are the unaligned ones.
unsafe impl Dots for Vnni {
    type Outputs = Avx512;
    type I = __m512i;
    const PANELS: usize = 2;

    #[inline(always)]
    unsafe fn beside(first: __m256, second: __m256) -> __m512 {
        // SAFETY: see the impl block.
        unsafe { Vnni::join(first, second) }
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m512i) -> __m512 {
        // SAFETY: see the impl block.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: see the impl block.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn plus(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl block.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
        // SAFETY: see the impl block.
        unsafe { _mm512_add_epi32(_mm512_mullo_epi32(a, b), c) }
    }
    #[inline(always)]
    unsafe fn bytes(at: Panels) -> __m512i {
        // SAFETY: see the impl block; eight bytes of each panel are readable.
        unsafe {
            let (first, second) = (_mm_loadl_epi64(at.first.cast()), _mm_loadl_epi64(at.first.add(at.apart).cast()));
            _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(first, second))
        }
    }
    #[inline(always)]
    unsafe fn pairs(first: Panels, second: Panels) -> __m512i {
        // SAFETY: see the impl block; eight bytes of both, of each panel, are readable.
        unsafe {
            let low = _mm_loadl_epi64(first.first.cast());
            let low = _mm_unpacklo_epi8(low, _mm_loadl_epi64(second.first.cast()));
            let high = _mm_loadl_epi64(first.first.add(first.apart).cast());
            let high = _mm_unpacklo_epi8(high, _mm_loadl_epi64(second.first.add(second.apart).cast()));
            _mm512_cvtepu8_epi16(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high))
        }
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m512i, pairs: __m512i, by: *const i16) -> __m512i {
        // SAFETY: see the impl block; two numbers are readable.
        unsafe { _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(by.cast::<i32>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn dot_u4<const T: usize>(w: Panels, a: [*const i8; T]) -> [__m512i; T] {
        // SAFETY: see the impl block; 128 weight bytes and 32 bytes of each activation group are readable.
        unsafe {
            let mut acc = [_mm512_setzero_si512(); T];
            for i in 0..4 {
                add_products(&mut acc, nibbles(w, i), a, i);
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_u5<const T: usize>(w: Panels, a: [*const i8; T]) -> [__m512i; T] {
        // SAFETY: see the impl block; 160 weight bytes and 32 bytes of each activation group are readable.
        unsafe {
            let fifth = bytes(w, 128);
            let mut acc = [_mm512_setzero_si512(); T];
            for i in 0..4 {
                add_products(&mut acc, u5(w, fifth, i), a, i);
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_u6<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [__m512i; T] {
        // SAFETY: see the impl block; 208 weight bytes, 32 bytes and two sums of each activation group are readable.
        // The weights are raised by 32, which is taken off with the sums; all in 32 bits.
        unsafe {
            let upper = [bytes(w, 128), bytes(w, 160)];
            let scales = w.first.add(192);
            let low = _mm256_castsi128_si256(_mm_loadu_si128(scales.cast()));
            let pairs = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(scales.add(w.apart).cast()));
            let scales = _mm512_cvtepi8_epi16(pairs);
            let (mut low, mut high) = ([_mm512_setzero_si512(); T], [_mm512_setzero_si512(); T]);
            for i in 0..4 {
                let weights = u6(w, upper, i);
                for t in 0..T {
                    low[t] = _mm512_dpbusd_epi32(low[t], weights.0, word(a[t], i));
                    high[t] = _mm512_dpbusd_epi32(high[t], weights.1, word(a[t], 4 + i));
                }
            }
            let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(scales));
            let second = _mm512_srai_epi32::<16>(scales);
            let offset = _mm512_slli_epi16::<5>(scales);
            for t in 0..T {
                let sum = _mm512_set1_epi32(sums[t].cast::<i32>().read_unaligned());
                let scaled = _mm512_add_epi32(_mm512_mullo_epi32(low[t], first), _mm512_mullo_epi32(high[t], second));
                low[t] = _mm512_sub_epi32(scaled, _mm512_madd_epi16(offset, sum));
            }
            low
        }
    }
    #[inline(always)]
    unsafe fn dot_i8<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [__m512i; T] {
        // SAFETY: see the impl block; 256 weight bytes, 32 bytes and two sums of each activation group are readable.
        // The instruction multiplies unsigned by signed: 128 is added to each weight and taken off the sum, all in 32 bits.
        unsafe {
            let (sign, offset) = (_mm512_set1_epi8(-128), _mm512_set1_epi16(-128));
            let mut acc = [_mm512_setzero_si512(); T];
            for t in 0..T {
                acc[t] = _mm512_madd_epi16(offset, _mm512_set1_epi32(sums[t].cast::<i32>().read_unaligned()));
            }
            for i in 0..8 {
                let raised = _mm512_xor_si512(bytes(w, 32 * i), sign);
                for t in 0..T {
                    acc[t] = _mm512_dpbusd_epi32(acc[t], raised, word(a[t], i));
                }
            }
            acc
        }
    }
}
