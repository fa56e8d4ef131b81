// Chooses a token for each row of logits: greedy, or a draw after temperature, top-k, top-p and min-p; log probabilities on request.
// The vocabulary is never sorted.
//
// logits: [any, vocab] f32, after penalties, bias and mask (adjust_logits.cu, mask_logits.cu). raw: the same as the model gave them, for log
// probabilities and their digest (digest_f32 of crates/types/src/digest.rs); may be logits. rows: [count] parameters. out: [count]. Same semantics
// as crates/model/src/sampler.rs: candidates are ordered by (x / temperature, lower id first), the draw walks them in that order, or by id where nothing filters, and takes the first at
// which the running weight exceeds u · total; u is a function of (seed, index) alone (I1), the same number as there.
//
// How: top-k's last candidate, top-p's last candidate and the draw are each the first whose running count, or weight, in descending
// order exceeds a target. `descend` finds it digit by digit of a key that orders candidates, (value, lower id), as radix selection does: a
// histogram of the digit in shared memory, the digit where the target falls, then only what begins with it. Weights are whole numbers
// of 2^-40 of the largest one: sums of those do not depend on the order of additions, so neither does the token; what is less likely than
// 2^-40 of the likeliest is never drawn.
//
// Threads: a thread block a row. Bytes moved: logits once for the maximum, and for a draw twice (no filter) to fifteen times (all filters)
// more, from L2; with log probabilities three times more, and six times for the most likely tokens. Bound: instructions and latency of
// one multiprocessor (kernels/cuda/model.py), and atomics in shared memory; its port to L2 alone would take 4 µs for 128k logits. Limits:
// vocab up to 2^22.
#include "digest.cuh"
#include "drawn.cuh"

namespace baton {

constexpr u32 NO_LOGPROBS = 0xffffffffu;
constexpr u32 NO_ROW = 0xffffffffu;

/// A row's parameters, as `SamplingParams` in crates/types/src/sampling.rs.
struct SampleRow {
    u64 seed;
    /// Of the token in its answer.
    u32 index;
    /// 0 is greedy.
    float temperature;
    /// 0: all.
    u32 top_k;
    float top_p;
    float min_p;
    /// NO_LOGPROBS, or how many of the most likely.
    u32 top_logprobs;
    /// Of the logits; NO_ROW: nothing is chosen.
    u32 row;
};

struct Sample {
    const float* logits;
    const float* raw;
    const SampleRow* rows;
    Sampled* out;
    u32 count;
    u32 vocab;
};

constexpr u32 SAMPLE_THREADS = 512;
constexpr u32 BINS = 2048;
/// 1 as a weight.
constexpr u64 WHOLE = 1ull << 40;

inline Launch launch_of(const Sample& p) { return {dim3(p.count), dim3(SAMPLE_THREADS)}; }

struct SampleShared {
    u64 bins[BINS];
    u64 of_warp[SAMPLE_THREADS / WARP];
    u64 before;
    u32 bin;
    /// The most likely, in no order.
    u32 found;
    u64 keys[MAX_TOP_LOGPROBS];
    float best[SAMPLE_THREADS / WARP];
    u32 best_id[SAMPLE_THREADS / WARP];
};

/// What is chosen from.
struct Candidates {
    const float* logits;
    u32 vocab;
    float temperature;
    /// Largest logit, over temperature.
    float largest;
};

/// Orders floats as `f32::total_cmp`, and equal ones by the lower id first. The ten highest bits of the inverted id are ones.
__device__ inline u64 key_of(float x, u32 id) {
    u32 bits = __float_as_uint(x);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(bits) << 32 | static_cast<u32>(~id);
}
__device__ inline u32 id_of(u64 key) { return ~static_cast<u32>(key); }
__device__ inline float value_of(u64 key) {
    u32 bits = static_cast<u32>(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

/// Digits of a key: three of the value, two of the id.
constexpr u32 DIGITS = 5;
constexpr u32 FIRST_ID_DIGIT = 3;
__device__ inline u32 digit_shift(u32 digit) { return digit == 0 ? 53 : digit == 1 ? 42 : digit == 2 ? 32 : digit == 3 ? 11 : 0; }
__device__ inline u32 digit_mask(u32 digit) { return digit == 2 ? 1023 : 2047; }

/// A weight; 0 where it is not a number.
__device__ inline u64 weight_of(float x, float largest) {
    float weight = expf(x - largest) * static_cast<float>(WHOLE);
    return weight > 0.0f ? static_cast<u64>(weight) : 0;
}

/// The SplitMix64 finaliser over seed and index; the upper 53 bits are the random number.
__device__ inline u64 random_bits(u64 seed, u32 index) {
    u64 z = seed + (index + 1ull) * 0x9e3779b97f4a7c15ull;
    for (u32 i = 0; i < 2; i++) {
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return z & ~0x7ffull;
}

/// Which candidates are left, and what is summed over them.
struct Left {
    /// Least key and least weight.
    u64 floor;
    u64 weight;
    /// Count them, or sum their weights.
    bool count;
};

/// The bin, from the highest down, in which the running sum first exceeds the target; what was before it. All threads get both.
__device__ inline void find_bin(SampleShared& s, u64 target) {
    constexpr u32 EACH = BINS / SAMPLE_THREADS;
    u64 own = 0;
    for (u32 k = 0; k < EACH; k++) own += s.bins[BINS - 1 - (threadIdx.x * EACH + k)];
    u64 until = own;
    for (u32 by = 1; by < WARP; by *= 2) {
        u64 other = __shfl_up_sync(ALL_LANES, until, by);
        if (lane() >= by) until += other;
    }
    if (lane() == WARP - 1) s.of_warp[threadIdx.x / WARP] = until;
    __syncthreads();
    for (u32 w = 0; w < threadIdx.x / WARP; w++) until += s.of_warp[w];
    u64 before = until - own;
    if (before <= target && target < until) {
        u32 bin = BINS - 1 - threadIdx.x * EACH;
        while (before + s.bins[bin] <= target) before += s.bins[bin--];
        s.bin = bin;
        s.before = before;
    }
    __syncthreads();
}

/// The key of the candidate at which the running sum over what is left, in descending order (or by id, from `first` =
/// FIRST_ID_DIGIT on), first exceeds `target_of(total)`; 0 where the total is 0. The target is below the total.
template <class Target>
__device__ inline u64 descend(SampleShared& s, const Candidates& c, const Left& left, u32 first, Target target_of) {
    u64 prefix = 0, mask = 0, target = 0;
    for (u32 digit = first; digit < DIGITS; digit++) {
        u32 shift = digit_shift(digit);
        for (u32 b = threadIdx.x; b < BINS; b += SAMPLE_THREADS) s.bins[b] = 0;
        __syncthreads();
        u64 own = 0;
        for (u32 id = threadIdx.x; id < c.vocab; id += SAMPLE_THREADS) {
            float x = c.logits[id] / c.temperature;
            u64 key = key_of(x, id);
            if ((key & mask) != prefix || key < left.floor) continue;
            u64 weight = left.count && left.weight == 0 ? 1 : weight_of(x, c.largest);
            if (weight < left.weight) continue;
            u64 amount = left.count ? 1 : weight;
            own += amount;
            if (amount > 0) atomicAdd(&s.bins[key >> shift & digit_mask(digit)], amount);
        }
        if (digit == first) {
            u64 total = block_sum(own);
            if (total == 0) return 0;
            target = target_of(total);
        }
        __syncthreads();
        find_bin(s, target);
        target -= s.before;
        prefix |= static_cast<u64>(s.bin) << shift;
        mask |= static_cast<u64>(digit_mask(digit)) << shift;
    }
    return prefix | 0xffc00000ull;
}

/// The most likely token, the lowest id among equals; 0 if the first logit is not a number, which nothing is larger than. Threads that have
/// been here before have all met since, in `digest_row`: nobody still reads the last maxima.
__device__ inline u32 argmax(SampleShared& s, const float* logits, u32 vocab) {
    float best = -INFINITY;
    u32 best_id = 0xffffffffu;
    auto take = [&](float x, u32 id) {
        if (x > best || (x == best && id < best_id)) {
            best = x;
            best_id = id;
        }
    };
    for (u32 id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) take(logits[id], id);
    for (u32 bits = WARP / 2; bits > 0; bits /= 2) {
        float x = __shfl_xor_sync(ALL_LANES, best, bits);
        u32 id = __shfl_xor_sync(ALL_LANES, best_id, bits);
        take(x, id);
    }
    if (lane() == 0) {
        s.best[threadIdx.x / WARP] = best;
        s.best_id[threadIdx.x / WARP] = best_id;
    }
    __syncthreads();
    for (u32 w = 0; w < SAMPLE_THREADS / WARP; w++) take(s.best[w], s.best_id[w]);
    return logits[0] != logits[0] ? 0 : best_id;
}

/// A draw; `likeliest` where no candidate has a weight.
__device__ inline u32 draw(SampleShared& s, const float* logits, u32 vocab, const SampleRow& row, u32 likeliest) {
    Candidates c{logits, vocab, row.temperature, logits[likeliest] / row.temperature};
    u64 random = random_bits(row.seed, row.index);
    auto drawn = [&](u64 total) { return __umul64hi(random, total); };
    u32 wanted = row.top_k == 0 ? vocab : row.top_k;
    u64 key;
    if (wanted >= vocab && row.top_p >= 1.0f && row.min_p <= 0.0f) {
        key = descend(s, c, {0, 0, false}, FIRST_ID_DIGIT, drawn);
    } else {
        u64 floor = 0;
        if (wanted < vocab) floor = descend(s, c, {0, 0, true}, 0, [&](u64) { return static_cast<u64>(wanted - 1); });
        if (row.top_p < 1.0f) {
            auto enough = [&](u64 total) {
                u64 share = static_cast<u64>(ceil(static_cast<double>(total) * static_cast<double>(row.top_p)));
                return min(max(share, 1ull), total) - 1;
            };
            u64 last = descend(s, c, {floor, 0, false}, 0, enough);
            floor = max(floor, last);
        }
        u64 least = row.min_p > 0.0f ? static_cast<u64>(ceil(static_cast<double>(row.min_p) * static_cast<double>(WHOLE))) : 0;
        key = descend(s, c, {floor, least, false}, 0, drawn);
    }
    return key == 0 ? likeliest : id_of(key);
}

/// Log probabilities of the chosen token and of the most likely ones, most likely first.
__device__ inline void logprobs(SampleShared& s, const float* raw, u32 vocab, u32 top, Sampled& out, u32 id) {
    float largest = raw[argmax(s, raw, vocab)];
    double own = 0.0;
    for (u32 i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) own += static_cast<double>(expf(raw[i] - largest));
    double log_sum = static_cast<double>(largest) + log(block_sum(own));
    if (threadIdx.x == 0) {
        out.logprob = static_cast<float>(static_cast<double>(raw[id]) - log_sum);
        s.found = 0;
    }
    u32 count = min(min(top, MAX_TOP_LOGPROBS), vocab);
    if (count == 0) return;
    Candidates c{raw, vocab, 1.0f, largest};
    u64 floor = descend(s, c, {0, 0, true}, 0, [&](u64) { return static_cast<u64>(count - 1); });
    for (u32 i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
        u64 key = key_of(raw[i], i);
        if (key >= floor) s.keys[atomicAdd(&s.found, 1u)] = key;
    }
    __syncthreads();
    if (threadIdx.x < count) {
        u64 key = s.keys[threadIdx.x];
        u32 rank = 0;
        for (u32 i = 0; i < count; i++) rank += s.keys[i] > key;
        out.top_ids[rank] = id_of(key);
        out.top_logprobs[rank] = static_cast<float>(static_cast<double>(value_of(key)) - log_sum);
    }
}

/// Digest of a row, two logits a lane.
__device__ inline u64 digest_row(const float* raw, u32 vocab) {
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < parts(vocab, 2); i += SAMPLE_THREADS) {
        u64 low = __float_as_uint(raw[2 * i]), high = 2 * i + 1 < vocab ? __float_as_uint(raw[2 * i + 1]) : 0;
        sum += digest_share(high << 32 | low, i);
    }
    return block_sum(sum);
}

BATON_KERNEL(SAMPLE_THREADS) baton_sample(const __grid_constant__ Sample p) {
    BATON_SHARED(SampleShared, shared);
    SampleRow row = p.rows[blockIdx.x];
    if (row.row == NO_ROW) return;
    Sampled& out = p.out[blockIdx.x];
    const float* logits = p.logits + static_cast<u64>(row.row) * p.vocab;
    u32 id = argmax(shared, logits, p.vocab);
    if (row.temperature > 0.0f) id = draw(shared, logits, p.vocab, row, id);
    if (threadIdx.x == 0) out.id = id;
    if (row.top_logprobs == NO_LOGPROBS) return;
    const float* raw = p.raw + static_cast<u64>(row.row) * p.vocab;
    u64 digest = digest_row(raw, p.vocab);
    if (threadIdx.x == 0) out.digest = digest;
    logprobs(shared, raw, p.vocab, row.top_logprobs, out, id);
}

} // namespace baton
