//! Unpacks groups of a strip: weights to unsigned bytes, scales and minima to floats; for tiles, weights of super-blocks times their small
//! scales to two bytes.

use std::arch::x86_64::*;

use super::super::dots::vnni::{moved, with_bits};
use super::super::packing::{Form, SUPER};
use super::super::simd::LANES;
use super::{Chunk, Head, PANELS, Unpacked, Vector, With, in_supers};

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

/// Eight bytes of two panels as integers.
#[inline(always)]
unsafe fn small(pair: [*const u8; 2], at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (_mm_loadl_epi64(pair[0].add(at).cast()), _mm_loadl_epi64(pair[1].add(at).cast()));
        _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high))
    }
}

/// The weights of two panels' group, of `BITS` bits.
#[inline(always)]
unsafe fn weights<const BITS: usize, const RAISED: bool>(pair: [*const u8; 2]) -> [__m512i; 8] {
    // SAFETY: the caller's promise. What a shift takes across a byte is masked off.
    unsafe {
        let mut found = [_mm512_setzero_si512(); 8];
        if BITS == 8 {
            for i in 0..8 {
                let sign = _mm512_set1_epi8(if RAISED { -128 } else { 0 });
                found[i] = _mm512_xor_si512(bytes(pair, 32 * i), sign);
            }
            return found;
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
            (found[i], found[4 + i]) = (low, high);
        }
        found
    }
}

/// Keeps the weights of two panels' group.
#[inline(always)]
unsafe fn keep(weights: [__m512i; 8], v: usize, out: *mut Unpacked) {
    for i in 0..8 {
        // SAFETY: the caller's promise.
        unsafe { (*out).weights[i][v] = Vector(weights[i]) }
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
                keep(weights::<BITS, RAISED>(pair), v, out);
                put(0, halves(pair, form.weight_bytes()));
                if BITS < 8 {
                    put(1, halves(pair, form.weight_bytes() + 2 * LANES));
                }
            }
        }
    }
}

/// A group of two panels, in its super-block `unit`.
#[inline(always)]
unsafe fn group(form: Form, unit: [*const u8; 2], g: usize) -> [*const u8; 2] {
    let start = form.header_bytes() + g * form.group_bytes();
    // SAFETY: the caller's promise.
    unsafe { [unit[0].add(start), unit[1].add(start)] }
}

/// The small scales of the half groups of two panels' group; those of a whole group are the same twice.
#[inline(always)]
unsafe fn small_scales<const BITS: usize>(form: Form, pair: [*const u8; 2]) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if BITS < 6 {
            return [small(pair, form.weight_bytes()); 2];
        }
        let both = _mm512_cvtepi8_epi16(short(pair, form.weight_bytes()));
        [_mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(both)), _mm512_srai_epi32::<16>(both)]
    }
}

/// What a super-block has once.
#[inline(always)]
unsafe fn head<const BITS: usize>(form: Form, unit: [*const u8; 2], v: usize, out: *mut Head) {
    // SAFETY: the caller's promise.
    unsafe {
        (*out).scales[0][v] = Vector::of(halves(unit, 0));
        if BITS == 6 {
            return;
        }
        (*out).scales[1][v] = Vector::of(halves(unit, 2 * LANES));
        for i in 0..SUPER / 2 {
            let at = form.weight_bytes() + LANES;
            let (first, second) = (small(group(form, unit, 2 * i), at), small(group(form, unit, 2 * i + 1), at));
            (*out).minima[i][v] = Vector(_mm512_or_si512(first, _mm512_slli_epi32::<16>(second)));
        }
    }
}

/// Groups `first..first + count` of super-blocks; both are multiples of a super-block's.
#[inline(always)]
unsafe fn supers<const BITS: usize>(form: Form, strip: Strip, first: usize, count: usize, out: Chunk) {
    for u in 0..count / SUPER {
        for v in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                let at = |panel: *const u8| panel.add((first / SUPER + u) * form.unit_bytes());
                let unit = [at(strip[2 * v]), at(strip[2 * v + 1])];
                head::<BITS>(form, unit, v, out.heads.add(u));
                for g in 0..SUPER {
                    let (pair, out) = (group(form, unit, g), out.groups.add(u * SUPER + g));
                    keep(weights::<BITS, true>(pair), v, out);
                    let [first, second] = small_scales::<BITS>(form, pair);
                    (*out).factors[0][v] = Vector::of(_mm512_cvtepi32_ps(first));
                    if BITS == 6 {
                        (*out).factors[1][v] = Vector::of(_mm512_cvtepi32_ps(second));
                    }
                }
            }
        }
    }
}

/// Weights times their small scales, in two parts: what the lower bytes are, and the upper ones. `scales` has each of them twice.
#[inline(always)]
unsafe fn scaled_bytes<const BITS: usize>(weights: __m512i, scales: __m512i) -> [__m512i; 2] {
    // SAFETY: the caller's promise. Products of weights below 64 and scales below 128 fit 16 bits. 0xca takes the first where there is a bit, the
    // second elsewhere.
    unsafe {
        let bytes = _mm512_set1_epi16(0xff);
        let mut even = _mm512_mullo_epi16(_mm512_and_si512(bytes, weights), scales);
        // Weights of odd places are 256 times what they are, and so are their scales.
        let mut odd = _mm512_mulhi_epi16(_mm512_andnot_si512(bytes, weights), _mm512_slli_epi16::<8>(scales));
        if BITS == 6 {
            // Takes off what the weights are raised by, and adds half of a lower part's range, which it loses below.
            let raised = _mm512_sub_epi16(_mm512_slli_epi16::<5>(scales), _mm512_set1_epi16(64));
            (even, odd) = (_mm512_sub_epi16(even, raised), _mm512_sub_epi16(odd, raised));
        }
        let both = _mm512_ternarylogic_epi64::<0xca>(bytes, even, _mm512_slli_epi16::<8>(odd));
        let mut low = _mm512_and_si512(both, _mm512_set1_epi8(0x7f));
        if BITS == 6 {
            low = _mm512_sub_epi8(low, _mm512_set1_epi8(64));
        }
        // Bits 7 to 14: the sign is one of them.
        let high = _mm512_ternarylogic_epi64::<0xca>(bytes, _mm512_srli_epi16::<7>(even), _mm512_slli_epi16::<1>(odd));
        [low, high]
    }
}

/// Super-block `u` for tiles.
#[inline(always)]
unsafe fn scaled<const BITS: usize>(form: Form, strip: Strip, u: usize, out: Chunk) {
    for v in 0..2 {
        // SAFETY: the caller's promise.
        unsafe {
            let at = |panel: *const u8| panel.add(u * form.unit_bytes());
            let unit = [at(strip[2 * v]), at(strip[2 * v + 1])];
            head::<BITS>(form, unit, v, out.heads);
            for g in 0..SUPER {
                let pair = group(form, unit, g);
                let weights = weights::<BITS, true>(pair);
                let mut scales = small_scales::<BITS>(form, pair);
                for half in 0..2 {
                    // The low 16 bits twice.
                    let low = _mm512_and_si512(scales[half], _mm512_set1_epi32(0xffff));
                    scales[half] = _mm512_or_si512(low, _mm512_slli_epi32::<16>(scales[half]));
                }
                for i in 0..8 {
                    let [low, high] = scaled_bytes::<BITS>(weights[i], scales[i / 4]);
                    (*out.scaled).low[g * 8 + i][v] = Vector(low);
                    (*out.scaled).high[g * 8 + i][v] = Vector(high);
                }
            }
        }
    }
}

/// Unpacks groups `first..first + count` of a strip; whole super-blocks where there are such, of which tiles get one. For VNNI, signed weights
/// are raised, as its instruction takes unsigned ones.
///
/// # Safety
/// The panels have the groups, `out` has room for them; the CPU has AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
pub unsafe fn unpack(form: Form, strip: Strip, (first, count): (usize, usize), with: With, out: Chunk) {
    // SAFETY: the caller's promise.
    unsafe {
        if with == With::Amx && in_supers(form) {
            let u = first / SUPER;
            return match form {
                Form::U4Super => scaled::<4>(Form::U4Super, strip, u, out),
                Form::U5Super => scaled::<5>(Form::U5Super, strip, u, out),
                _ => scaled::<6>(Form::U6Super, strip, u, out),
            };
        }
        match form {
            Form::U4 => plain::<4, true>(Form::U4, strip, first, count, out.groups),
            Form::U5 => plain::<5, true>(Form::U5, strip, first, count, out.groups),
            Form::I8 if with == With::Vnni => plain::<8, true>(Form::I8, strip, first, count, out.groups),
            Form::I8 => plain::<8, false>(Form::I8, strip, first, count, out.groups),
            Form::U4Super => supers::<4>(Form::U4Super, strip, first, count, out),
            Form::U5Super => supers::<5>(Form::U5Super, strip, first, count, out),
            Form::U6Super => supers::<6>(Form::U6Super, strip, first, count, out),
            Form::F32 | Form::F16 | Form::Bf16 => unreachable!("dense weights are not unpacked"),
        }
    }
}
