// Chooses a token for each row of logits: greedy, or a draw after temperature, top-k, top-p and min-p; log probabilities on request.
// The vocabulary is never sorted.
//
// logits: [any, vocab] f32, after penalties, bias and mask (adjust_logits.cu, mask_logits.cu). raw: the same as the model gave them, for log
// probabilities and their digest (digest_f32 of crates/types/src/digest.rs); may be logits. rows: [count] parameters. out: [count]. Same
// semantics as crates/model/src/sampler.rs: candidates are ordered by (x / temperature, lower id first); the draw walks them in that order, or
// by id where nothing filters, and takes the first at which the running weight exceeds u · total; u is a function of (seed, index) alone
// (I1), the same number as there.
//
// How: without a filter, whole parts of the row are summed, and the part where the target falls is walked again (`walk`). Top-k's last
// candidate, top-p's last candidate and a filtered draw are each the first whose running count, or weight, in descending order exceeds a
// target; `descend` (select.cuh) finds it. Weights are whole numbers of 2^-40 of the largest one: sums of those do not depend on the order
// of additions, so neither does the token; what is less likely than 2^-40 of the likeliest is never drawn.
//
// Threads: a thread block a row. Bytes moved: logits once for the maximum, and for a draw a little more than once (no filter) or twice
// (filters) more, from L2; with log probabilities two times more, and four times for the most likely tokens. Where more than 1024 candidates
// are within 1/64 of each other, a filter takes five times more. Bound: instructions of one multiprocessor and its port to L2
// (kernels/cuda/model.py). Limits: vocab up to 2^22.
#include "digest.cuh"
#include "select.cuh"

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

inline Launch launch_of(const Sample& p) { return {dim3(p.count), dim3(SAMPLE_THREADS)}; }

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

/// The most likely token, the lowest id among equals; 0 if the first logit is not a number, which nothing is larger than. Threads that have
/// been here before have all met since, in `digest_row`: nobody still reads the last maxima.
__device__ inline u32 argmax(SampleShared& s, const float* logits, u32 vocab) {
    float best = -INFINITY;
    u32 best_id = 0xffffffffu;
    // A thread's ids ascend.
    each_logit<4>(logits, 0, vocab, threadIdx.x, SAMPLE_THREADS, [&](auto& logits, u32 id) {
        for (float x : logits) {
            best_id = x > best ? id : best_id;
            best = x > best ? x : best;
            id++;
        }
    });
    auto take = [&](float x, u32 id) {
        if (x > best || (x == best && id < best_id)) {
            best = x;
            best_id = id;
        }
    };
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
    for (u32 w = 0; w < SAMPLE_WARPS; w++) take(s.best[w], s.best_id[w]);
    // Nothing is larger than -inf where there is nothing else.
    return logits[0] != logits[0] || best_id >= vocab ? 0 : best_id;
}

/// The token at which the running weight, by id, first exceeds the random share of all; `likeliest` where nothing has a weight. Each warp
/// sums a part of what is left; the part where the target falls is left next.
__device__ inline u32 walk(SampleShared& s, const Candidates& c, u64 random, u32 likeliest) {
    u32 first = 0, end = c.vocab;
    u64 target = 0;
    do {
        u32 part = parts(end - first, SAMPLE_WARPS * 4) * 4;
        u32 from = min(end, first + threadIdx.x / WARP * part), to = min(end, from + part);
        u64 own = 0;
        each_logit<2>(c.logits, from, to, lane(), WARP, [&](auto& x, u32) {
            bool passed_over = true;
            for (float logit : x) passed_over = passed_over & (logit < c.least);
            if (passed_over) return;
            divide(x, c.temperature);
            for (float of : x) own += weight_of(of - c.largest);
        });
        own = warp_sum(own);
        // Who is late may still read the last sums.
        __syncthreads();
        if (lane() == 0) s.of_warp[threadIdx.x / WARP] = own;
        __syncthreads();
        if (end - first == c.vocab) {
            u64 total = 0;
            for (u32 w = 0; w < SAMPLE_WARPS; w++) total += s.of_warp[w];
            if (total == 0) return likeliest;
            target = __umul64hi(random, total);
        }
        u32 w = 0;
        while (s.of_warp[w] <= target) target -= s.of_warp[w++];
        first += w * part;
        end = min(end, first + part);
    } while (end - first > 4);
    for (;; first++) {
        u64 weight = weight_of(c.logits[first] / c.temperature.of - c.largest);
        if (target < weight) return first;
        target -= weight;
    }
}

/// A draw; `likeliest` where no candidate has a weight.
__device__ inline u32 draw(SampleShared& s, const float* logits, u32 vocab, const SampleRow& row, u32 likeliest) {
    Candidates c{logits, vocab, divisor(row.temperature), logits[likeliest] / row.temperature, -INFINITY, false, 0, 0};
    // Nothing has a weight.
    if (!(fabsf(c.largest) < INFINITY)) return likeliest;
    c.least = least_logit(c, 1);
    u64 random = random_bits(row.seed, row.index);
    u32 wanted = row.top_k == 0 ? vocab : row.top_k;
    if (wanted >= vocab && row.top_p >= 1.0f && row.min_p <= 0.0f) return walk(s, c, random, likeliest);
    u64 key = 0, floor = 0;
    // Beyond what has a weight, no candidate is the last.
    if (wanted < vocab) floor = descend<Sum::Count>(s, c, {0, 0}, 1, [&](u64) { return static_cast<u64>(wanted - 1); });
    // Top-p's last candidate, then the draw.
#pragma unroll 1
    for (bool last = row.top_p >= 1.0f;; last = true) {
        u64 least = last && row.min_p > 0.0f ? static_cast<u64>(ceil(static_cast<double>(row.min_p) * static_cast<double>(WHOLE))) : 0;
        key = descend<Sum::Weight>(s, c, {floor, least}, 1, [&](u64 total) {
            if (last) return static_cast<u64>(__umul64hi(random, total));
            u64 share = static_cast<u64>(ceil(static_cast<double>(total) * static_cast<double>(row.top_p)));
            return min(max(share, 1ull), total) - 1;
        });
        if (last) return key == 0 ? likeliest : id_of(key);
        floor = max(floor, key);
    }
}

/// Logarithm of the sum of e^x. Each thread adds in the order of ids.
__device__ inline double log_sum_of(const float* raw, u32 vocab, float largest) {
    constexpr u32 LOADS = 8;
    double own = 0.0;
    for (u32 i = threadIdx.x; i < vocab; i += LOADS * SAMPLE_THREADS) {
        float x[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            if (i + k * SAMPLE_THREADS < vocab) x[k] = raw[i + k * SAMPLE_THREADS];
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            if (i + k * SAMPLE_THREADS < vocab) own += static_cast<double>(expf(x[k] - largest));
        }
    }
    return static_cast<double>(largest) + log(block_sum(own));
}

/// Log probabilities of the chosen token and of the most likely ones, most likely first.
__device__ inline void logprobs(SampleShared& s, const float* raw, u32 vocab, u32 top, Sampled& out, u32 id) {
    float largest = raw[argmax(s, raw, vocab)];
    double log_sum = log_sum_of(raw, vocab, largest);
    if (threadIdx.x == 0) {
        out.logprob = static_cast<float>(static_cast<double>(raw[id]) - log_sum);
        s.tops = 0;
    }
    u32 count = min(min(top, MAX_TOP_LOGPROBS), vocab);
    if (count == 0) return;
    Candidates c{raw, vocab, divisor(1.0f), largest, -INFINITY, false, 0, 0};
    u64 floor = descend<Sum::Count>(s, c, {0, 0}, 0, [&](u64) { return static_cast<u64>(count - 1); });
    each_left(s, c, [&](auto& left, u32 i) {
        for (float x : left) {
            u64 key = key_of(x, i++);
            if (key >= floor) s.top[atomicAdd(&s.tops, 1u)] = key;
        }
    });
    __syncthreads();
    if (threadIdx.x < count) {
        u64 key = s.top[threadIdx.x];
        u32 rank = 0;
        for (u32 i = 0; i < count; i++) rank += s.top[i] > key;
        out.top_ids[rank] = id_of(key);
        out.top_logprobs[rank] = static_cast<float>(static_cast<double>(value_of(key)) - log_sum);
    }
}

/// Digest of a row, two logits a lane.
__device__ inline u64 digest_row(const float* raw, u32 vocab) {
    u64 sum = 0;
#pragma unroll 4
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
