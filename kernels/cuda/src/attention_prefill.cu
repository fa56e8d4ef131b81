// Paged attention of prefill chunks: causal attention of the rows of each tile over their sequence's K and V in the pool, within the
// layer's window. The store of the chunk's own K and V comes before (rope_store_kv.cu), as on the CPU.
//
// q, out: [rows, heads, head_dim] of q_type and out_type. tiles: any cut of the batch's sequences; about 64 · kv_heads / heads rows a tile
// keep all warps busy. blocks: block tables. Same operation: `attention` in kernels/src/backend.rs; `Tile` is its `Ragged`'s.
// Arithmetic and rounding: attention.cuh.
//
// Threads: a thread block has four warps, a warp sixteen of the tile's (row, head) pairs of one KV head; its walk begins at the first
// sixteen slots that its first row sees. Bytes moved: K and V of the visible slots once a warp, mostly from L1 and L2. Work:
// 4 · head_dim FLOP for each pair and visible slot, by mma.sync. Bound: L1 bandwidth. It is what every GPU
// and pool takes that attention_hopper.cu does not serve. Limits: groups without sinks; pools of f16, bf16, q8, fp8; head_dim a multiple of 8 up to 256.
#include "attention.cuh"

namespace baton {

struct AttentionPrefill {
    Attention a;
};

constexpr u32 PREFILL_WARPS = 4;
constexpr u32 WARP_ROWS = 16;

inline Launch launch_of(const AttentionPrefill& p) {
    u32 pairs = p.a.tile_rows * (p.a.heads / p.a.kv_heads);
    return {dim3(p.a.tile_count, p.a.kv_heads, parts(pairs, PREFILL_WARPS * WARP_ROWS)), dim3(PREFILL_WARPS * WARP)};
}

template <KvType T, u32 DIM>
__device__ inline void attention_prefill(const Attention& p) {
    Tile tile = p.tiles[blockIdx.x];
    u32 group = p.heads / p.kv_heads, pairs = tile.rows * group;
    u32 first = (blockIdx.z * PREFILL_WARPS + threadIdx.x / WARP) * WARP_ROWS;
    if (first >= pairs) return;
    u32 last = min(first + WARP_ROWS, pairs) - 1;
    struct Shared {
        SharedQueries<DIM> of_warp[PREFILL_WARPS];
    };
    BATON_SHARED(Shared, shared);
    Walk<T, DIM> walk{p, p.blocks + tile.table, blockIdx.y, shared.of_warp[threadIdx.x / WARP], {}, {}, {}, {}, {}, {}};
    u64 at[2] = {};
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        u32 pair = first + lane() / 4 + 8 * r;
        bool there = pair <= last;
        u32 position = tile.position + pair / group;
        walk.low[r] = there ? first_visible(position, p.window) : 0;
        walk.high[r] = there ? position + 1 : 0;
        at[r] = query_at(p, tile.row + pair / group, blockIdx.y * group + pair % group);
    }
    // A lane reads only the words of q that it wrote itself.
    walk.begin(at, 0, 1);
    u32 from = first_visible(tile.position + first / group, p.window), to = tile.position + last / group + 1;
    walk.template run<false>(from / 16 * 16, 16, from, to);
    walk.finish();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        float inverse = 1.0f / walk.sum[r];
        u32 pair = first + lane() / 4 + 8 * r;
        u64 to = result_at(p, tile.row + pair / group, blockIdx.y * group + pair % group);
#pragma unroll
        for (u32 c = 0; c < DIM / 64; c++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 d = 64 * c + lane() % 4 * 16 + 8 * i;
                Octet x = walk.octet(c, r, i);
#pragma unroll
                for (u32 j = 0; j < OCTET; j++) x.x[j] *= inverse;
                if (walk.high[r] > 0 && d < p.planes.head_dim) store8(p.out_type, p.out, to + d, x);
            }
        }
    }
}

#define BATON_PREFILL(name, type, dim)                                                                                               \
    BATON_KERNEL(PREFILL_WARPS* WARP) baton_attention_prefill_##name##_##dim(const __grid_constant__ AttentionPrefill p) {           \
        attention_prefill<type, dim>(p.a);                                                                                           \
    }
#define BATON_PREFILL_DIMS(name, type)                                                                                               \
    BATON_PREFILL(name, type, 64)                                                                                                    \
    BATON_PREFILL(name, type, 128)                                                                                                   \
    BATON_PREFILL(name, type, 256)

BATON_PREFILL_DIMS(f16, KvType::F16)
BATON_PREFILL_DIMS(bf16, KvType::Bf16)
BATON_PREFILL_DIMS(q8, KvType::Q8)
BATON_PREFILL_DIMS(fp8, KvType::Fp8)

} // namespace baton
