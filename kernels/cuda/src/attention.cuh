// Attention by one warp: sixteen query rows against the pool's K and V, sixteen slots at a time. What decode and prefill share.
//
// A row is one query token with one query head; the sixteen share a KV head, so K and V are read once for all of them (GQA-packed).
// Slots are taken in ascending order from a multiple of 16, with an online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et
// al. 2022); what others of the sixteen see and a row does not changes no bit of it, so its result depends on its own position only
// (I1). Decode and prefill take a row's slots in different portions, so they agree to rounding, not bit for bit.
//
// Tensor cores compute q · K and p · V with f32 sums. K and V need no shared memory: a sum over head_dim may be taken in any order of
// its elements, and the columns of V in any order too, so each lane loads 16 bytes (8 elements) of a row and calls them what the
// fragments of mma.cuh need:
//
//   q · K, 32 elements of head_dim at a time: lane (g, t) holds elements 8t..8t + 8 of slot g. The first instruction takes its first
//   four as k = 2t, 2t + 1, 2t + 8, 2t + 9, the second its last four; q is loaded the same way.
//   p · V, 64 elements of head_dim at a time: lane (g, t) holds elements 8g..8g + 8 of slots 2t, 2t + 1, 2t + 8, 2t + 9. Column g of
//   instruction j is element 8g + j.
//
// Rounding: q to 16 bits before, p (with V's scale, for quantised types) to 16 bits, sums in f32. f16 pools use f16, all others bf16, which
// holds the codes of q8 and fp8 exactly; K's scale multiplies the score. Layout of the pool: kv.cuh. Slots that no row sees are not
// loaded: they may hold anything.
#pragma once

#include "kv.cuh"
#include "mma.cuh"

namespace baton {

/// Element type of the tensor-core operands for a pool's type.
__host__ __device__ constexpr Element mma_type(KvType type) { return type == KvType::F16 ? Element::F16 : Element::Bf16; }
__host__ __device__ constexpr bool kv_scaled(KvType type) { return type == KvType::Q8 || type == KvType::Fp8; }

/// What decode and prefill have in common.
struct Attention {
    KvPlanes planes;
    const void* q;
    void* out;
    const Tile* tiles;
    const u32* blocks;
    Element q_type;
    Element out_type;
    u32 tile_count;
    /// Rows of the largest tile.
    u32 tile_rows;
    u32 heads;
    u32 kv_heads;
    /// Elements of q from one row to the next; those of out lie one behind the other.
    u32 q_stride;
    /// A query sees this many latest positions, itself included; 0: all.
    u32 window;
    /// Scores are multiplied by this and log2(e), so that exp2 serves.
    float scale_log2;
};

/// Where a query head's elements begin, and its result's.
__device__ inline u64 query_at(const Attention& p, u32 row, u32 head) {
    return static_cast<u64>(row) * p.q_stride + head * p.planes.head_dim;
}
__device__ inline u64 result_at(const Attention& p, u32 row, u32 head) {
    return (static_cast<u64>(row) * p.heads + head) * p.planes.head_dim;
}

/// First position that a query at `position` sees.
__host__ __device__ inline u32 first_visible(u32 position, u32 window) { return window == 0 || position < window ? 0 : position + 1 - window; }

/// Eight elements of a row of K or V, as words of two 16-bit elements.
struct Words8 {
    u32 w[4];
};

/// Two int8 codes, in the low halves of two words each, as two bf16.
__device__ inline u32 int8_to_bf16(u32 low, u32 high) {
    return pack2(Element::Bf16, static_cast<float>(static_cast<i8>(low)), static_cast<float>(static_cast<i8>(high)));
}

/// Two E4M3 codes as two bf16, exactly: moved into a bf16 the exponent's bias differs by 120.
__device__ inline u32 e4m3_to_bf16(u32 low, u32 high) {
    u32 moved = (low & 0x80) << 8 | (low & 0x7f) << 4 | (high & 0x80) << 24 | (high & 0x7f) << 20;
    float first = __uint_as_float(moved << 16) * 0x1p120f, second = __uint_as_float(moved & 0xffff0000u) * 0x1p120f;
    return __float_as_uint(first) >> 16 | (__float_as_uint(second) & 0xffff0000u);
}

template <KvType T>
__device__ inline Words8 load_words(const u8* row, u32 d, bool inside) {
    Words8 out = {};
    if (!inside) return out;
    if constexpr (kv_scaled(T)) {
        uint2 raw = *reinterpret_cast<const uint2*>(row + d);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 pair = (i < 2 ? raw.x : raw.y) >> (i % 2 * 16);
            out.w[i] = T == KvType::Q8 ? int8_to_bf16(pair & 255, pair >> 8 & 255) : e4m3_to_bf16(pair & 255, pair >> 8 & 255);
        }
    } else {
        uint4 raw = *reinterpret_cast<const uint4*>(row + 2 * d);
        out = {{raw.x, raw.y, raw.z, raw.w}};
    }
    return out;
}

/// q of sixteen rows as fragments, where registers do not hold them: by chunk of 32 elements and lane, those of row g and of row g + 8.
template <u32 DIM>
struct SharedQueries {
    static constexpr bool USED = DIM > 128;
    uint4 words[USED ? DIM / 32 : 1][WARP][2];
};

/// The walk of a warp's sixteen rows over K and V. This lane has a part of rows g and g + 8.
template <KvType T, u32 DIM>
struct Walk {
    static constexpr Element TYPE = mma_type(T);
    static constexpr u32 CHUNKS = DIM / 32;
    static constexpr bool Q_SHARED = SharedQueries<DIM>::USED;

    const Attention& p;
    const u32* table;
    u32 kv_head;
    SharedQueries<DIM>& queries;
    /// Words of q of both rows, by chunks of 32 elements, where they are not shared.
    u32 q[Q_SHARED ? 1 : CHUNKS][2][4];
    /// Positions both rows see: from `low` to before `high`; none where they are equal.
    u32 low[2];
    u32 high[2];
    /// Largest score so far, in powers of two, and this lane's share of the sum of weights.
    float max[2];
    float sum[2];
    /// Element 16t + 8i + j of part c of row g + 8r is out[c][j][2r + i].
    float out[DIM / 64][8][4];

    /// Begins with no slot seen. `at[r]`: where the row's q begins, in elements; rows that are not there have none (`high` 0). Of shared
    /// queries this warp brings chunks first, first + step, …; the caller waits for the others.
    __device__ void begin(const u64 (&at)[2], u32 first, u32 step) {
        if constexpr (Q_SHARED) {
            for (u32 c = first; c < CHUNKS; c += step) {
                u32 words[2][4];
                load_q(at, c, words);
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    queries.words[c][lane()][r] = make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
                }
            }
        } else {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) load_q(at, c, q[c]);
        }
#pragma unroll
        for (u32 c = 0; c < DIM / 64; c++) {
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) out[c][j][i] = 0.0f;
            }
        }
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    __device__ void load_q(const u64 (&at)[2], u32 c, u32 (&words)[2][4]) const {
        u32 d = 32 * c + 8 * (lane() % 4);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            Octet x = {};
            if (high[r] > 0 && d < p.planes.head_dim) x = load8(p.q_type, p.q, at[r] + d);
#pragma unroll
            for (u32 i = 0; i < 4; i++) words[r][i] = pack2(TYPE, x.x[2 * i], x.x[2 * i + 1]);
        }
    }

    /// This lane's words of q in a chunk, for the first instruction and the second.
    __device__ void fragments(u32 c, u32 (&first)[4], u32 (&second)[4]) const {
        uint4 low, high;
        if constexpr (Q_SHARED) {
            low = queries.words[c][lane()][0];
            high = queries.words[c][lane()][1];
        } else {
            low = make_uint4(q[c][0][0], q[c][0][1], q[c][0][2], q[c][0][3]);
            high = make_uint4(q[c][1][0], q[c][1][1], q[c][1][2], q[c][1][3]);
        }
        first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
        second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
    }

    /// Folds in sixteen slots from `first` on, and from every `step` further, a multiple of 16 both, of which some row of the warp sees
    /// those from `from` to before `to`. AHEAD: a block's number is asked for a turn before, so that no load of K waits for it, for a
    /// register.
    template <bool AHEAD>
    __device__ void run(u32 first, u32 step, u32 from, u32 to) {
        u32 block = AHEAD && first < to ? table[first / p.planes.block_size] : 0;
        for (u32 base = first; base < to; base += step) {
            if (!AHEAD) block = table[base / p.planes.block_size];
            u32 next = AHEAD && base + step < to ? table[(base + step) / p.planes.block_size] : 0;
            fold(base, block, from, to);
            block = next;
        }
    }

    /// Folds in slots base..base + 16, which lie in `block`.
    __device__ void fold(u32 base, u32 block, u32 from, u32 to) {
        u32 g = lane() / 4, t = lane() % 4, dim = p.planes.head_dim, bytes = kv_row_bytes(T, dim);
        u32 slot = base % p.planes.block_size;
        const u8* keys = p.planes.base + block * p.planes.block + kv_head * p.planes.head;
        const u8* values = keys + p.planes.value;
        float score[2][4] = {};
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            u32 d = 32 * c + 8 * t, first[4], second[4];
            fragments(c, first, second);
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                u32 position = base + 8 * n + g;
                Words8 k = load_words<T>(keys + (slot + 8 * n + g) * bytes, d, position >= from && position < to && d < dim);
                mma16816<TYPE>(score[n], first, k.w[0], k.w[1]);
                mma16816<TYPE>(score[n], second, k.w[2], k.w[3]);
            }
        }
        // Parameters of slots 8n + 2t and the next.
        float value_scale[2][2];
        if constexpr (kv_scaled(T)) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                u64 at = static_cast<u64>(p.planes.block_size) * bytes + (slot + 8 * n + 2 * t) * sizeof(f16);
                u32 k = *reinterpret_cast<const u32*>(keys + at), v = *reinterpret_cast<const u32*>(values + at);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 position = base + 8 * n + 2 * t + i;
                    bool inside = position >= from && position < to;
                    float key_scale = inside ? __half2float(__ushort_as_half(static_cast<u16>(k >> (16 * i)))) : 0.0f;
                    value_scale[n][i] = inside ? __half2float(__ushort_as_half(static_cast<u16>(v >> (16 * i)))) : 0.0f;
                    score[n][i] *= key_scale;
                    score[n][2 + i] *= key_scale;
                }
            }
        }
        weigh(base, score);
        if constexpr (kv_scaled(T)) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) score[n][i] *= value_scale[n][i % 2];
            }
        }
        u32 weights[4] = {pack2(TYPE, score[0][0], score[0][1]), pack2(TYPE, score[0][2], score[0][3]),
                          pack2(TYPE, score[1][0], score[1][1]), pack2(TYPE, score[1][2], score[1][3])};
#pragma unroll
        for (u32 c = 0; c < DIM / 64; c++) {
            u32 d = 64 * c + 8 * g;
            Words8 v[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 s = 2 * t + i % 2 + i / 2 * 8, position = base + s;
                v[i] = load_words<T>(values + (slot + s) * bytes, d, position >= from && position < to && d < dim);
            }
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u32 halves = j % 2 ? 0x7632 : 0x5410;
                mma16816<TYPE>(out[c][j], weights, __byte_perm(v[0].w[j / 2], v[1].w[j / 2], halves),
                               __byte_perm(v[2].w[j / 2], v[3].w[j / 2], halves));
            }
        }
    }

    /// Turns sixteen scores into weights, in place, and takes them into maximum and sum; scales what was summed when a maximum rises.
    __device__ void weigh(u32 base, float (&score)[2][4]) {
        u32 t = lane() % 4;
        float factor[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float largest = -INFINITY;
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 position = base + 8 * n + 2 * t + i;
                    float& x = score[n][2 * r + i];
                    x = position >= low[r] && position < high[r] ? x * p.scale_log2 : -INFINITY;
                    largest = x > largest ? x : largest;
                }
            }
            // The four lanes of a row.
            largest = lanes_max(largest, 4);
            largest = max[r] > largest ? max[r] : largest;
            // A row that has seen nothing yet has no maximum to take differences to.
            float origin = largest == -INFINITY ? 0.0f : largest;
            factor[r] = max[r] == largest ? 1.0f : exp2f(max[r] - origin);
            max[r] = largest;
            float added = 0.0f;
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float& x = score[n][2 * r + i];
                    x = exp2f(x - origin);
                    added += x;
                }
            }
            sum[r] = fmaf(sum[r], factor[r], added);
        }
        // Multiplying by 1 changes nothing, so to skip it changes no bit.
        if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (u32 c = 0; c < DIM / 64; c++) {
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) out[c][j][i] *= factor[i / 2];
            }
        }
    }

    /// Sums of weights of both rows, in all their lanes.
    __device__ void finish() {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
        }
    }

    /// Elements 64c + 16t + 8i .. + 8 of row g + 8r, as summed so far.
    __device__ Octet octet(u32 c, u32 r, u32 i) const {
        Octet x;
#pragma unroll
        for (u32 j = 0; j < 8; j++) x.x[j] = out[c][j][2 * r + i];
        return x;
    }
};

} // namespace baton
