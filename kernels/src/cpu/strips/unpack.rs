//! Unpacks groups of a strip: weights to unsigned bytes, scales and minima to floats.

use std::arch::x86_64::*;

use super::super::dots::vnni::{moved, with_bits};
use super::super::packing::{Form, SUPER};
use super::super::simd::LANES;
use super::{PANELS, Unpacked, Vector};

/// The same place in the panels of a strip.
type Strip = [*const u8; PANELS];

/// 32 bytes of two panels.
#[inline(always)]
unsafe fn bytes(pair: [*const u8; 2], at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(pair[0].add(at).cast()));
        _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(pair[1].add(at).cast()))
    }
}

/// 16 bytes of two panels.
#[inline(always)]
unsafe fn short(pair: [*const u8; 2], at: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(pair[0].add(at).cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(pair[1].add(at).cast()))
    }
}

/// Eight f16 of two panels as floats.
#[inline(always)]
unsafe fn halves(pair: [*const u8; 2], at: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(short(pair, at)) }
}

/// Eight bytes of two panels as floats.
#[inline(always)]
unsafe fn small(pair: [*const u8; 2], at: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (_mm_loadl_epi64(pair[0].add(at).cast()), _mm_loadl_epi64(pair[1].add(at).cast()));
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high)))
    }
}

/// The weights of two panels' group, of `BITS` bits.
#[inline(always)]
unsafe fn weights<const BITS: usize, const RAISED: bool>(pair: [*const u8; 2], v: usize, out: *mut Unpacked) {
    // SAFETY: the caller's promise. What a shift takes across a byte is masked off.
    unsafe {
        let put = |i: usize, x| (*out).weights[i][v] = Vector(x);
        if BITS == 8 {
            for i in 0..8 {
                let sign = _mm512_set1_epi8(if RAISED { -128 } else { 0 });
                put(i, _mm512_xor_si512(bytes(pair, 32 * i), sign));
            }
            return;
        }
        let mask = _mm512_set1_epi8(15);
        let upper = [if BITS > 4 { bytes(pair, 128) } else { mask }, if BITS > 5 { bytes(pair, 160) } else { mask }];
        for i in 0..4 {
            let packed = bytes(pair, 32 * i);
            let mut low = _mm512_and_si512(packed, mask);
            let mut high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), mask);
            let at = i as i32;
            if BITS == 5 {
                low = with_bits(low, moved(upper[0], 4 - at), 16);
                high = with_bits(high, moved(upper[0], -at), 16);
            }
            if BITS == 6 {
                low = with_bits(low, moved(upper[0], 4 - 2 * at), 0x30);
                high = with_bits(high, moved(upper[1], 4 - 2 * at), 0x30);
            }
            put(i, low);
            put(4 + i, high);
        }
    }
}

/// Groups `first..first + count` of forms without super-blocks.
#[inline(always)]
unsafe fn plain<const BITS: usize, const RAISED: bool>(
    form: Form,
    strip: Strip,
    first: usize,
    count: usize,
    out: *mut Unpacked,
) {
    for g in 0..count {
        for v in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                let at = |panel: *const u8| panel.add((first + g) * form.unit_bytes());
                let (pair, out) = ([at(strip[2 * v]), at(strip[2 * v + 1])], out.add(g));
                let put = |i: usize, x| (*out).factors[i][v] = Vector::of(x);
                weights::<BITS, RAISED>(pair, v, out);
                put(0, halves(pair, form.weight_bytes()));
                if BITS < 8 {
                    put(1, halves(pair, form.weight_bytes() + 2 * LANES));
                }
            }
        }
    }
}

/// Groups `first..first + count` of super-blocks; both are multiples of a super-block's.
#[inline(always)]
unsafe fn supers<const BITS: usize>(form: Form, strip: Strip, first: usize, count: usize, out: *mut Unpacked) {
    for u in 0..count / SUPER {
        for v in 0..2 {
            // SAFETY: the caller's promise. Halves times small integers are exact.
            unsafe {
                let at = |panel: *const u8| panel.add((first / SUPER + u) * form.unit_bytes());
                let unit = [at(strip[2 * v]), at(strip[2 * v + 1])];
                let d = halves(unit, 0);
                let dmin = if BITS < 6 { halves(unit, 2 * LANES) } else { d };
                for g in 0..SUPER {
                    let start = form.header_bytes() + g * form.group_bytes();
                    let (pair, out) = ([unit[0].add(start), unit[1].add(start)], out.add(u * SUPER + g));
                    let put = |i: usize, x| (*out).factors[i][v] = Vector::of(x);
                    weights::<BITS, true>(pair, v, out);
                    if BITS < 6 {
                        put(0, _mm512_mul_ps(d, small(pair, form.weight_bytes())));
                        put(1, _mm512_mul_ps(dmin, small(pair, form.weight_bytes() + LANES)));
                    } else {
                        let both = _mm512_cvtepi8_epi16(short(pair, form.weight_bytes()));
                        let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(both));
                        put(0, _mm512_cvtepi32_ps(first));
                        put(1, _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(both)));
                        put(2, d);
                    }
                }
            }
        }
    }
}

/// Unpacks groups `first..first + count` of a strip; whole super-blocks where there are such. Signed weights of 8 bits may be raised
/// by 128, for instructions that take unsigned ones; those of 6 bits are.
///
/// # Safety
/// The panels have the groups, `out` has room for them; the CPU has AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
pub unsafe fn unpack(form: Form, strip: Strip, (first, count): (usize, usize), raised: bool, out: *mut Unpacked) {
    // SAFETY: the caller's promise.
    unsafe {
        match form {
            Form::U4 => plain::<4, true>(Form::U4, strip, first, count, out),
            Form::U5 => plain::<5, true>(Form::U5, strip, first, count, out),
            Form::I8 if raised => plain::<8, true>(Form::I8, strip, first, count, out),
            Form::I8 => plain::<8, false>(Form::I8, strip, first, count, out),
            Form::U4Super => supers::<4>(Form::U4Super, strip, first, count, out),
            Form::U5Super => supers::<5>(Form::U5Super, strip, first, count, out),
            Form::U6Super => supers::<6>(Form::U6Super, strip, first, count, out),
            Form::F32 | Form::F16 | Form::Bf16 => unreachable!("dense weights are not unpacked"),
        }
    }
}
