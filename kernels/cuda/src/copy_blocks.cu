// Copies of KV blocks: within a pool, between pools, to and from a staging buffer, of all heads or a contiguous slice of them.
//
// For each pair (from, to), each layer and each plane, `bytes` bytes go from `source` to `target`. Either side is described alone, so one
// kernel does `copy_block` of kernels/src/backend.rs, gathers blocks into a contiguous buffer (to = 0, 1, …,
// the buffer's own strides), scatters them back, and takes a tensor-parallel slice of the heads. Strides follow `PoolGeometry` and
// `KvLayout` in crates/types/src/layout.rs: a block of a layer is [K, V][kv_head]{…}.
//
// pairs: [count] (from, to). No target block is the source of another pair in one launch.
// Threads: a thread block copies a piece of one plane of one layer of one pair. Bytes moved: each byte read and written once. Bound:
// memory bandwidth. Limits: bytes, strides and offsets multiples of 16, as every slice of heads is; layers · planes up to 65,535.
#include "common.cuh"

namespace baton {

struct BlockSide {
    /// Its layer 0, block 0, plane 0, at the first byte to copy.
    u8* base;
    u64 layer_stride;
    u64 block_stride;
    u64 plane_stride;
};

struct CopyBlocks {
    BlockSide source;
    BlockSide target;
    const uint2* pairs;
    u64 bytes;
    u32 count;
    u32 layers;
    u32 planes;
};

constexpr u32 COPY_THREADS = 256;
/// 16-byte lanes that a thread block copies.
constexpr u32 COPY_LANES = COPY_THREADS * 4;

inline Launch launch_of(const CopyBlocks& p) {
    return {dim3(p.count, p.layers * p.planes, static_cast<u32>((p.bytes / 16 + COPY_LANES - 1) / COPY_LANES)), dim3(COPY_THREADS)};
}

__device__ inline u8* piece_of(const BlockSide& side, u32 layer, u32 block, u32 plane) {
    return side.base + layer * side.layer_stride + block * side.block_stride + plane * side.plane_stride;
}

BATON_KERNEL(COPY_THREADS) baton_copy_blocks(const __grid_constant__ CopyBlocks p) {
    uint2 pair = p.pairs[blockIdx.x];
    u32 layer = blockIdx.y / p.planes, plane = blockIdx.y % p.planes;
    const uint4* from = reinterpret_cast<const uint4*>(piece_of(p.source, layer, pair.x, plane));
    uint4* to = reinterpret_cast<uint4*>(piece_of(p.target, layer, pair.y, plane));
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
