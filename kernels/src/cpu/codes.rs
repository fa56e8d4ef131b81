//! Eight lanes out of the codes of quantised KV rows, with the instantiations of [`super::simd`].
//!
//! All give the same bits (I1): every code is an exact f32. Knows nothing of scales, rows or pools.

use super::portable::Portable;
use super::simd::{LANES, Simd};

/// [`Codes::load_e4m3`] gives values in this unit, 2^-8: moving the bits of an E4M3 into an f16 changes the exponent's bias by 8.
pub const E4M3_UNIT: f32 = 256.0;

/// Largest finite E4M3.
pub const E4M3_MAX: f32 = 448.0;

/// Loads of small codes.
///
/// # Safety
/// As for [`Simd`].
pub unsafe trait Codes: Simd {
    /// Eight signed bytes.
    unsafe fn load_i8(p: *const u8) -> Self::F;
    /// Eight E4M3 bytes, each divided by [`E4M3_UNIT`]. There are no NaNs: the codes 0x7f and 0xff count on to ±480.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// Eight nibbles in four bytes, lowest bits first.
    unsafe fn load_u4(p: *const u8) -> Self::F;
}

/// The E4M3 nearest to `x`, ties to even. `x` is within ±[`E4M3_MAX`].
#[inline(always)]
pub fn to_e4m3(x: f32) -> u8 {
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    // In this range f32 are multiples of 2^-9, the step of E4M3 below its smallest normal number.
    const STEPS: f32 = 16384.0;
    let (sign, magnitude) = (x.to_bits() >> 31, x.to_bits() & 0x7fff_ffff);
    let rounded = magnitude + 0x7_ffff + (magnitude >> 20 & 1);
    let normal = (rounded >> 20).wrapping_sub((127 - 7) << 3);
    let subnormal = (f32::from_bits(magnitude) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let code = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    (sign << 7 | code) as u8
}

/// What each E4M3 code stands for, over [`E4M3_UNIT`].
const E4M3: [f32; 256] = {
    let mut table = [0.0f32; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
        // Steps of 2^-9 in units of 2^8, twice as wide with each exponent above 1.
        let doublings = if exponent > 1 { exponent as u32 - 1 } else { 0 };
        let step = f32::from_bits((127 - 9 - 8 + doublings) << 23);
        let magnitude = step * (mantissa + if exponent > 0 { 8.0 } else { 0.0 });
        table[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    table
};

// SAFETY: needs no CPU feature; pointer validity is passed on to the callers.
unsafe impl Codes for Portable {
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: eight bytes are readable at p.
        unsafe { p.cast::<[i8; LANES]>().read().map(f32::from) }
    }
    unsafe fn load_e4m3(p: *const u8) -> Self::F {
        // SAFETY: eight bytes are readable at p.
        unsafe { p.cast::<[u8; LANES]>().read().map(|code| E4M3[code as usize]) }
    }
    unsafe fn load_u4(p: *const u8) -> Self::F {
        // SAFETY: four bytes are readable at p.
        let word = u32::from_le_bytes(unsafe { p.cast::<[u8; 4]>().read() });
        std::array::from_fn(|i| (word >> (4 * i) & 15) as f32)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::super::avx2::Avx2;
    use super::super::avx512::Vnni;
    use super::Codes;

    // SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller.
    unsafe impl Codes for Avx2 {
        #[inline(always)]
        unsafe fn load_i8(p: *const u8) -> __m256 {
            // SAFETY: see the impl block; eight bytes are read.
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> __m256 {
            // SAFETY: see the impl block; eight bytes are read. Sign, exponent and mantissa move to their places in an f16,
            // whose fifth exponent bit stays 0; subnormal numbers stay right.
            unsafe {
                let high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(p.cast()));
                let half = _mm_and_si128(_mm_srai_epi16::<1>(high), _mm_set1_epi16(0xbf80u16 as i16));
                _mm256_cvtph_ps(half)
            }
        }
        #[inline(always)]
        unsafe fn load_u4(p: *const u8) -> __m256 {
            // SAFETY: see the impl block; four bytes are read.
            unsafe {
                let word = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
                let shifted = _mm256_srlv_epi32(word, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
                _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)))
            }
        }
    }

    // SAFETY: as for AVX2, which a CPU with VNNI has.
    unsafe impl Codes for Vnni {
        #[inline(always)]
        unsafe fn load_i8(p: *const u8) -> __m256 {
            // SAFETY: the caller's promise is the same.
            unsafe { Avx2::load_i8(p) }
        }
        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> __m256 {
            // SAFETY: the caller's promise is the same.
            unsafe { Avx2::load_e4m3(p) }
        }
        #[inline(always)]
        unsafe fn load_u4(p: *const u8) -> __m256 {
            // SAFETY: the caller's promise is the same.
            unsafe { Avx2::load_u4(p) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(code: u8) -> f32 {
        E4M3[code as usize] * E4M3_UNIT
    }

    #[test]
    fn e4m3_is_the_format_of_the_specification() {
        let known = [(0x00, 0.0), (0x01, 0.001953125), (0x07, 0.013671875), (0x08, 0.015625), (0x38, 1.0)];
        for (code, want) in known.into_iter().chain([(0x3f, 1.875), (0x7e, 448.0), (0xb8, -1.0)]) {
            assert_eq!(value(code), want, "{code:#x}");
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_and_ties_to_even() {
        for code in 0..0x7eu8 {
            let (low, high) = (value(code), value(code + 1));
            let tie = (low + high) / 2.0;
            for (x, want) in [
                (low, code),
                (tie.next_down(), code),
                (tie, code + code % 2),
                (tie.next_up(), code + 1),
                (high, code + 1),
            ] {
                assert_eq!(to_e4m3(x), want, "{x}");
                assert_eq!(to_e4m3(-x), want | 0x80, "-{x}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn instruction_sets_agree_on_every_code() {
        if let crate::Isa::Portable = crate::Isa::detect() {
            return;
        }
        let lanes = |x: std::arch::x86_64::__m256| -> [f32; LANES] {
            let mut out = [0.0; LANES];
            // SAFETY: the CPU has AVX2, `out` eight lanes.
            unsafe { <super::super::avx2::Avx2 as crate::cpu::simd::Floats>::store(out.as_mut_ptr(), x) };
            out
        };
        for first in (0..=255u8).step_by(8) {
            let bytes: [u8; 8] = std::array::from_fn(|i| first + i as u8);
            let p = bytes.as_ptr();
            // SAFETY: the CPU has AVX2, and eight bytes are readable.
            unsafe {
                assert_eq!(lanes(super::super::avx2::Avx2::load_i8(p)), Portable::load_i8(p));
                assert_eq!(lanes(super::super::avx2::Avx2::load_e4m3(p)), Portable::load_e4m3(p));
                assert_eq!(lanes(super::super::avx2::Avx2::load_u4(p)), Portable::load_u4(p));
            }
        }
    }
}
