//! The digest with AVX2, alone and together with a copy. Same values as the portable loop, which the tests compare.

use std::arch::x86_64::*;

use super::{LANE_STEP, digest_bytes};

/// Bytes of one step of the loops.
const STEP: usize = 64;

/// Whether this CPU runs what is here.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2")
}

/// The portable loop, compiled for AVX2.
///
/// # Safety
/// The CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn digest(bytes: &[u8], first_lane: u64) -> u64 {
    digest_bytes(bytes, first_lane)
}

/// Copies and digests in one pass, around the cache where `target` is aligned for it: blocks that were not in the cache need
/// not be read before they are overwritten, which costs more than it saves whoever verifies the copy.
///
/// # Safety
/// The CPU has AVX2; `target` is valid for as many writes as `bytes` has bytes and does not overlap them.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn digest_copy(bytes: &[u8], target: *mut u8, first_lane: u64) -> u64 {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let whole = bytes.len() - rest.len();
    // SAFETY: the caller's promise; streamed to aligned addresses only.
    unsafe {
        let digest = match target.cast::<__m256i>().is_aligned() {
            true => digest_copy_steps::<true>(steps, target, first_lane),
            false => digest_copy_steps::<false>(steps, target, first_lane),
        };
        std::ptr::copy_nonoverlapping(rest.as_ptr(), target.add(whole), rest.len());
        digest.wrapping_add(digest_bytes(rest, first_lane.wrapping_add((whole / 8) as u64)))
    }
}

/// The whole steps of [`digest_copy`].
#[target_feature(enable = "avx2")]
unsafe fn digest_copy_steps<const STREAM: bool>(source: &[[u8; STEP]], target: *mut u8, first_lane: u64) -> u64 {
    let key = |lane: u64| first_lane.wrapping_add(lane + 1).wrapping_mul(LANE_STEP) as i64;
    let mut keys =
        [_mm256_set_epi64x(key(3), key(2), key(1), key(0)), _mm256_set_epi64x(key(7), key(6), key(5), key(4))];
    let next = _mm256_set1_epi64x(LANE_STEP.wrapping_mul(8) as i64);
    let mut sums = [_mm256_setzero_si256(); 2];
    for (i, source) in source.iter().enumerate() {
        for half in 0..2 {
            // SAFETY: within the source's step, and within the target, which is as long; aligned if streamed.
            let value = unsafe {
                let value = _mm256_loadu_si256(source.as_ptr().add(half * 32).cast());
                let target = target.add(i * STEP + half * 32).cast();
                if STREAM {
                    _mm256_stream_si256(target, value)
                } else {
                    _mm256_storeu_si256(target, value)
                }
                value
            };
            let x = _mm256_xor_si256(value, keys[half]);
            let swapped = _mm256_shuffle_epi32::<0b10_11_00_01>(x);
            // The low halves' product: low times high.
            let share = _mm256_add_epi64(_mm256_mul_epu32(x, swapped), swapped);
            sums[half] = _mm256_add_epi64(sums[half], share);
            keys[half] = _mm256_add_epi64(keys[half], next);
        }
    }
    let mut lanes = [0u64; 4];
    // SAFETY: four lanes are 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm256_add_epi64(sums[0], sums[1])) };
    lanes.into_iter().fold(0, u64::wrapping_add)
}

/// Copies around the cache, as far as `target` is aligned for it.
///
/// # Safety
/// As [`digest_copy`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_copy(bytes: &[u8], target: *mut u8) {
    let whole = if target.cast::<__m256i>().is_aligned() { bytes.len() / STEP * STEP } else { 0 };
    // SAFETY: the caller's promise; streamed only to aligned addresses.
    unsafe {
        for (i, source) in bytes.as_chunks::<STEP>().0.iter().enumerate().take(whole / STEP) {
            for half in 0..2 {
                let value = _mm256_loadu_si256(source.as_ptr().add(half * 32).cast());
                _mm256_stream_si256(target.add(i * STEP + half * 32).cast(), value);
            }
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr().add(whole), target.add(whole), bytes.len() - whole);
    }
}

/// Orders streamed stores before later ones.
pub(super) fn fence() {
    // SAFETY: part of SSE, which every x86-64 CPU has; touches no memory.
    unsafe { _mm_sfence() }
}
