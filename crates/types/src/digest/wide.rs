//! One pass over a block with AVX2 that digests it, copies it, or both. The digests equal those of the portable loop; tests compare them.
//!
//! A processor prefetches by itself only up to the end of a 4 KiB page, and pools consist of such pages. So each pass also prefetches what
//! it reads [`AHEAD`] bytes later, and at its end the beginning of the `next` run.

use std::arch::x86_64::*;

use super::{LANE_STEP, digest_bytes};

/// Bytes per step of the loops.
const STEP: usize = 64;

/// Prefetch distance in bytes: some pages, and well within the first-level cache.
const AHEAD: usize = 16 << 10;

/// Do not copy.
const NOWHERE: u8 = 0;
/// Copy through the cache.
const CACHED: u8 = 1;
/// Copy with stores that bypass the cache.
const STREAMED: u8 = 2;

/// Whether this CPU can run this module.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2")
}

/// Digests without copying.
#[target_feature(enable = "avx2")]
pub(super) fn digest(bytes: &[u8], first_lane: u64, next: *const u8) -> u64 {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    // SAFETY: the CPU has AVX2, by this function's target feature; with `NOWHERE` nothing is written.
    let digest = unsafe { pass::<NOWHERE, true>(steps, std::ptr::null_mut(), first_lane, next) };
    digest.wrapping_add(digest_bytes(rest, first_lane.wrapping_add((steps.len() * STEP / 8) as u64)))
}

/// Copies and digests in one pass. The stores bypass the cache if `target` is aligned for it. Then target lines that are not cached need
/// not be read before they are overwritten; that read would cost more than a cached copy saves whoever verifies it.
///
/// # Safety
/// The CPU has AVX2. `target` is valid for writes of `bytes.len()` bytes and does not overlap `bytes`.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn digest_copy(bytes: &[u8], target: *mut u8, first_lane: u64, next: *const u8) -> u64 {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let whole = bytes.len() - rest.len();
    // SAFETY: the caller's promise; streamed to aligned addresses only.
    unsafe {
        let digest = match target.cast::<__m256i>().is_aligned() {
            true => pass::<STREAMED, true>(steps, target, first_lane, next),
            false => pass::<CACHED, true>(steps, target, first_lane, next),
        };
        std::ptr::copy_nonoverlapping(rest.as_ptr(), target.add(whole), rest.len());
        digest.wrapping_add(digest_bytes(rest, first_lane.wrapping_add((whole / 8) as u64)))
    }
}

/// Copies with stores that bypass the cache, if `target` is aligned for it.
///
/// # Safety
/// As [`digest_copy`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_copy(bytes: &[u8], target: *mut u8, next: *const u8) {
    let aligned = target.cast::<__m256i>().is_aligned();
    let steps = if aligned { bytes.as_chunks::<STEP>().0 } else { &[] };
    let whole = steps.len() * STEP;
    // SAFETY: the caller's promise; streamed to aligned addresses only.
    unsafe {
        pass::<STREAMED, false>(steps, target, 0, next);
        std::ptr::copy_nonoverlapping(bytes.as_ptr().add(whole), target.add(whole), bytes.len() - whole);
    }
}

/// Processes whole steps. Returns their digest if `DIGEST`, else 0. `next` is never read.
///
/// # Safety
/// The CPU has AVX2. Unless `TO` is [`NOWHERE`], `target` is valid for writes of as many bytes as `source` has. If `TO` is [`STREAMED`],
/// it is aligned to 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn pass<const TO: u8, const DIGEST: bool>(
    source: &[[u8; STEP]],
    target: *mut u8,
    first_lane: u64,
    next: *const u8,
) -> u64 {
    let key = |lane: u64| first_lane.wrapping_add(lane + 1).wrapping_mul(LANE_STEP) as i64;
    let mut keys =
        [_mm256_set_epi64x(key(3), key(2), key(1), key(0)), _mm256_set_epi64x(key(7), key(6), key(5), key(4))];
    let advance = _mm256_set1_epi64x(LANE_STEP.wrapping_mul(8) as i64);
    let mut sums = [_mm256_setzero_si256(); 2];
    // A short run would otherwise prefetch past the beginning of the next run.
    let ahead = (AHEAD / STEP).min(source.len());
    for (i, step) in source.iter().enumerate() {
        let wanted = match source.get(i + ahead) {
            Some(later) => later.as_ptr(),
            None => next.wrapping_add((i + ahead - source.len()) * STEP),
        };
        _mm_prefetch::<_MM_HINT_T0>(wanted.cast());
        for half in 0..2 {
            // SAFETY: within the step, and within the target, which is as long; aligned if streamed.
            let value = unsafe {
                let value = _mm256_loadu_si256(step.as_ptr().add(half * 32).cast());
                match TO {
                    STREAMED => _mm256_stream_si256(target.add(i * STEP + half * 32).cast(), value),
                    CACHED => _mm256_storeu_si256(target.add(i * STEP + half * 32).cast(), value),
                    _ => {}
                }
                value
            };
            if DIGEST {
                let x = _mm256_xor_si256(value, keys[half]);
                let swapped = _mm256_shuffle_epi32::<0b10_11_00_01>(x);
                // The low halves' product: low times high.
                let share = _mm256_add_epi64(_mm256_mul_epu32(x, swapped), swapped);
                sums[half] = _mm256_add_epi64(sums[half], share);
                keys[half] = _mm256_add_epi64(keys[half], advance);
            }
        }
    }
    let mut lanes = [0u64; 4];
    // SAFETY: four lanes are 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm256_add_epi64(sums[0], sums[1])) };
    lanes.into_iter().fold(0, u64::wrapping_add)
}

/// Orders streamed stores before later ones.
pub(super) fn fence() {
    // SAFETY: part of SSE, which every x86-64 CPU has; touches no memory.
    unsafe { _mm_sfence() }
}
