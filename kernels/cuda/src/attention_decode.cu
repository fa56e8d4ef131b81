// Paged attention of decode rows: one query token a sequence, split over its KV so that few sequences fill the device.
//
// q, out: [rows, heads, head_dim] of q_type and out_type. tiles: one row each, or none. blocks: block tables. A split is `split` positions counted
// from position 0 of the sequence, whatever else is in the batch (I1); splits are what grid and scratch have room for, at least those of
// the longest sequence. A row that sees one split alone is done with it; the others leave sums in the scratch,
// partial: [tile_count, heads, splits, head_dim] f32 and stats: [tile_count, heads, splits] (largest score, sum of weights), which
// baton_attention_combine brings together, in ascending order. Same operation: `attention` in kernels/src/backend.rs. Arithmetic and
// rounding: attention.cuh.
//
// Threads: a thread block has the heads of one KV head (up to sixteen; more in further blocks) and one split; its four warps take every
// fourth sixteen slots. Bytes moved: K and V of the visible slots once for each sixteen heads; scratch, at 256 positions a split and
// four heads, 3% more. Bound: memory bandwidth. Limits: groups without sinks; pools of f16, bf16, q8,
// fp8; head_dim a multiple of 8 up to 256; split a multiple of 64.
#include "attention.cuh"

namespace baton {

struct AttentionDecode {
    Attention a;
    float* partial;
    float2* stats;
    u32 split;
    u32 splits;
};

/// The same parameters serve both kernels.
struct AttentionCombine {
    AttentionDecode d;
};

constexpr u32 DECODE_WARPS = 4;
constexpr u32 DECODE_HEADS = 16;
constexpr u32 COMBINE_WARPS = 4;

inline Launch launch_of(const AttentionDecode& p) {
    u32 head_parts = parts(p.a.heads / p.a.kv_heads, DECODE_HEADS);
    return {dim3(p.a.tile_count, p.a.kv_heads * head_parts, p.splits), dim3(DECODE_WARPS * WARP)};
}

inline Launch launch_of(const AttentionCombine& p) {
    return {dim3(p.d.a.tile_count, parts(p.d.a.heads, COMBINE_WARPS)), dim3(COMBINE_WARPS * WARP)};
}

/// The first and the last split that a row at `position` sees.
__device__ inline uint2 splits_of(const AttentionDecode& p, u32 position) {
    return make_uint2(first_visible(position, p.a.window) / p.split, position / p.split);
}

/// Stores an octet of a head's sums: divided by the sum of weights where there is no other split, else into the scratch.
__device__ inline void put_sums(const AttentionDecode& p, const Tile& tile, u32 head, u32 split, bool alone, u32 d, Octet x, float sum) {
    if (!alone) {
        u64 at = (static_cast<u64>(blockIdx.x) * p.a.heads + head) * p.splits + split;
        store8(Element::F32, p.partial, at * p.a.planes.head_dim + d, x);
        return;
    }
    float inverse = 1.0f / sum;
#pragma unroll
    for (u32 j = 0; j < OCTET; j++) x.x[j] *= inverse;
    store8(p.a.out_type, p.a.out, result_at(p.a, tile.row, head) + d, x);
}

/// What the warps of a block tell each other, 64 elements of head_dim at a time. Rows are padded against bank conflicts.
template <u32 DIM>
struct DecodeShared {
    SharedQueries<DIM> queries;
    float max[DECODE_WARPS][DECODE_HEADS];
    float sum[DECODE_WARPS][DECODE_HEADS];
    float out[DECODE_WARPS][DECODE_HEADS][64 + 4];
};

template <KvType T, u32 DIM>
__device__ inline void attention_decode(const AttentionDecode& p) {
    Tile tile = p.a.tiles[blockIdx.x];
    uint2 seen = splits_of(p, tile.position);
    u32 split = blockIdx.z;
    if (tile.rows == 0 || split < seen.x || split > seen.y) return;
    using Shared = DecodeShared<DIM>;
    BATON_SHARED(Shared, shared);
    u32 group = p.a.heads / p.a.kv_heads, head_parts = parts(group, DECODE_HEADS);
    u32 kv_head = blockIdx.y / head_parts, first_head = blockIdx.y % head_parts * DECODE_HEADS;
    u32 heads = min(group - first_head, DECODE_HEADS), warp = threadIdx.x / WARP;
    u32 from = max(first_visible(tile.position, p.a.window), split * p.split), to = min(tile.position + 1, (split + 1) * p.split);
    Walk<T, DIM> walk{p.a, p.a.blocks + tile.table, kv_head, shared.queries, {}, {}, {}, {}, {}, {}};
    u64 at[2] = {};
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        u32 row = lane() / 4 + 8 * r;
        bool there = row < heads;
        walk.low[r] = there ? from : 0;
        walk.high[r] = there ? to : 0;
        at[r] = query_at(p.a, tile.row, kv_head * group + first_head + row);
    }
    walk.begin(at, warp, DECODE_WARPS);
    if (Walk<T, DIM>::Q_SHARED) __syncthreads();
    // Which warp takes which sixteen slots is counted from position 0 too.
    u32 first = from / 16 + (warp + DECODE_WARPS - from / 16 % DECODE_WARPS) % DECODE_WARPS;
    walk.template run<(DIM <= 128)>(first * 16, DECODE_WARPS * 16, from, to);
    walk.finish();
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        if (lane() % 4 != 0) continue;
        shared.max[warp][lane() / 4 + 8 * r] = walk.max[r];
        shared.sum[warp][lane() / 4 + 8 * r] = walk.sum[r];
    }
    u32 row = threadIdx.x / 8, head = kv_head * group + first_head + row;
    float weight[DECODE_WARPS], largest = -INFINITY, sum = 0.0f;
#pragma unroll
    for (u32 c = 0; c < DIM / 64; c++) {
        if (64 * c >= p.a.planes.head_dim) break;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                Octet x = walk.octet(c, r, i);
                store8(Element::F32, &shared.out[warp][lane() / 4 + 8 * r][lane() % 4 * 16 + 8 * i], 0, x);
            }
        }
        __syncthreads();
        if (c == 0) {
            for (u32 w = 0; w < DECODE_WARPS; w++) largest = max(largest, shared.max[w][row]);
            float origin = largest == -INFINITY ? 0.0f : largest;
            for (u32 w = 0; w < DECODE_WARPS; w++) {
                weight[w] = exp2f(shared.max[w][row] - origin);
                sum = fmaf(shared.sum[w][row], weight[w], sum);
            }
        }
        u32 d = 64 * c + threadIdx.x % 8 * OCTET;
        Octet x = {};
#pragma unroll
        for (u32 w = 0; w < DECODE_WARPS; w++) {
            Octet part = load8(Element::F32, &shared.out[w][row][threadIdx.x % 8 * OCTET], 0);
#pragma unroll
            for (u32 j = 0; j < OCTET; j++) x.x[j] = fmaf(part.x[j], weight[w], x.x[j]);
        }
        if (row < heads && d < p.a.planes.head_dim) put_sums(p, tile, head, split, seen.x == seen.y, d, x, sum);
        // Before the next elements take their places.
        __syncthreads();
    }
    if (row < heads && threadIdx.x % 8 == 0 && seen.x != seen.y) {
        p.stats[(static_cast<u64>(blockIdx.x) * p.a.heads + head) * p.splits + split] = make_float2(largest, sum);
    }
}

#define BATON_DECODE(name, type, dim)                                                                                                \
    BATON_KERNEL(DECODE_WARPS* WARP) baton_attention_decode_##name##_##dim(const __grid_constant__ AttentionDecode p) {              \
        attention_decode<type, dim>(p);                                                                                              \
    }
#define BATON_DECODE_DIMS(name, type)                                                                                                \
    BATON_DECODE(name, type, 64)                                                                                                     \
    BATON_DECODE(name, type, 128)                                                                                                    \
    BATON_DECODE(name, type, 256)

BATON_DECODE_DIMS(f16, KvType::F16)
BATON_DECODE_DIMS(bf16, KvType::Bf16)
BATON_DECODE_DIMS(q8, KvType::Q8)
BATON_DECODE_DIMS(fp8, KvType::Fp8)

/// Brings a row's splits together: a warp a head. The first split alone gives what a row with one split has.
BATON_KERNEL(COMBINE_WARPS* WARP) baton_attention_combine(const __grid_constant__ AttentionCombine p) {
    const Attention& a = p.d.a;
    Tile tile = a.tiles[blockIdx.x];
    uint2 seen = splits_of(p.d, tile.position);
    u32 head = blockIdx.y * COMBINE_WARPS + threadIdx.x / WARP, d = lane() * OCTET;
    if (tile.rows == 0 || seen.x == seen.y || head >= a.heads || d >= a.planes.head_dim) return;
    u64 at = (static_cast<u64>(blockIdx.x) * a.heads + head) * p.d.splits;
    float largest = -INFINITY, sum = 0.0f;
    for (u32 s = seen.x; s <= seen.y; s++) largest = max(largest, p.d.stats[at + s].x);
    Octet x = {};
    for (u32 s = seen.x; s <= seen.y; s++) {
        float2 stats = p.d.stats[at + s];
        float weight = exp2f(stats.x - largest);
        sum = fmaf(stats.y, weight, sum);
        Octet part = load8(Element::F32, p.d.partial, (at + s) * a.planes.head_dim + d);
#pragma unroll
        for (u32 j = 0; j < OCTET; j++) x.x[j] = fmaf(part.x[j], weight, x.x[j]);
    }
    put_sums(p.d, tile, head, 0, true, d, x, sum);
}

} // namespace baton
