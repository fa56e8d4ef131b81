// The candidate at which a running count or weight exceeds a target, without sorting: histograms in shared memory.
//
// Steps: candidates are told apart first by their distance below the largest, in 2048 steps of 1/64, which go as far as weights do. The
// histogram of that takes one pass over the row. A second one gathers what lies in the step where the target falls, and what lies above
// it. All the rest reads only these. If they are too many, digits of the key are told apart by passes over the row, as radix selection does.
//
// A bin's sum has 64 bits in two words, since shared memory adds 32 bits at a time natively: the lower word tells when it wraps, and that
// goes to the upper one. Sums of at most 2^22 weights of at most 2^40 are at most 2^62, so the upper word stays below 2^31, wraps
// included. Additions to one bin wait for each other, so four neighbours in one bin are added at once.
#pragma once
#include "drawn.cuh"
#include "logits.cuh"

namespace baton {

constexpr u32 BINS = 2048;
/// Most candidates that are gathered: in the step of the target, and above it.
constexpr u32 GATHERED = 1024;

struct SampleShared {
    u32 low[BINS];
    u32 high[BINS];
    /// Gathered: in the step, then above it, each in no order.
    u64 keys[2 * GATHERED];
    u32 found[2];
    u64 of_warp[SAMPLE_WARPS];
    /// Where the target falls, and the sums before it and of it.
    u32 bin;
    u64 before;
    u64 held;
    /// The most likely, in no order.
    u64 top[MAX_TOP_LOGPROBS];
    u32 tops;
    float best[SAMPLE_WARPS];
    u32 best_id[SAMPLE_WARPS];
};

/// What is chosen from.
struct Candidates {
    const float* logits;
    u32 vocab;
    Divisor temperature;
    /// Largest logit, over temperature.
    float largest;
    /// Logits below this one are passed over.
    float least;
    /// Whether all that is left is gathered: so many in the step, so many above it.
    bool gathered;
    u32 in_step;
    u32 above;
};

/// Whose running sum is looked for.
enum class Sum { Count, Weight };

/// No bin.
constexpr u32 NO_BIN = 0xffffffffu;
/// Digits of a key: three of the value, two of the id.
constexpr u32 DIGITS = 5;
__device__ inline u32 digit_shift(u32 digit) { return digit == 0 ? 53 : digit == 1 ? 42 : digit == 2 ? 32 : digit == 3 ? 11 : 0; }
__device__ inline u32 digit_mask(u32 digit) { return digit == 2 ? 1023 : 2047; }

/// The step of a candidate, the largest's the highest. It does not fall where candidates rise. Nothing in step 0 has a weight.
__device__ inline u32 step_of(float x, float largest) {
    constexpr float integers = 8388608.0f;
    float step = fmaxf(fmaf(x - largest, 64.0f, integers + (BINS - 1)), integers);
    // What is not a number comes first, or last if its sign is set.
    bool first = static_cast<i32>(__float_as_uint(x)) > 0x7f800000;
    return first ? BINS - 1 : __float_as_uint(step) % BINS;
}

template <Sum SUM>
__device__ inline void add_to_bin(SampleShared& s, u32 bin, u64 amount) {
    if (amount == 0) return;
    u32 low = static_cast<u32>(amount);
    if (SUM == Sum::Count) {
        atomicAdd(&s.low[bin], low);
        return;
    }
    u32 before = atomicAdd(&s.low[bin], low);
    u32 high = static_cast<u32>(amount >> 32) + (before + low < before);
    if (high > 0) atomicAdd(&s.high[bin], high);
}

__device__ inline u64 bin_sum(const SampleShared& s, u32 bin) { return static_cast<u64>(s.high[bin]) << 32 | s.low[bin]; }

/// Calls `f(x, id)` for what is left, divided by the temperature: an array of one or of four neighbours, and the first one's id.
template <class F>
__device__ inline void each_left(const SampleShared& s, const Candidates& c, F f) {
    if (c.gathered) {
        for (u32 i = threadIdx.x; i < c.in_step + c.above; i += SAMPLE_THREADS) {
            u64 key = s.keys[i < c.in_step ? i : GATHERED + i - c.in_step];
            float x[1] = {value_of(key)};
            f(x, id_of(key));
        }
        return;
    }
    each_logit<2>(c.logits, 0, c.vocab, threadIdx.x, SAMPLE_THREADS, [&](auto& x, u32 id) {
        bool passed_over = true;
        for (float logit : x) passed_over = passed_over & (logit < c.least);
        if (passed_over) return;
        divide(x, c.temperature);
        f(x, id);
    });
}

/// Which candidates count: those of a least key and of a least weight.
struct Least {
    u64 key;
    u64 weight;
};

/// Sums candidates into the bins that `bin_of(x, id)` says.
template <Sum SUM, class Bin>
__device__ inline void fill_bins(SampleShared& s, const Candidates& c, const Least& least, Bin bin_of) {
    for (u32 b = threadIdx.x; b < BINS; b += SAMPLE_THREADS) s.low[b] = s.high[b] = 0;
    __syncthreads();
    each_left(s, c, [&](auto& x, u32 id) {
        constexpr u32 N = sizeof(x) / sizeof(float);
        u64 amounts[N], all = 0;
        u32 bins[N];
        bool alike = true;
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            amounts[k] = SUM == Sum::Count ? 1 : weight_of(x[k] - c.largest);
            bins[k] = bin_of(x[k], id + k);
            if (bins[k] == NO_BIN || (SUM == Sum::Weight && amounts[k] < least.weight)) amounts[k] = 0;
            alike = alike & (bins[k] == bins[0]);
        }
        if (SUM == Sum::Weight && least.key > 0) {
#pragma unroll
            for (u32 k = 0; k < N; k++) amounts[k] = key_of(x[k], id + k) < least.key ? 0 : amounts[k];
        }
#pragma unroll
        for (u32 k = 0; k < N; k++) all += amounts[k];
        if (alike) return add_to_bin<SUM>(s, bins[0], all);
#pragma unroll
        for (u32 k = 0; k < N; k++) add_to_bin<SUM>(s, bins[k], amounts[k]);
    });
    __syncthreads();
}

/// The bin, from the highest down, in which the running sum first exceeds the target, into `s`; the target becomes one within the bin. At
/// `first` the target is `target_of(total)`. False where the total does not exceed it.
template <class Target>
__device__ inline bool find_bin(SampleShared& s, bool first, u64& target, Target target_of) {
    constexpr u32 EACH = BINS / SAMPLE_THREADS;
    u64 own = 0;
    for (u32 k = 0; k < EACH; k++) own += bin_sum(s, BINS - 1 - (threadIdx.x * EACH + k));
    u64 until = own;
    for (u32 by = 1; by < WARP; by *= 2) {
        u64 other = __shfl_up_sync(ALL_LANES, until, by);
        if (lane() >= by) until += other;
    }
    if (lane() == WARP - 1) s.of_warp[threadIdx.x / WARP] = until;
    __syncthreads();
    u64 total = 0;
    for (u32 w = 0; w < SAMPLE_WARPS; w++) {
        if (w == threadIdx.x / WARP) until += total;
        total += s.of_warp[w];
    }
    if (first && total > 0) target = target_of(total);
    if (target >= total) return false;
    u64 before = until - own;
    if (before <= target && target < until) {
        u32 bin = BINS - 1 - threadIdx.x * EACH;
        while (before + bin_sum(s, bin) <= target) before += bin_sum(s, bin--);
        s.bin = bin;
        s.before = before;
        s.held = bin_sum(s, bin);
    }
    __syncthreads();
    target -= s.before;
    return true;
}

/// A logit below which none lies in this step or above it; the quotient's and the step's rounding is far below what it leaves.
__device__ inline float least_logit(const Candidates& c, u32 step) {
    if (step == 0) return -INFINITY;
    float least = c.largest - static_cast<float>(BINS + 1 - step) / 64.0f;
    least = (least - fabsf(c.largest) * 0x1p-20f) * c.temperature.of;
    return least - fabsf(least) * 0x1p-20f - 0x1p-120f;
}

/// Gathers what lies in the step and above it, from the row. Says how many that was; beyond GATHERED, that it was more.
__device__ inline void gather(SampleShared& s, Candidates& c, u32 step) {
    if (threadIdx.x < 2) s.found[threadIdx.x] = 0;
    __syncthreads();
    float least = least_logit(c, step);
    // A thread that finds no room does not ask again.
    bool full[2] = {false, false};
    each_logit<4>(c.logits, 0, c.vocab, threadIdx.x, SAMPLE_THREADS, [&](auto& logits, u32 id) {
        bool some = false;
        for (float logit : logits) some = some | !(logit < least);
        if (!some) return;
        divide(logits, c.temperature);
        for (float x : logits) {
            u32 own = step_of(x, c.largest);
            u64 key = key_of(x, id++);
            bool is_above = own > step;
            if (own < step || (is_above ? full[1] : full[0])) continue;
            u32 place = atomicAdd(&s.found[is_above], 1u);
            if (place < GATHERED) s.keys[is_above * GATHERED + place] = key;
            if (place >= GATHERED) (is_above ? full[1] : full[0]) = true;
        }
    });
    __syncthreads();
    c.in_step = s.found[0];
    c.above = s.found[1];
}

/// The key of the candidate at which the running sum of what counts, in descending order, first exceeds `target_of(total)`; 0 where the
/// total does not exceed it, or where that falls in a step below `lowest`. What is left is gathered if it has room: the candidate and all
/// before it.
template <Sum SUM, class Target>
__device__ inline u64 descend(SampleShared& s, Candidates& c, const Least& least, u32 lowest, Target target_of) {
    u64 target = 0;
    Candidates at = c;
    u32 step = NO_BIN;
    if (!c.gathered) {
        fill_bins<SUM>(s, c, least, [&](float x, u32) { return step_of(x, c.largest); });
        if (!find_bin(s, true, target, target_of) || s.bin < lowest) return 0;
        step = s.bin;
        // No weight of the step is larger: so many candidates it has at least.
        u64 most = SUM == Sum::Count ? 1 : weight_of((static_cast<float>(step) - (BINS - 2)) / 64.0f);
        if (s.held / GATHERED <= most) {
            gather(s, at, step);
            at.gathered = at.in_step <= GATHERED;
            if (at.gathered && at.above <= GATHERED) c = at;
            if (at.in_step == 1) return s.keys[0];
            at.above = 0;
        }
    }
    u64 prefix = 0, mask = 0;
#pragma unroll 1
    for (u32 digit = 0; digit < DIGITS; digit++) {
        u32 shift = digit_shift(digit), digits = digit_mask(digit);
        fill_bins<SUM>(s, at, least, [&](float x, u32 id) {
            u64 key = key_of(x, id);
            bool with = (key & mask) == prefix && (at.gathered || step_of(x, at.largest) == step);
            return with ? static_cast<u32>(key >> shift) & digits : NO_BIN;
        });
        if (!find_bin(s, digit == 0 && step == NO_BIN, target, target_of)) return 0;
        prefix |= static_cast<u64>(s.bin) << shift;
        mask |= static_cast<u64>(digits) << shift;
    }
    return prefix | 0xffc00000ull;
}

} // namespace baton
