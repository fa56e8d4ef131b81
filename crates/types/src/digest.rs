//! The block digest (I2) and the byte hash used for fingerprints.
//!
//! A block's digest is the wrapping sum of one share per 8-byte lane. A share is a mix of (lane value, lane index). The order of a sum does
//! not matter, so the digest vectorises and parallelises freely, and the digests of a block's layers add up. It detects torn, stale,
//! missing and misplaced data. It does not protect against an adversary.

#[cfg(target_arch = "x86_64")]
mod wide;

const LANE_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One lane's share. With x = value ^ key: the low half of x times its high half, plus x with its halves swapped. This takes one 32 x 32
/// bit multiplication, which vector units and GPUs do several at a time. Flipping any single bit of the value moves the product and the
/// sum in the same direction, so it always changes the share.
#[inline(always)]
fn share(value: u64, key: u64) -> u64 {
    let x = value ^ key;
    (x & 0xffff_ffff).wrapping_mul(x >> 32).wrapping_add(x.rotate_left(32))
}

/// 64-bit finaliser with full avalanche (constants of SplitMix64, Steele et al., OOPSLA 2014).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Digest of `bytes`, one layer's part of one block. `first_lane` is the number of its first 8-byte lane inside the whole block (all
/// layers), so that swapped layers do not cancel out. A short last lane is padded with zeros.
pub fn digest_block(bytes: &[u8], first_lane: u64) -> u64 {
    digest_run(bytes, first_lane, bytes.as_ptr_range().end)
}

/// [`digest_block`] for one of several runs. `next` is the address where the next run begins. It is never read; it is a hint that makes the
/// next run faster.
#[allow(clippy::not_unsafe_ptr_arg_deref)] // Only prefetched, never read, so any address is allowed.
pub fn digest_run(bytes: &[u8], first_lane: u64, next: *const u8) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if wide::available() {
        // SAFETY: the CPU has AVX2, as `available` has checked.
        return unsafe { wide::digest(bytes, first_lane, next) };
    }
    let _ = next;
    digest_bytes(bytes, first_lane)
}

/// Computes [`digest_run`] of `bytes` and copies them to `target` in the same pass, so memory is read once. The stores may bypass the
/// cache: call [`order_copies`] before others are told of them.
///
/// # Safety
/// `target` is valid for writes of `bytes.len()` bytes. Nobody else accesses these bytes, and they do not overlap `bytes`.
pub unsafe fn digest_copy(bytes: &[u8], target: *mut u8, first_lane: u64, next: *const u8) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if wide::available() {
        // SAFETY: the CPU has AVX2, as `available` has checked; the rest is the caller's promise.
        return unsafe { wide::digest_copy(bytes, target, first_lane, next) };
    }
    let _ = next;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    digest_bytes(bytes, first_lane)
}

/// Copies `bytes` to `target` as [`digest_copy`] does.
///
/// # Safety
/// As [`digest_copy`].
pub unsafe fn stream_copy(bytes: &[u8], target: *mut u8, next: *const u8) {
    #[cfg(target_arch = "x86_64")]
    if wide::available() {
        // SAFETY: the CPU has AVX2, as `available` has checked; the rest is the caller's promise.
        return unsafe { wide::stream_copy(bytes, target, next) };
    }
    let _ = next;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
}

/// Orders the stores of [`digest_copy`] and [`stream_copy`] before all later stores of this thread.
pub fn order_copies() {
    #[cfg(target_arch = "x86_64")]
    wide::fence();
}

#[inline(always)]
fn digest_bytes(bytes: &[u8], first_lane: u64) -> u64 {
    let (lanes, rest) = bytes.as_chunks::<8>();
    let mut padded = [0u8; 8];
    padded[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(padded);
    digest_lanes(lanes.iter().copied().chain(last).map(u64::from_le_bytes), first_lane)
}

/// Digest of f32 values by their bits: the digest of their little-endian bytes, beginning with lane 0.
pub fn digest_f32(values: &[f32]) -> u64 {
    let (lanes, rest) = values.as_chunks::<2>();
    let lane = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    digest_lanes(lanes.iter().map(|&[low, high]| lane(low, high)).chain(rest.iter().map(|&low| lane(low, 0.0))), 0)
}

#[inline(always)]
fn digest_lanes(lanes: impl Iterator<Item = u64>, first_lane: u64) -> u64 {
    let mut key = first_lane.wrapping_add(1).wrapping_mul(LANE_STEP);
    // `fold`, not `for`: folding a chain compiles to two plain loops.
    lanes.fold(0, |sum: u64, value| {
        let next = sum.wrapping_add(share(value, key));
        key = key.wrapping_add(LANE_STEP);
        next
    })
}

/// Order-dependent 64-bit hash of a byte string, for fingerprints. Not cryptographic.
pub fn hash_bytes(seed: u64, bytes: &[u8]) -> u64 {
    let mut state = mix(seed ^ LANE_STEP ^ bytes.len() as u64);
    for chunk in bytes.chunks(8) {
        let mut padded = [0u8; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        state = mix(state ^ u64::from_le_bytes(padded)).wrapping_add(LANE_STEP);
    }
    mix(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_sees_every_bit_and_every_swap() {
        let base: Vec<u8> = (0..200u32).map(|i| (i * 37 % 251) as u8).collect();
        let want = digest_block(&base, 0);
        for bit in 0..base.len() * 8 {
            let mut flipped = base.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(digest_block(&flipped, 0), want, "bit {bit}");
        }
        let mut swapped = base.clone();
        swapped[0..8].copy_from_slice(&base[8..16]);
        swapped[8..16].copy_from_slice(&base[0..8]);
        assert_ne!(digest_block(&swapped, 0), want);
        assert_ne!(digest_block(&base, 25), want, "the same bytes in another layer");
    }

    #[test]
    fn digests_add_up_over_pieces() {
        let base: Vec<u8> = (0..256u32).map(|i| i as u8).collect();
        let whole = digest_block(&base, 3);
        let parts = digest_block(&base[..64], 3).wrapping_add(digest_block(&base[64..], 3 + 8));
        assert_eq!(whole, parts);
    }

    #[test]
    fn copies_digest_to_the_same_and_copy_what_they_must() {
        let base: Vec<u8> = (0..40_000u32).map(|i| (i.wrapping_mul(i) % 253) as u8).collect();
        // Every alignment of the target, with and without whole steps and lanes, shorter and longer than the prefetch distance.
        let short = (0..40).flat_map(|at| [0, 1, 8, 63, 64, 65, 200, 513, 900].map(|len| (at, len)));
        let nowhere = [std::ptr::null(), base.as_ptr(), std::ptr::without_provenance(usize::MAX)];
        for ((at, len), next) in short.chain([(0, 16_384), (32, 39_000), (7, 39_999)]).zip(nowhere.into_iter().cycle())
        {
            let (want, first_lane) = (digest_bytes(&base[..len], 77), 77);
            assert_eq!(digest_block(&base[..len], first_lane), want, "{len} bytes");
            assert_eq!(digest_run(&base[..len], first_lane, next), want, "{len} bytes, then {next:?}");
            let (mut copied, mut streamed) = (vec![0xee; at + len + 40], vec![0xee; at + len + 40]);
            // SAFETY: both have room for at + len bytes, and nobody else knows them.
            unsafe {
                assert_eq!(
                    digest_copy(&base[..len], copied.as_mut_ptr().add(at), first_lane, next),
                    want,
                    "{len} at {at}"
                );
                stream_copy(&base[..len], streamed.as_mut_ptr().add(at), next);
            }
            for target in [copied, streamed] {
                assert_eq!(target[at..at + len], base[..len]);
                assert!(target[..at].iter().chain(&target[at + len..]).all(|byte| *byte == 0xee), "{len} at {at}");
            }
        }
    }

    #[test]
    fn the_digest_of_floats_is_that_of_their_bytes() {
        for count in [0, 1, 2, 7, 48] {
            let values: Vec<f32> = (0..count).map(|i| (i as f32 - 3.0) / 7.0).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(digest_f32(&values), digest_block(&bytes, 0), "{count} values");
        }
        assert_ne!(digest_f32(&[0.0]), digest_f32(&[-0.0]), "by bits, not by value");
    }

    #[test]
    fn values_are_pinned() {
        // These values are part of the wire contract: other implementations (AVX2, CUDA) must give the same.
        assert_eq!(digest_block(&[], 0), 0);
        assert_eq!(digest_block(&[0; 8], 0), 0xcdf6_0a31_6e34_11e6);
        assert_eq!(digest_block(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 7), 0xb46a_82c6_cd76_8fd5);
        assert_ne!(hash_bytes(0, b"a"), hash_bytes(0, b"a\0"));
    }
}
