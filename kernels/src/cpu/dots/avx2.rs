//! [`Dots`] with AVX2: products of bytes by pairs, in 16 bits, then summed in 32.

use std::arch::x86_64::*;

use super::super::avx2::Avx2;
use super::{Dots, Panels};

/// The low and high weights of vector `i`, nibbles alone.
///
/// # Safety
/// 128 bytes are readable at `w`, and the CPU has AVX2.
#[inline(always)]
unsafe fn nibbles(w: *const u8, i: usize) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise.
    unsafe {
        let packed = _mm256_loadu_si256(w.add(32 * i).cast());
        let mask = _mm256_set1_epi8(15);
        (_mm256_and_si256(packed, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask))
    }
}

/// The low and high 5-bit weights of vector `i`.
///
/// # Safety
/// 160 bytes are readable at `w`, and the CPU has AVX2.
#[inline(always)]
unsafe fn u5(w: *const u8, i: usize) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = nibbles(w, i);
        let bits = _mm256_loadu_si256(w.add(128).cast());
        let fifth = _mm256_set1_epi8(16);
        // Shifts of 16-bit lanes: what crosses a byte is masked off.
        let of_low = _mm256_and_si256(_mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - i as i32)), fifth);
        let of_high = _mm256_and_si256(_mm256_srl_epi16(bits, _mm_cvtsi32_si128(i as i32)), fifth);
        (_mm256_or_si256(low, of_low), _mm256_or_si256(high, of_high))
    }
}

/// The low and high 6-bit weights of vector `i`.
///
/// # Safety
/// 192 bytes are readable at `w`, and the CPU has AVX2.
#[inline(always)]
unsafe fn u6(w: *const u8, i: usize) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = nibbles(w, i);
        (_mm256_or_si256(low, upper_bits(w.add(128), i)), _mm256_or_si256(high, upper_bits(w.add(160), i)))
    }
}

/// Bits 2i and 2i + 1 of 32 bytes, as bits 4 and 5.
///
/// # Safety
/// They are readable at `p`, and the CPU has AVX2.
#[inline(always)]
unsafe fn upper_bits(p: *const u8, i: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_loadu_si256(p.cast());
        // Shifts of 16-bit lanes: what crosses a byte is masked off.
        let moved = match i {
            0 => _mm256_slli_epi16::<4>(bits),
            1 => _mm256_slli_epi16::<2>(bits),
            2 => bits,
            _ => _mm256_srli_epi16::<2>(bits),
        };
        _mm256_and_si256(moved, _mm256_set1_epi8(0x30))
    }
}

/// Four activations from `4 * i` on, in every lane.
///
/// # Safety
/// They are readable, and the CPU has AVX2.
#[inline(always)]
unsafe fn word(a: *const i8, i: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_set1_epi32(a.cast::<i32>().add(i).read_unaligned()) }
}

/// The scales of a 6-bit group as 16-bit pairs a lane: (first, second), (first, first), (second, second).
///
/// # Safety
/// 208 bytes are readable at `w`, and the CPU has AVX2.
#[inline(always)]
unsafe fn scale_pairs(w: *const u8) -> [__m256i; 3] {
    // SAFETY: the caller's promise.
    unsafe {
        let both = _mm256_cvtepi8_epi16(_mm_loadu_si128(w.add(192).cast()));
        let low = _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
        let first = _mm256_or_si256(low, _mm256_slli_epi32::<16>(both));
        let high = _mm256_srli_epi32::<16>(both);
        let second = _mm256_or_si256(high, _mm256_andnot_si256(_mm256_set1_epi32(0xffff), both));
        [both, first, second]
    }
}

// SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller; all loads are the unaligned ones.
unsafe impl Dots for Avx2 {
    type Outputs = Avx2;
    type I = __m256i;
    const PANELS: usize = 1;

    #[inline(always)]
    unsafe fn beside(first: __m256, _: __m256) -> __m256 {
        first
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m256i) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m256i {
        // SAFETY: see the impl block.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn plus(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see the impl block.
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256i, b: __m256i, c: __m256i) -> __m256i {
        // SAFETY: see the impl block.
        unsafe { _mm256_add_epi32(_mm256_mullo_epi32(a, b), c) }
    }
    #[inline(always)]
    unsafe fn bytes(at: Panels) -> __m256i {
        // SAFETY: see the impl block; eight bytes are readable.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.first.cast())) }
    }
    #[inline(always)]
    unsafe fn pairs(first: Panels, second: Panels) -> __m256i {
        // SAFETY: see the impl block; eight bytes of both are readable.
        unsafe {
            let (first, second) = (_mm_loadl_epi64(first.first.cast()), _mm_loadl_epi64(second.first.cast()));
            _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(first, second))
        }
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m256i, pairs: __m256i, by: *const i16) -> __m256i {
        // SAFETY: see the impl block; two numbers are readable.
        unsafe {
            let by = _mm256_set1_epi32(by.cast::<i32>().read_unaligned());
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, by))
        }
    }
    #[inline(always)]
    unsafe fn dot_u4<const T: usize>(w: Panels, a: [*const i8; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 128 weight bytes and 32 bytes of each activation group are readable.
        // No saturation: eight products of pairs, each at most 2 * 15 * 127, sum to 30,480 < 32,767.
        unsafe {
            let mut acc = [_mm256_setzero_si256(); T];
            for i in 0..4 {
                let (low, high) = nibbles(w.first, i);
                for t in 0..T {
                    let (x, y) = (word(a[t], i), word(a[t], 4 + i));
                    let pair = _mm256_add_epi16(_mm256_maddubs_epi16(low, x), _mm256_maddubs_epi16(high, y));
                    acc[t] = _mm256_add_epi16(acc[t], pair);
                }
            }
            let ones = _mm256_set1_epi16(1);
            for t in 0..T {
                acc[t] = _mm256_madd_epi16(acc[t], ones);
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_u5<const T: usize>(w: Panels, a: [*const i8; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 160 weight bytes and 32 bytes of each activation group are readable.
        // No saturation: four products of pairs, each at most 2 * 31 * 127, sum to 31,496 < 32,767.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut acc = [_mm256_setzero_si256(); T];
            for i in 0..2 {
                let (low, high) = (u5(w.first, 2 * i), u5(w.first, 2 * i + 1));
                for t in 0..T {
                    let first = _mm256_add_epi16(
                        _mm256_maddubs_epi16(low.0, word(a[t], 2 * i)),
                        _mm256_maddubs_epi16(low.1, word(a[t], 4 + 2 * i)),
                    );
                    let second = _mm256_add_epi16(
                        _mm256_maddubs_epi16(high.0, word(a[t], 2 * i + 1)),
                        _mm256_maddubs_epi16(high.1, word(a[t], 5 + 2 * i)),
                    );
                    let sum = _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
                    acc[t] = _mm256_add_epi32(acc[t], sum);
                }
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_u6<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 208 weight bytes, 32 bytes and two sums of each activation group are readable.
        // No saturation: two products of pairs, each at most 2 * 63 * 127, sum to 32,004 < 32,767.
        unsafe {
            let [both, first, second] = scale_pairs(w.first);
            let offset = _mm256_slli_epi16::<5>(both);
            // Taken off: 32 times each half's scale times its sum of activations.
            let mut acc = [_mm256_setzero_si256(); T];
            for t in 0..T {
                let sum = _mm256_set1_epi32(sums[t].cast::<i32>().read_unaligned());
                acc[t] = _mm256_sub_epi32(acc[t], _mm256_madd_epi16(offset, sum));
            }
            for i in 0..2 {
                let (even, odd) = (u6(w.first, 2 * i), u6(w.first, 2 * i + 1));
                for t in 0..T {
                    let low = _mm256_add_epi16(
                        _mm256_maddubs_epi16(even.0, word(a[t], 2 * i)),
                        _mm256_maddubs_epi16(odd.0, word(a[t], 2 * i + 1)),
                    );
                    let high = _mm256_add_epi16(
                        _mm256_maddubs_epi16(even.1, word(a[t], 4 + 2 * i)),
                        _mm256_maddubs_epi16(odd.1, word(a[t], 5 + 2 * i)),
                    );
                    let scaled = _mm256_add_epi32(_mm256_madd_epi16(low, first), _mm256_madd_epi16(high, second));
                    acc[t] = _mm256_add_epi32(acc[t], scaled);
                }
            }
            acc
        }
    }
    #[inline(always)]
    unsafe fn dot_i8<const T: usize>(w: Panels, a: [*const i8; T], _: [*const i16; T]) -> [__m256i; T] {
        // SAFETY: see the impl block; 256 weight bytes and 32 bytes of each activation group are readable.
        // The sign moves from the weight to the activation because the instruction multiplies unsigned by signed.
        // No saturation: a pair is at most 2 * 128 * 127 = 32,512.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut acc = [_mm256_setzero_si256(); T];
            for i in 0..8 {
                let weights = _mm256_loadu_si256(w.first.add(32 * i).cast());
                let magnitude = _mm256_abs_epi8(weights);
                for t in 0..T {
                    let x = word(a[t], i);
                    let pair = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weights));
                    acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(pair, ones));
                }
            }
            acc
        }
    }
}
