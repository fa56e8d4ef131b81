// Digests of KV blocks (I2): for each listed block, the share of some of its layers is added to digests[i].
//
// The value is that of `digest_block` in crates/types/src/digest.rs, bit for bit: a wrapping sum over 8-byte lanes of
// share(lane, key), key = (lane number + 1) · LANE_STEP. It does not depend on the order of lanes, so atomic additions do not make it
// vary. A layer's first lane is `KvLayout::first_lane` (crates/types/src/layout.rs): blocks of a layer have whole lanes.
//
// pool: layer `first_layer`'s block 0. digests: [count], added to; the caller zeroes them before the first layer.
// Threads: a thread block for each (block, layer). Bytes moved: the blocks once. Bound: memory bandwidth.
// Limits: block_bytes a multiple of 8, as every layout's is; layers up to 65,535 a launch.
#include "common.cuh"

namespace baton {

struct DigestBlocks {
    const u8* pool;
    const u32* blocks;
    u64* digests;
    /// Bytes of one layer's part of a block, and from one layer to the next.
    u64 block_bytes;
    u64 layer_stride;
    u32 count;
    u32 first_layer;
    u32 layers;
};

constexpr u32 DIGEST_THREADS = 256;
constexpr u64 LANE_STEP = 0x9e3779b97f4a7c15ull;

inline Launch launch_of(const DigestBlocks& p) { return {dim3(p.count, p.layers), dim3(DIGEST_THREADS)}; }

__device__ inline u64 digest_share(u64 value, u64 key) {
    u64 x = value ^ key;
    return (x & 0xffffffffull) * (x >> 32) + (x << 32 | x >> 32);
}

BATON_KERNEL(DIGEST_THREADS) baton_digest_blocks(const __grid_constant__ DigestBlocks p) {
    const u8* block = p.pool + blockIdx.y * p.layer_stride + p.blocks[blockIdx.x] * p.block_bytes;
    u64 lanes = p.block_bytes / 8;
    u64 first = lanes * (p.first_layer + blockIdx.y);
    const u64* values = reinterpret_cast<const u64*>(block);
    u64 sum = 0;
    for (u64 i = threadIdx.x; i < lanes; i += DIGEST_THREADS) sum += digest_share(values[i], (first + i + 1) * LANE_STEP);
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(&p.digests[blockIdx.x], sum);
}

} // namespace baton
