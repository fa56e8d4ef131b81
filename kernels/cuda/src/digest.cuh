// The share of one 8-byte lane in a digest: that of crates/types/src/digest.rs, bit for bit. Shares are added, wrapping, in any order.
#pragma once

#include "common.cuh"

namespace baton {

constexpr u64 LANE_STEP = 0x9e3779b97f4a7c15ull;

__device__ inline u64 digest_share(u64 value, u64 lane) {
    u64 x = value ^ (lane + 1) * LANE_STEP;
    return (x & 0xffffffffull) * (x >> 32) + (x << 32 | x >> 32);
}

} // namespace baton
