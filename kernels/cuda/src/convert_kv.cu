// KV of one type turned into another, for pools of two workers that differ: each row is read as attention reads it and rounded as a store
// rounds it, so the bytes are those that kernels/src/cpu/kv_convert.rs gives.
//
// source, target: `slices` slices of a head, one behind the other, each {[slot][head_dim] elements, [slot][parameters] f16}
// (`KvLayout::head_bytes`, crates/types/src/layout.rs). A gathered block is a run of such slices (copy_blocks.cu).
//
// Threads: a warp a row. Bytes moved: both once. Bound: memory bandwidth. Limits: head_dim a multiple of 8 up to 512.
#include "kv.cuh"

namespace baton {

struct ConvertKv {
    const u8* source;
    u8* target;
    KvType from;
    KvType to;
    u32 slices;
    u32 block_size;
    u32 head_dim;
};

constexpr u32 CONVERT_WARPS = 4;

inline Launch launch_of(const ConvertKv& p) {
    return {dim3(parts(p.slices * p.block_size, CONVERT_WARPS)), dim3(CONVERT_WARPS * WARP)};
}

__device__ inline u64 kv_slice_bytes(KvType type, u32 block_size, u32 dim) {
    return static_cast<u64>(block_size) * (kv_row_bytes(type, dim) + 2 * kv_row_parameters(type, dim));
}

BATON_KERNEL(CONVERT_WARPS * WARP) baton_convert_kv(const __grid_constant__ ConvertKv p) {
    u32 row = blockIdx.x * CONVERT_WARPS + threadIdx.x / WARP;
    if (row >= p.slices * p.block_size) return;
    u32 slice = row / p.block_size, slot = row % p.block_size, dim = p.head_dim;
    u8* source = const_cast<u8*>(p.source) + slice * kv_slice_bytes(p.from, p.block_size, dim);
    u8* target = p.target + slice * kv_slice_bytes(p.to, p.block_size, dim);
    KvRow from = kv_row(source, p.from, p.block_size, dim, slot), to = kv_row(target, p.to, p.block_size, dim, slot);
    Octet x[2] = {};
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
        u32 d = j * WARP * OCTET + lane() * OCTET;
        if (d < dim) x[j] = kv_load8(p.from, from, d);
    }
    kv_store_row(p.to, to, dim, x);
}

} // namespace baton
