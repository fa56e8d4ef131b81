//! Eight-lane arithmetic with two instantiations: AVX2 + FMA + F16C, and portable Rust.
//!
//! Every CPU kernel is written once over [`Simd`]. Both instantiations do the same operations in the same order and round
//! in the same places (the portable one uses fused `mul_add`), so they give the same bits (I1), and a worker without AVX2 can
//! stand in for one that has it. All methods are unsafe because the AVX2 ones need the CPU to have the features; the
//! safe dispatch is in [`super::isa`].

use half::{bf16, f16};

/// Rows of a weight panel and lanes of a vector.
pub const LANES: usize = 8;

/// Eight f32 lanes and the integer dot products the quantised kernels need.
///
/// # Safety
/// Callers of any method must run on a CPU with the instantiation's features, and pointers must be valid for the lanes read
/// or written. There is no alignment requirement.
pub unsafe trait Simd: Copy + 'static {
    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type I: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn store_f16(p: *mut f16, x: Self::F);
    unsafe fn store_bf16(p: *mut bf16, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// 2 to the power of integers in [-126, 127].
    unsafe fn exp2i(n: Self::F) -> Self::F;
    /// Sum of lanes in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
    unsafe fn sum(a: Self::F) -> f32;
    /// Largest lane; no lane is NaN.
    unsafe fn max_lane(a: Self::F) -> f32;
    /// Lanes `low..high` of `a`, the others replaced by `other`.
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F;
    /// Stores lanes (integers in [-128, 127]) as bytes.
    unsafe fn store_i8(p: *mut i8, x: Self::F);
    /// Eight integers as f32.
    unsafe fn to_f32(x: Self::I) -> Self::F;

    /// Dot products of one group of 32 unsigned 4-bit weights of eight rows with `T` activation groups.
    /// `w`: 128 bytes; the low nibbles of 32-byte vector i hold weights 4i..4i+4 of each row, the high nibbles 16+4i..16+4i+4.
    unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T];
    /// Dot products of one half group of 16 signed 8-bit weights of eight rows with `T` half groups of activations.
    /// `w`: 128 bytes; 32-byte vector i holds weights 4i..4i+4 of each row.
    unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T]) -> [Self::I; T];
    /// Lane-wise integer sum.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// Rows become columns.
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES];
}

/// e to the power of each lane, within 2 units in the last place on [-87, 88]; arguments outside are clamped.
/// Cody-Waite reduction and a degree-6 polynomial.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
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

/// The portable instantiation.
#[derive(Clone, Copy)]
pub struct Portable;

macro_rules! lanewise {
    ($a:expr, $f:expr) => {{
        let (a, f) = ($a, $f);
        let mut r = [0.0f32; LANES];
        for i in 0..LANES {
            r[i] = f(a[i]);
        }
        r
    }};
    ($a:expr, $b:expr, $f:expr) => {{
        let (a, b, f) = ($a, $b, $f);
        let mut r = [0.0f32; LANES];
        for i in 0..LANES {
            r[i] = f(a[i], b[i]);
        }
        r
    }};
}

// SAFETY: needs no CPU feature; pointer validity is passed on to the callers.
unsafe impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];

    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: eight f32 are readable at p.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    unsafe fn load_f16(p: *const f16) -> Self::F {
        // SAFETY: eight f16 are readable at p.
        unsafe { p.cast::<[f16; LANES]>().read_unaligned().map(f16::to_f32) }
    }
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        // SAFETY: eight bf16 are readable at p.
        unsafe { p.cast::<[bf16; LANES]>().read_unaligned().map(bf16::to_f32) }
    }
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: eight f32 are writable at p.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    unsafe fn store_f16(p: *mut f16, x: Self::F) {
        // SAFETY: eight f16 are writable at p.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(x.map(f16::from_f32)) }
    }
    unsafe fn store_bf16(p: *mut bf16, x: Self::F) {
        // SAFETY: eight bf16 are writable at p.
        unsafe { p.cast::<[bf16; LANES]>().write_unaligned(x.map(bf16::from_f32)) }
    }
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x + y)
    }
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x - y)
    }
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x * y)
    }
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x / y)
    }
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut r = c;
        for i in 0..LANES {
            r[i] = a[i].mul_add(b[i], c[i]);
        }
        r
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x > y { x } else { y })
    }
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x < y { x } else { y })
    }
    unsafe fn abs(a: Self::F) -> Self::F {
        lanewise!(a, f32::abs)
    }
    unsafe fn round(a: Self::F) -> Self::F {
        lanewise!(a, f32::round_ties_even)
    }
    unsafe fn exp2i(n: Self::F) -> Self::F {
        lanewise!(n, |x: f32| f32::from_bits(((x as i32 + 127) << 23) as u32))
    }
    unsafe fn sum(a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    unsafe fn max_lane(a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F {
        let mut r = [other; LANES];
        r[low..high].copy_from_slice(&a[low..high]);
        r
    }
    unsafe fn store_i8(p: *mut i8, x: Self::F) {
        // SAFETY: eight bytes are writable at p.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(x.map(|v| v as i8)) }
    }
    unsafe fn to_f32(x: Self::I) -> Self::F {
        x.map(|v| v as f32)
    }
    unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 128 weight bytes and 32 activation bytes are readable.
                unsafe {
                    let q = *w.add(byte) as i32;
                    let low = *a.add(vector * 4 + k) as i32;
                    let high = *a.add(16 + vector * 4 + k) as i32;
                    out[t][lane] += (q & 15) * low + (q >> 4) * high;
                }
            }
        }
        out
    }
    unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 128 weight bytes and 16 activation bytes are readable.
                unsafe { out[t][lane] += *w.add(byte) as i32 * *a.add(vector * 4 + k) as i32 }
            }
        }
        out
    }
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        let mut r = a;
        for i in 0..LANES {
            r[i] += b[i];
        }
        r
    }
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES] {
        std::array::from_fn(|c| std::array::from_fn(|r| rows[r][c]))
    }
}

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{LANES, Simd};

    /// AVX2, FMA and F16C.
    #[derive(Clone, Copy)]
    pub struct Avx2;

    // SAFETY: the trait's contract puts the CPU features and the validity of pointers on the caller;
    // all loads and stores used are the unaligned ones.
    unsafe impl Simd for Avx2 {
        type F = __m256;
        type I = __m256i;

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
        unsafe fn store(p: *mut f32, x: __m256) {
            // SAFETY: see the impl block.
            unsafe { _mm256_storeu_ps(p, x) }
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
        unsafe fn abs(a: __m256) -> __m256 {
            // SAFETY: see the impl block.
            unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
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
        unsafe fn to_f32(x: __m256i) -> __m256 {
            // SAFETY: see the impl block.
            unsafe { _mm256_cvtepi32_ps(x) }
        }
        #[inline(always)]
        unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [__m256i; T] {
            // SAFETY: see the impl block; 128 weight bytes and 32 bytes of each activation group are readable.
            // No saturation: eight products of pairs, each at most 2 * 15 * 127, sum to 30,480 < 32,767.
            unsafe {
                let nibble = _mm256_set1_epi8(15);
                let mut acc = [_mm256_setzero_si256(); T];
                for i in 0..4 {
                    let packed = _mm256_loadu_si256(w.add(32 * i).cast());
                    let low = _mm256_and_si256(packed, nibble);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), nibble);
                    for t in 0..T {
                        let words = a[t].cast::<i32>();
                        let x = _mm256_set1_epi32(words.add(i).read_unaligned());
                        let y = _mm256_set1_epi32(words.add(4 + i).read_unaligned());
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
        unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T]) -> [__m256i; T] {
            // SAFETY: see the impl block; 128 weight bytes and 16 bytes of each activation half group are readable.
            // The sign moves from the weight to the activation because the instruction multiplies unsigned by signed.
            // No saturation: a pair is at most 2 * 128 * 127 = 32,512.
            unsafe {
                let ones = _mm256_set1_epi16(1);
                let mut acc = [_mm256_setzero_si256(); T];
                for i in 0..4 {
                    let weights = _mm256_loadu_si256(w.add(32 * i).cast());
                    let magnitude = _mm256_abs_epi8(weights);
                    for t in 0..T {
                        let x = _mm256_set1_epi32(a[t].cast::<i32>().add(i).read_unaligned());
                        let pair = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weights));
                        acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(pair, ones));
                    }
                }
                acc
            }
        }
        #[inline(always)]
        unsafe fn add_i(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: see the impl block.
            unsafe { _mm256_add_epi32(a, b) }
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
    }
}
