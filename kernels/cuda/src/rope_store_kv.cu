// Rotates q and k, and stores k and v, rounded to the pool's type, at their positions' slots.
//
// q: [rows, heads, head_dim], k and v: [rows, kv_heads, head_dim] of in_type, each with a stride of its own, so that they may be parts of
// one product's rows. q_out: as q, of q_type; may be q where types and strides are the same. cos, sin: [position, head_dim / 2] f32. Pairs
// are (x[i], x[i + head_dim / 2]). tiles: which rows belong to which sequence; blocks: their tables. Same operation: `rope_and_store_kv` in
// kernels/src/backend.rs; with f32 in, q and the pool get the same bits as from kernels/src/cpu/kv_store.rs. Rounding and places: kv.cuh.
//
// Threads: a warp takes one head of one row; a thread block WARPS of them. Bytes moved per token: q, k, v once, q_out and their rows in the
// pool once, cos and sin once for each head (L1). Bound: memory bandwidth. Limits: groups without sinks (no second
// half of q); head_dim a multiple of 8 up to 256.
#include "kv.cuh"

namespace baton {

struct RopeStoreKv {
    KvPlanes planes;
    const void* q;
    const void* k;
    const void* v;
    void* q_out;
    const float* cos;
    const float* sin;
    const Tile* tiles;
    const u32* blocks;
    Element in_type;
    Element q_type;
    u32 tile_count;
    /// Rows of the largest tile.
    u32 tile_rows;
    u32 heads;
    u32 kv_heads;
    /// Elements from one row to the next.
    u32 q_stride;
    u32 k_stride;
    u32 v_stride;
    u32 q_out_stride;
};

constexpr u32 ROPE_WARPS = 4;

inline Launch launch_of(const RopeStoreKv& p) {
    return {dim3(p.tile_count, parts(p.tile_rows * (p.heads + 2 * p.kv_heads), ROPE_WARPS)), dim3(ROPE_WARPS * WARP)};
}

/// Elements d..d + 8 of a vector after its rotation.
__device__ inline Octet rotated(Element type, const void* x, u64 at, const float* cos, const float* sin, u32 dim, u32 d) {
    u32 half = dim / 2;
    Octet own = load8(type, x, at + d), out;
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        // The partner's octet need not begin at a multiple of 8.
        bool first = d + i < half;
        u32 pair = first ? d + i : d + i - half;
        u64 partner = at + (first ? d + i + half : pair);
        float other = type == Element::F32    ? static_cast<const float*>(x)[partner]
                      : type == Element::Bf16 ? __bfloat162float(static_cast<const bf16*>(x)[partner])
                                              : __half2float(static_cast<const f16*>(x)[partner]);
        float c = cos[pair], s = sin[pair];
        out.x[i] = first ? fmaf(own.x[i], c, -(other * s)) : fmaf(own.x[i], c, other * s);
    }
    return out;
}

BATON_KERNEL(ROPE_WARPS * WARP) baton_rope_store_kv(const __grid_constant__ RopeStoreKv p) {
    Tile tile = p.tiles[blockIdx.x];
    u32 dim = p.planes.head_dim, vectors = p.heads + 2 * p.kv_heads;
    u32 task = blockIdx.y * ROPE_WARPS + threadIdx.x / WARP;
    u32 j = task / vectors, vector = task % vectors;
    if (j >= tile.rows) return;
    u64 row = tile.row + j;
    u32 position = tile.position + j, d = lane() * OCTET;
    const float* cos = p.cos + static_cast<u64>(position) * (dim / 2);
    const float* sin = p.sin + static_cast<u64>(position) * (dim / 2);
    Octet x = {};
    if (vector < p.heads) {
        u64 at = row * p.q_stride + vector * dim, to = row * p.q_out_stride + vector * dim;
        if (d < dim) x = rotated(p.in_type, p.q, at, cos, sin, dim, d);
        // q_out may be q: every lane has read before one writes.
        __syncwarp();
        if (d < dim) store8(p.q_type, p.q_out, to + d, x);
        return;
    }
    u32 plane = vector < p.heads + p.kv_heads ? 0 : 1;
    u32 head = vector - p.heads - plane * p.kv_heads;
    u64 at = row * (plane == 0 ? p.k_stride : p.v_stride) + head * dim;
    if (d < dim) x = plane == 0 ? rotated(p.in_type, p.k, at, cos, sin, dim, d) : load8(p.in_type, p.v, at + d);
    kv_store_row(p.planes.type, kv_row_at(p.planes, p.blocks + tile.table, head, position, plane), dim, x);
}

} // namespace baton
