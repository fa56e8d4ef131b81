//! The instantiation of [`Simd`] with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::simd::{Floats, LANES, Simd, Twice};

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2;

// SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller;
// all loads and stores used are the unaligned ones.
unsafe impl Floats for Avx2 {
    type F = __m256;
    const COUNT: usize = LANES;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: see the impl block.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2i(n: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn any_larger(a: __m256, b: __m256) -> bool {
        // SAFETY: see the impl block.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0 }
    }
    #[inline(always)]
    unsafe fn select_range(a: __m256, low: usize, high: usize, other: f32) -> __m256 {
        // SAFETY: see the impl block.
        unsafe {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low as i32 - 1));
            let until = _mm256_cmpgt_epi32(_mm256_set1_epi32(high as i32), lane);
            let keep = _mm256_castsi256_ps(_mm256_and_si256(from, until));
            _mm256_blendv_ps(_mm256_set1_ps(other), a, keep)
        }
    }
}

// SAFETY: as above.
unsafe impl Simd for Avx2 {
    type Wide = Twice<Avx2>;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn join(low: __m256, high: __m256) -> [__m256; 2] {
        [low, high]
    }
    #[inline(always)]
    unsafe fn split(x: [__m256; 2]) -> [__m256; 2] {
        x
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m256 {
        // SAFETY: see the impl block.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: __m256) {
        // SAFETY: see the impl block.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut bf16, x: __m256) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: see the impl block; `lanes` holds eight f32.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), x);
            p.cast::<[bf16; LANES]>().write_unaligned(lanes.map(bf16::from_f32));
        }
    }
    #[inline(always)]
    unsafe fn abs(a: __m256) -> __m256 {
        // SAFETY: see the impl block.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    unsafe fn sum(a: __m256) -> f32 {
        // SAFETY: see the impl block.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(a: __m256) -> f32 {
        // SAFETY: see the impl block.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: __m256) {
        // SAFETY: see the impl block; eight bytes are writable at p.
        unsafe {
            let i = _mm256_cvtps_epi32(x);
            let s = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256::<1>(i));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(s, s));
        }
    }
    #[inline(always)]
    unsafe fn store_group_i8(p: *mut i8, x: [__m256; 4]) {
        // SAFETY: see the impl block; 32 bytes are writable at p. Packing keeps to halves of registers, so words of four bytes come
        // out in the order 0 2 4 6 1 3 5 7.
        unsafe {
            let low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
            let high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            _mm256_storeu_si256(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn transpose(r: [__m256; LANES]) -> [__m256; LANES] {
        // SAFETY: see the impl block.
        unsafe {
            let mut pairs = r;
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            let mut quads = r;
            for half in 0..2 {
                let [a, b, c, d] = [pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]];
                quads[4 * half] = _mm256_shuffle_ps::<0x44>(a, c);
                quads[4 * half + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                quads[4 * half + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                quads[4 * half + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            let mut out = r;
            for i in 0..4 {
                out[i] = _mm256_permute2f128_ps::<0x20>(quads[i], quads[4 + i]);
                out[4 + i] = _mm256_permute2f128_ps::<0x31>(quads[i], quads[4 + i]);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn transpose_16(rows: *const u8, apart: usize, out: *mut u16) {
        // SAFETY: see the impl block; eight elements are readable at each row, 128 are writable at out. A register has a row of the
        // first eight and one of the second; unpacking keeps to its halves.
        unsafe {
            let mut r = [_mm256_setzero_si256(); LANES];
            for (s, r) in r.iter_mut().enumerate() {
                let row = |s: usize| rows.add(s * apart).cast();
                *r = _mm256_inserti128_si256::<1>(
                    _mm256_castsi128_si256(_mm_loadu_si128(row(s))),
                    _mm_loadu_si128(row(LANES + s)),
                );
            }
            let mut pairs = r;
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
            }
            let mut quads = r;
            for i in [0, 1, 4, 5] {
                quads[i] = _mm256_unpacklo_epi32(pairs[i], pairs[i + 2]);
                quads[i + 2] = _mm256_unpackhi_epi32(pairs[i], pairs[i + 2]);
            }
            // Elements 0 and 1 of the first four rows are in `quads[0]`, 4 and 5, 2 and 3, 6 and 7 in those behind it.
            for (i, d) in [0, 4, 2, 6].into_iter().enumerate() {
                let at = out.add(d * 2 * LANES);
                _mm256_storeu_si256(at.cast(), _mm256_unpacklo_epi64(quads[i], quads[i + 4]));
                _mm256_storeu_si256(at.add(2 * LANES).cast(), _mm256_unpackhi_epi64(quads[i], quads[i + 4]));
            }
        }
    }
}
