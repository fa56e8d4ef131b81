// Paged attention of decode rows: one query token a sequence, split over its KV so that few sequences fill the device.
//
// q, out: [rows, heads, head_dim] of q_type and out_type. tiles: one row each. blocks: block tables, and behind them the list of work. A split
// is `split` positions counted from position 0 of the sequence, whatever else is in the batch (I1). The list has each split that a row
// sees, in any order. A row that sees one split alone is done with it. The others leave sums in the scratch, a slot for each split:
// partial: [slots, heads, head_dim] f32 and stats: [slots, heads] (largest score, sum of weights). Slots of a row lie one behind the other,
// ascending. The thread block that finishes a row's last split brings its splits together, in ascending order, so which one that is changes
// no bit. It is found by a count in memory, which is zero before and after a launch. No thread block waits for another. Same operation:
// `attention` in kernels/src/backend.rs. Arithmetic and rounding: attention.cuh.
//
// Threads: the grid is as large as the device has room for, whatever there is to do, and a captured launch reads from memory how much that
// is. A thread block takes every grid-th (split, heads of one KV head: up to sixteen, more are another's); its four warps take every
// fourth sixteen slots. Bytes moved: K and V of the visible slots once for each sixteen heads; scratch, at 256 positions a split and
// four heads, 3% more to write, and as much to read from L2. Bound: memory bandwidth. Limits: groups without sinks; pools of f16, bf16, q8,
// fp8; head_dim a multiple of 8 up to 256; split a multiple of 64.
#include "attention.cuh"

namespace baton {

/// The part of the list that a launch does: `count` splits from word `first` behind `blocks` on.
struct DecodeWork {
    u32 first;
    u32 count;
};

/// A split that a row sees, and its place in the scratch, which a row that sees no other does not use.
struct DecodeSplit {
    u32 tile;
    u32 split;
    u32 slot;
};

struct AttentionDecode {
    Attention a;
    const DecodeWork* work;
    float* partial;
    float2* stats;
    /// Splits that are done of each row and part of its heads: [slots, kv_heads, parts of sixteen heads], at the row's first slot.
    u32* done;
    u32 split;
    u32 thread_blocks;
};

constexpr u32 DECODE_WARPS = 4;
constexpr u32 DECODE_HEADS = 16;

inline Launch launch_of(const AttentionDecode& p) { return {dim3(p.thread_blocks), dim3(DECODE_WARPS * WARP)}; }

/// Stores an octet of a head's sums, divided by the sum of weights.
__device__ inline void put_result(const AttentionDecode& p, u32 row, u32 head, u32 d, Octet x, float sum) {
    float inverse = 1.0f / sum;
#pragma unroll
    for (u32 j = 0; j < OCTET; j++) x.x[j] *= inverse;
    store8(p.a.out_type, p.a.out, result_at(p.a, row, head) + d, x);
}

/// What is to be known of a split when its walk is over: its row and slot, how many splits its row sees before it and in all, and which heads.
struct Attended {
    u32 row;
    u32 slot;
    u32 before;
    u32 splits;
    u32 column;
};

/// What the warps of a block tell each other, 64 elements of head_dim at a time. Rows are padded against bank conflicts.
template <u32 DIM>
struct DecodeShared {
    SharedQueries<DIM> queries;
    float max[DECODE_WARPS][DECODE_HEADS];
    float sum[DECODE_WARPS][DECODE_HEADS];
    float out[DECODE_WARPS][DECODE_HEADS][64 + 4];
    /// Of the split that is attended to: kept here, as the walk has no register to spare.
    Attended of;
    /// Whether it is the last of its row to be done; and then the largest score of each head over all of the row.
    bool last;
    float largest[DECODE_HEADS];
};

/// Brings the splits of a row together for `heads` heads from `head` on. They lie in `count` slots from `slot` on.
__device__ inline void combine(const AttentionDecode& p, u32 row, u32 head, u32 heads, u32 slot, u32 count, float* largest) {
    u32 dim = p.a.planes.head_dim, octets = dim / OCTET;
    u64 first = static_cast<u64>(slot) * p.a.heads + head;
    for (u32 h = threadIdx.x / WARP; h < heads; h += DECODE_WARPS) {
        float x = -INFINITY;
        for (u32 s = lane(); s < count; s += WARP) x = max(x, p.stats[first + h + s * p.a.heads].x);
        x = lanes_max(x, WARP);
        if (lane() == 0) largest[h] = x;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < heads * octets; i += DECODE_WARPS * WARP) {
        u32 h = i / octets, d = i % octets * OCTET;
        float sum = 0.0f;
        Octet x = {};
        // Additions wait for each other, loads need not.
#pragma unroll 8
        for (u32 s = 0; s < count; s++) {
            u64 at = first + h + s * p.a.heads;
            float2 of = p.stats[at];
            float weight = exp2f(of.x - largest[h]);
            sum = fmaf(of.y, weight, sum);
            Octet part = load8(Element::F32, p.partial, at * dim + d);
#pragma unroll
            for (u32 j = 0; j < OCTET; j++) x.x[j] = fmaf(part.x[j], weight, x.x[j]);
        }
        put_result(p, row, head + h, d, x, sum);
    }
}

/// Attention of a row over one split for the heads of `column`, sixteen of a KV head at most; over all of its splits, where it is the last of
/// them to be done.
template <KvType T, u32 DIM>
__device__ inline void attend_split(const AttentionDecode& p, DecodeSplit at, u32 column, DecodeShared<DIM>& shared) {
    Tile tile = p.a.tiles[at.tile];
    u32 group = p.a.heads / p.a.kv_heads, head_parts = parts(group, DECODE_HEADS);
    u32 kv_head = column / head_parts, first_head = column % head_parts * DECODE_HEADS;
    u32 heads = min(group - first_head, DECODE_HEADS), warp = threadIdx.x / WARP;
    u32 visible = first_visible(tile.position, p.a.window);
    if (threadIdx.x == 0) {
        u32 seen = visible / p.split;
        shared.of = {tile.row, at.slot, at.split - seen, tile.position / p.split - seen + 1, column};
    }
    u32 from = max(visible, at.split * p.split), to = min(tile.position + 1, (at.split + 1) * p.split);
    Walk<T, DIM> walk{p.a, p.a.blocks + tile.table, kv_head, shared.queries, {}, {}, {}, {}, {}, {}};
    u64 q_at[2] = {};
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        u32 row = lane() / 4 + 8 * r;
        bool there = row < heads;
        walk.low[r] = there ? from : 0;
        walk.high[r] = there ? to : 0;
        q_at[r] = query_at(p.a, tile.row, kv_head * group + first_head + row);
    }
    walk.begin(q_at, warp, DECODE_WARPS);
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
    u32 row = threadIdx.x / 8, head = 0, count = 0;
    Attended of = {};
    u64 place = 0;
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
            of = shared.of;
            u32 first_head = of.column % head_parts * DECODE_HEADS;
            count = min(group - first_head, DECODE_HEADS);
            head = of.column / head_parts * group + first_head + row;
            place = static_cast<u64>(of.slot) * p.a.heads + head;
            for (u32 w = 0; w < DECODE_WARPS; w++) largest = max(largest, shared.max[w][row]);
            float origin = largest == -INFINITY ? 0.0f : largest;
            for (u32 w = 0; w < DECODE_WARPS; w++) {
                weight[w] = exp2f(shared.max[w][row] - origin);
                sum = fmaf(shared.sum[w][row], weight[w], sum);
            }
            if (row < count && threadIdx.x % 8 == 0 && of.splits > 1) p.stats[place] = make_float2(largest, sum);
        }
        u32 d = 64 * c + threadIdx.x % 8 * OCTET;
        Octet x = {};
#pragma unroll
        for (u32 w = 0; w < DECODE_WARPS; w++) {
            Octet part = load8(Element::F32, &shared.out[w][row][threadIdx.x % 8 * OCTET], 0);
#pragma unroll
            for (u32 j = 0; j < OCTET; j++) x.x[j] = fmaf(part.x[j], weight[w], x.x[j]);
        }
        if (row < count && d < p.a.planes.head_dim) {
            if (of.splits == 1) {
                put_result(p, of.row, head, d, x, sum);
            } else {
                store8(Element::F32, p.partial, place * p.a.planes.head_dim + d, x);
            }
        }
        // Before the next elements take their places, and before what is stored counts as done.
        __syncthreads();
    }
    if (of.splits == 1) return;
    if (threadIdx.x == 0) {
        // What all threads have stored comes before the count; what others had stored before theirs is seen after it. The count wraps to
        // zero by the last.
        __threadfence();
        u32* done = p.done + static_cast<u64>(of.slot - of.before) * p.a.kv_heads * head_parts + of.column;
        shared.last = atomicInc(done, of.splits - 1) == of.splits - 1;
        __threadfence();
    }
    __syncthreads();
    if (shared.last) combine(p, of.row, head - row, count, of.slot - of.before, of.splits, shared.largest);
}

template <KvType T, u32 DIM>
__device__ inline void attention_decode(const AttentionDecode& p) {
    using Shared = DecodeShared<DIM>;
    BATON_SHARED(Shared, shared);
    DecodeWork work = *p.work;
    const DecodeSplit* list = reinterpret_cast<const DecodeSplit*>(p.a.blocks + work.first);
    u32 columns = p.a.kv_heads * parts(p.a.heads / p.a.kv_heads, DECODE_HEADS);
    for (u32 i = blockIdx.x; i < work.count * columns; i += gridDim.x) attend_split<T, DIM>(p, list[i / columns], i % columns, shared);
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

} // namespace baton
