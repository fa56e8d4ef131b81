// Copies of KV blocks within a pool: for each pair (from, to) and each layer of a group. Same operation: `copy_block` in
// kernels/src/backend.rs. Strides follow `PoolGeometry` and `KvLayout` in crates/types/src/layout.rs: a block of a layer is
// [K, V][kv_head]{…}, and a layer's blocks lie behind one another.
//
// pairs: [count] (from, to). No target block is the source of another pair in one launch.
// Threads: a thread block copies a piece of one layer of one pair. Bytes moved: each byte read and written once. Bound:
// memory bandwidth. Limits: bytes and the stride multiples of 16, as every slice of heads is; layers up to 65,535.
#include "common.cuh"

namespace baton {

struct CopyBlocks {
    /// Layer 0's block 0.
    u8* base;
    u64 layer_stride;
    const uint2* pairs;
    /// Of a block in one layer.
    u64 bytes;
    u32 count;
    u32 layers;
};

constexpr u32 COPY_THREADS = 256;
/// 16-byte lanes that a thread block copies.
constexpr u32 COPY_LANES = COPY_THREADS * 4;

inline Launch launch_of(const CopyBlocks& p) {
    return {dim3(p.count, p.layers, static_cast<u32>((p.bytes / 16 + COPY_LANES - 1) / COPY_LANES)), dim3(COPY_THREADS)};
}

BATON_KERNEL(COPY_THREADS) baton_copy_blocks(const __grid_constant__ CopyBlocks p) {
    uint2 pair = p.pairs[blockIdx.x];
    u8* layer = p.base + blockIdx.y * p.layer_stride;
    const uint4* from = reinterpret_cast<const uint4*>(layer + pair.x * p.bytes);
    uint4* to = reinterpret_cast<uint4*>(layer + pair.y * p.bytes);
    u64 first = static_cast<u64>(blockIdx.z) * COPY_LANES + threadIdx.x;
    uint4 values[COPY_LANES / COPY_THREADS];
    // All loads before the stores, so that they are under way together.
#pragma unroll
    for (u32 i = 0; i < COPY_LANES / COPY_THREADS; i++) {
        u64 at = first + i * COPY_THREADS;
        if (at < p.bytes / 16) values[i] = from[at];
    }
#pragma unroll
    for (u32 i = 0; i < COPY_LANES / COPY_THREADS; i++) {
        u64 at = first + i * COPY_THREADS;
        if (at < p.bytes / 16) to[at] = values[i];
    }
}

} // namespace baton
