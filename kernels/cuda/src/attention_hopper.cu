// Paged attention of prefill chunks on Hopper, by wgmma and TMA: the same operation as attention_prefill.cu, for pools of f16 and bf16 with
// a head_dim of 64 or 128. Elsewhere the kernel traps; who launches it asks for compute capability 9.0 first.
//
// q, out, tiles, blocks: as there; about 128 · kv_heads / heads rows a tile keep all warps busy. pool: the layer's K and V as rows of
// head_dim elements, copied by boxes of 64 elements and box_slots(block_size) slots.
//
// Threads: a thread block has 128 of the tile's (row, head) pairs of one KV head. One warp of the first warpgroup brings K and V of 128 slots
// a turn into a ring in shared memory, a box a lane; the two others have 64 pairs each. In a turn they ask for the scores of these slots
// and for the products of V with the last turn's weights, and make weights of the scores while the latter are under way; they take
// turns in asking, so that one computes weights while the other multiplies. Both walk the slots that some row of the thread block
// sees, from a multiple of 128 on. So a row's slots are always taken in the same portions, and what a row does not see has a weight of
// 0: its result depends on its own position only (I1), but in another order of sums than in attention_prefill.cu. FlashAttention-3
// (Shah et al. 2024) has such a pipeline.
//
// Slots that no row sees may hold anything, NaNs too. Their scores are never looked at; of V, where 0 · NaN would count, they are set to 0 in
// shared memory before products are asked for.
//
// Rounding: q and weights to 16 bits, sums in f32, as in attention.cuh; 2^x flushes to 0. Bytes moved: K and V of the visible slots once a
// thread block, from L2. Bound: tensor cores. The longest tiles of a sequence come last, and are taken first. Limits: groups
// without sinks; blocks of a multiple of 16 slots; a scale above 0; below 2^31 slots · 2 · kv_heads in a layer's pool.
#include "attention.cuh"
#include "hopper.cuh"

namespace baton {

struct AttentionHopper {
    Attention a;
    TensorMap pool;
};

constexpr u32 WARPGROUP = 4 * WARP;
/// Warpgroups that multiply, and pairs that each has.
constexpr u32 CONSUMERS = 2;
constexpr u32 GROUP_PAIRS = 64;
constexpr u32 HOPPER_PAIRS = CONSUMERS * GROUP_PAIRS;
constexpr u32 HOPPER_THREADS = (CONSUMERS + 1) * WARPGROUP;
/// Slots of a turn.
constexpr u32 SLOTS = 128;
/// Elements and bytes of a row of a swizzled tile.
constexpr u32 PART = 64;
constexpr u32 PART_BYTES = 128;

/// Slots of a box, which lie in one block: the largest power of two that divides its size, up to a turn's.
__host__ __device__ constexpr u32 box_slots(u32 block_size) {
    u32 power = block_size & (0u - block_size);
    return power < SLOTS ? power : SLOTS;
}

/// Tiles of 64 elements of head_dim, for each row or slot.
template <u32 DIM>
struct alignas(1024) HopperShared {
    static constexpr u32 PARTS = DIM / PART;
    static constexpr u32 STAGES = 256 / DIM;
    u8 q[CONSUMERS][PARTS][GROUP_PAIRS * PART_BYTES];
    u8 k[STAGES][PARTS][SLOTS * PART_BYTES];
    u8 v[STAGES][PARTS][SLOTS * PART_BYTES];
    /// A stage's K or V is there; all warps have done with it.
    PhaseBarrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

static_assert(sizeof(HopperShared<64>) == 148480 && sizeof(HopperShared<128>) == 164864, "as kernels/cuda/build has it");

inline Launch launch_of(const AttentionHopper& p) {
    u32 pairs = p.a.tile_rows * (p.a.heads / p.a.kv_heads);
    u32 shared = p.a.planes.head_dim <= 64 ? sizeof(HopperShared<64>) : sizeof(HopperShared<128>);
    return {dim3(p.a.tile_count, p.a.kv_heads, parts(pairs, HOPPER_PAIRS)), dim3(HOPPER_THREADS), shared};
}

#if defined(BATON_SHIM) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Barriers of warpgroups: all that multiply; those of each; its turn to ask for products.
enum class Named : u32 { Consumers = 1, Group = 2, Turn = Group + CONSUMERS };
__device__ inline u32 named(Named which, u32 group) { return static_cast<u32>(which) + group; }

/// What a thread block does: pairs `first` to `last` of a tile, over the slots from..to that some of them see, `turns` times SLOTS from
/// `base` on.
struct HopperWork {
    Tile tile;
    u32 first, last, group;
    u32 from, to, base, turns;
};

/// Of a stage: which it is in this turn, and the parity of its phase.
template <u32 DIM>
__device__ inline u32 stage_of(u32 turn) {
    return turn % HopperShared<DIM>::STAGES;
}
template <u32 DIM>
__device__ inline u32 parity_of(u32 turn) {
    return turn / HopperShared<DIM>::STAGES % 2;
}

/// The warp that brings K and V: each lane a box of one part of each.
template <u32 DIM>
struct Producer {
    using Shared = HopperShared<DIM>;

    const AttentionHopper& p;
    Shared& shared;
    const HopperWork& work;
    /// Slots of a box; this lane's part of the rows, and its box's first slot in a turn.
    u32 box, part, slot;

    __device__ bool there(u32 turn) const {
        u32 position = work.base + turn * SLOTS + slot;
        return turn < work.turns && slot < SLOTS && position + box > work.from && position < work.to;
    }

    /// The number of the block that this lane's box lies in.
    __device__ u32 block(u32 turn) const {
        i64 entry = static_cast<i64>(work.tile.table) + (work.base + turn * SLOTS + slot) / p.a.planes.block_size;
        return there(turn) ? p.a.blocks[entry] : 0;
    }

    __device__ void bring(u8 (&tiles)[Shared::PARTS][SLOTS * PART_BYTES], PhaseBarrier& full, PhaseBarrier& empty, u32 turn, u64 row) {
        u32 boxes = __popc(__ballot_sync(ALL_LANES, there(turn)));
        phase_wait(empty, parity_of<DIM>(turn) ^ 1);
        if (lane() == 0) phase_expect(full, boxes * box * PART_BYTES);
        __syncwarp();
        if (there(turn)) copy_box(&tiles[part][slot * PART_BYTES], p.pool, full, part * PART, static_cast<u32>(row));
    }

    __device__ void run() {
        u32 next = block(0);
        for (u32 turn = 0; turn < work.turns; turn++) {
            // Asked for a turn before, so that no copy waits for it.
            u32 now = next;
            next = block(turn + 1);
            const KvPlanes& planes = p.a.planes;
            u64 at = now * planes.block + blockIdx.y * planes.head;
            u32 within = (work.base + turn * SLOTS + slot) % planes.block_size, stage = stage_of<DIM>(turn);
            bring(shared.k[stage], shared.k_full[stage], shared.k_empty[stage], turn, at / (2 * DIM) + within);
            bring(shared.v[stage], shared.v_full[stage], shared.v_empty[stage], turn, (at + planes.value) / (2 * DIM) + within);
        }
    }
};

/// A warpgroup's 64 pairs. This thread has a part of rows g and g + 8 of its warp's sixteen.
template <KvType T, u32 DIM>
struct Consumer {
    using Shared = HopperShared<DIM>;
    static constexpr Element TYPE = mma_type(T);

    const AttentionHopper& p;
    Shared& shared;
    const HopperWork& work;
    /// Which of the warpgroups that multiply, and this thread's number in it.
    u32 consumer, thread;
    /// Positions both rows see: from `low` to before `high`. Rows that are not there see all, and are not stored.
    u32 low[2], high[2];
    /// Largest score so far, not scaled; this thread's share of the sum of weights; what the last turn's sums are multiplied by.
    float max[2], sum[2], factor[2];
    /// Scores, then weights; sums; weights as words of two. Numbered as in hopper.cuh.
    float score[SLOTS / 2];
    float out[DIM / 2];
    u32 weights[SLOTS / 16][4];

    __device__ u32 pair(u32 r) const { return work.first + consumer * GROUP_PAIRS + thread / WARP * 16 + lane() / 4 + 8 * r; }
    /// A pair's row and query head.
    __device__ u32 row_of(u32 pair) const { return work.tile.row + pair / work.group; }
    __device__ u32 head_of(u32 pair) const { return blockIdx.y * work.group + pair % work.group; }

    /// Rounds q into shared memory; 0 for rows that are not there. All is loaded before anything is stored, so that loads wait together.
    template <Element Q>
    __device__ void place_q() {
        constexpr u32 PIECES = DIM / OCTET;
        uint4 words[DIM / 16];
#pragma unroll
        for (u32 i = 0; i < DIM / 16; i++) {
            u32 octet = thread + i * WARPGROUP, of = work.first + consumer * GROUP_PAIRS + octet / PIECES;
            Octet x = {};
            if (of <= work.last) x = load8(Q, p.a.q, query_at(p.a, row_of(of), head_of(of)) + octet % PIECES * OCTET);
            words[i] = make_uint4(pack2(TYPE, x.x[0], x.x[1]), pack2(TYPE, x.x[2], x.x[3]), pack2(TYPE, x.x[4], x.x[5]),
                                  pack2(TYPE, x.x[6], x.x[7]));
        }
#pragma unroll
        for (u32 i = 0; i < DIM / 16; i++) {
            u32 octet = thread + i * WARPGROUP, row = octet / PIECES, piece = octet % PIECES;
            *reinterpret_cast<uint4*>(&shared.q[consumer][piece / 8][swizzled_piece(row, piece % 8)]) = words[i];
        }
    }

    __device__ void begin() {
        if (p.a.q_type == Element::F32) {
            place_q<Element::F32>();
        } else if (p.a.q_type == Element::F16) {
            place_q<Element::F16>();
        } else {
            place_q<Element::Bf16>();
        }
        async_fence();
        named_sync(named(Named::Group, consumer), WARPGROUP);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 position = work.tile.position + pair(r) / work.group;
            low[r] = pair(r) <= work.last ? first_visible(position, p.a.window) : 0;
            high[r] = pair(r) <= work.last ? position + 1 : 0xffffffffu;
            max[r] = -INFINITY;
            sum[r] = 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < DIM / 2; i++) out[i] = 0.0f;
    }

    /// Asks for the scores of a turn's slots.
    __device__ void multiply_keys(u32 turn) {
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
            u32 step = k % 4 * 32;
            u64 q = operand_at(shared_address(shared.q[consumer][k / 4]) + step, 16);
            u64 keys = operand_at(shared_address(shared.k[stage_of<DIM>(turn)][k / 4]) + step, 16);
            wgmma_n128<TYPE>(score, q, keys, k > 0);
        }
        wgmma_commit();
    }

    /// Asks for the products of a turn's V with `weights`.
    __device__ void multiply_values(u32 turn) {
#pragma unroll
        for (u32 k = 0; k < SLOTS / 16; k++) {
            u64 values = operand_at(shared_address(shared.v[stage_of<DIM>(turn)]) + k * 16 * PART_BYTES, SLOTS * PART_BYTES);
            wgmma_transposed<TYPE>(out, weights[k], values);
        }
        wgmma_commit();
    }

    /// Waits for a turn's V, and sets to 0 what no row sees of it.
    __device__ void values_ready(u32 turn) {
        u32 stage = stage_of<DIM>(turn), base = work.base + turn * SLOTS;
        phase_wait(shared.v_full[stage], parity_of<DIM>(turn));
        if (base >= work.from && base + SLOTS <= work.to) return;
        for (u32 i = consumer * WARPGROUP + thread; i < SLOTS * DIM / OCTET; i += CONSUMERS * WARPGROUP) {
            u32 part = i / (SLOTS * 8), piece = i % (SLOTS * 8), position = base + piece / 8;
            if (position >= work.from && position < work.to) continue;
            *reinterpret_cast<uint4*>(&shared.v[stage][part][piece * 16]) = make_uint4(0, 0, 0, 0);
        }
        async_fence();
        named_sync(named(Named::Consumers, 0), CONSUMERS * WARPGROUP);
    }

    /// This warp has done with a stage.
    __device__ void release(PhaseBarrier& empty) {
        __syncwarp();
        if (lane() == 0) phase_arrive(empty);
    }

    /// Turns a turn's scores into weights, and takes them into maximum and sum.
    __device__ void weigh(u32 turn) {
        u32 base = work.base + turn * SLOTS, t = lane() % 4;
        bool whole = low[0] <= base && low[1] <= base && base + SLOTS <= high[0] && base + SLOTS <= high[1];
        if (__any_sync(ALL_LANES, !whole)) {
#pragma unroll
            for (u32 i = 0; i < SLOTS / 2; i++) {
                u32 position = base + i / 4 * 8 + 2 * t + i % 2, r = i / 2 % 2;
                score[i] = position >= low[r] && position < high[r] ? score[i] : -INFINITY;
            }
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float largest[2] = {-INFINITY, -INFINITY}, added[2] = {};
#pragma unroll
            for (u32 i = 0; i < SLOTS / 4; i++) {
                float x = score[i / 2 * 4 + 2 * r + i % 2];
                largest[i % 2] = x > largest[i % 2] ? x : largest[i % 2];
            }
            // The four lanes of a row.
            float highest = lanes_max(largest[0] > largest[1] ? largest[0] : largest[1], 4);
            highest = max[r] > highest ? max[r] : highest;
            // A row that has seen nothing yet has no maximum to take differences to.
            float origin = highest == -INFINITY ? 0.0f : highest * p.a.scale_log2;
            factor[r] = max[r] == highest ? 1.0f : exp2_fast(max[r] * p.a.scale_log2 - origin);
            max[r] = highest;
#pragma unroll
            for (u32 i = 0; i < SLOTS / 4; i++) {
                float& x = score[i / 2 * 4 + 2 * r + i % 2];
                x = exp2_fast(fmaf(x, p.a.scale_log2, -origin));
                added[i % 2] += x;
            }
            sum[r] = fmaf(sum[r], factor[r], added[0] + added[1]);
        }
    }

    /// Brings sums to the new maximum, and weights into words.
    __device__ void fold() {
        // Multiplying by 1 changes nothing, so to skip it changes no bit.
        if (__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (u32 i = 0; i < DIM / 2; i++) out[i] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (u32 i = 0; i < SLOTS / 4; i++) weights[i / 4][i % 4] = pack2(TYPE, score[2 * i], score[2 * i + 1]);
    }

    __device__ void run() {
        phase_wait(shared.k_full[0], 0);
        wgmma_fence();
        multiply_keys(0);
        wgmma_wait<0>();
        settle(score);
        release(shared.k_empty[0]);
        weigh(0);
        fold();
        u32 mine = named(Named::Turn, consumer), other = named(Named::Turn, 1 - consumer);
        if (consumer == 1 && work.turns > 1) named_arrive(other, 2 * WARPGROUP);
        for (u32 turn = 1; turn < work.turns; turn++) {
            u32 stage = stage_of<DIM>(turn);
            values_ready(turn - 1);
            phase_wait(shared.k_full[stage], parity_of<DIM>(turn));
            named_sync(mine, 2 * WARPGROUP);
            wgmma_fence();
            multiply_keys(turn);
            multiply_values(turn - 1);
            if (consumer == 0 || turn + 1 < work.turns) named_arrive(other, 2 * WARPGROUP);
            wgmma_wait<1>();
            settle(score);
            release(shared.k_empty[stage]);
            weigh(turn);
            wait_after(sum[0], sum[1]);
            wgmma_wait<0>();
            settle(out);
            release(shared.v_empty[stage_of<DIM>(turn - 1)]);
            fold();
        }
        values_ready(work.turns - 1);
        wgmma_fence();
        multiply_values(work.turns - 1);
        wgmma_wait<0>();
        settle(out);
    }

    __device__ void store() {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
            float inverse = 1.0f / sum[r];
#pragma unroll
            for (u32 i = 0; i < DIM / 4; i++) out[i / 2 * 4 + 2 * r + i % 2] *= inverse;
            if (pair(r) > work.last) continue;
            u64 to = result_at(p.a, row_of(pair(r)), head_of(pair(r))) + 2 * (lane() % 4);
            if (p.a.out_type == Element::F32) {
                float* row = static_cast<float*>(p.a.out) + to;
#pragma unroll
                for (u32 j = 0; j < DIM / 8; j++) {
                    *reinterpret_cast<float2*>(row + 8 * j) = make_float2(out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
                }
            } else {
                u16* row = static_cast<u16*>(p.a.out) + to;
#pragma unroll
                for (u32 j = 0; j < DIM / 8; j++) {
                    *reinterpret_cast<u32*>(row + 8 * j) = pack2(p.a.out_type, out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
                }
            }
        }
    }
};

template <KvType T, u32 DIM>
__device__ inline void attention_hopper(const AttentionHopper& p) {
    using Shared = HopperShared<DIM>;
    HopperWork work;
    work.tile = p.a.tiles[p.a.tile_count - 1 - blockIdx.x];
    work.group = p.a.heads / p.a.kv_heads;
    work.first = blockIdx.z * HOPPER_PAIRS;
    if (work.first >= work.tile.rows * work.group) return;
    work.last = min(work.first + HOPPER_PAIRS, work.tile.rows * work.group) - 1;
    work.from = first_visible(work.tile.position + work.first / work.group, p.a.window);
    work.to = work.tile.position + work.last / work.group + 1;
    work.base = work.from / SLOTS * SLOTS;
    work.turns = parts(work.to - work.base, SLOTS);
    BATON_DYNAMIC_SHARED(Shared, shared);
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < Shared::STAGES; stage++) {
            phase_init(shared.k_full[stage], 1);
            phase_init(shared.v_full[stage], 1);
            phase_init(shared.k_empty[stage], CONSUMERS * WARPGROUP / WARP);
            phase_init(shared.v_empty[stage], CONSUMERS * WARPGROUP / WARP);
        }
        phases_begin();
    }
    __syncthreads();
    // 128 · (40 + 2 · 232) registers, of the 65,536 that there are.
    if (threadIdx.x < WARPGROUP) {
        fewer_registers<40>();
        if (threadIdx.x >= WARP) return;
        u32 box = box_slots(p.a.planes.block_size);
        Producer<DIM> producer{p, shared, work, box, lane() % Shared::PARTS, lane() / Shared::PARTS * box};
        producer.run();
        return;
    }
    more_registers<232>();
    Consumer<T, DIM> consumer{p, shared, work, threadIdx.x / WARPGROUP - 1, threadIdx.x % WARPGROUP, {}, {}, {}, {}, {}, {}, {}, {}};
    consumer.begin();
    consumer.run();
    consumer.store();
}

#else

/// Never launched.
template <KvType T, u32 DIM>
__device__ inline void attention_hopper(const AttentionHopper&) {
    __trap();
}

#endif

#define BATON_HOPPER(name, type, dim)                                                                                                \
    BATON_KERNEL(HOPPER_THREADS) baton_attention_hopper_##name##_##dim(const __grid_constant__ AttentionHopper p) {                  \
        attention_hopper<type, dim>(p);                                                                                              \
    }

BATON_HOPPER(f16, KvType::F16, 64)
BATON_HOPPER(f16, KvType::F16, 128)
BATON_HOPPER(bf16, KvType::Bf16, 64)
BATON_HOPPER(bf16, KvType::Bf16, 128)

} // namespace baton
