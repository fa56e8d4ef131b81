// A row of logits as sampling reads it: many loads under way at once, quotients by the temperature, the order of candidates, weights.
#pragma once
#include "common.cuh"

namespace baton {

constexpr u32 SAMPLE_THREADS = 512;
constexpr u32 SAMPLE_WARPS = SAMPLE_THREADS / WARP;
/// 1 as a weight.
constexpr u64 WHOLE = 1ull << 40;

/// Calls `f(x, id)` for the logits `first..end` of a row, of which this is thread `thread` of `threads`: `x` is an array of four neighbours,
/// `id` the first one's. They are loaded together, 16 bytes, and LOADS such loads of a thread are under way together. Its ids ascend. A row
/// may begin at any float: what lies before the first multiple of 16 bytes and behind the last comes singly, in arrays of one.
template <u32 LOADS, class F>
__device__ inline void each_logit(const float* logits, u32 first, u32 end, u32 thread, u32 threads, F f) {
    const float* row = logits + first;
    u32 misplaced = static_cast<u32>(reinterpret_cast<std::uintptr_t>(row) / sizeof(float)) % 4;
    u32 single = min(end - first, (4 - misplaced) % 4);
    auto one = [&](u32 id) {
        float x[1] = {logits[id]};
        f(x, id);
    };
    if (thread < single) one(first + thread);
    u32 fours = (end - first - single) / 4;
    const float4* body = reinterpret_cast<const float4*>(row + single);
    for (u32 at = thread; at < fours; at += LOADS * threads) {
        float4 loaded[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            if (at + k * threads < fours) loaded[k] = body[at + k * threads];
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            if (at + k * threads >= fours) break;
            float x[4] = {loaded[k].x, loaded[k].y, loaded[k].z, loaded[k].w};
            f(x, first + single + 4 * (at + k * threads));
        }
    }
    u32 behind = first + single + 4 * fours + thread;
    if (behind < end) one(behind);
}

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

/// What logits are divided by.
struct Divisor {
    float of;
    /// 1 / of, rounded.
    float inverse;
    /// Whether quotients may be had from it.
    bool tame;
};

__device__ inline Divisor divisor(float of) { return {of, 1.0f / of, of >= 0x1p-20f && of <= 0x1p20f}; }

/// Divides, with the results of `/` in fewer instructions: a product with the inverse is less than two units in the last place off, and one
/// step of Newton's takes that to within 6 / 2^25 of a unit before it rounds. Where nothing on the way over- or underflows, only quotients that
/// are so near the middle of two floats could round otherwise; all of them have been tried, and none does.
template <u32 N>
__device__ inline void divide(float (&x)[N], const Divisor& d) {
    bool tame = d.tame;
#pragma unroll
    for (u32 k = 0; k < N; k++) tame = tame & (fabsf(x[k]) >= 0x1p-100f) & (fabsf(x[k]) < 0x1p100f);
    if (!tame) {
        for (float& of : x) of = of / d.of;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        float about = x[k] * d.inverse;
        x[k] = fmaf(fmaf(-about, d.of, x[k]), d.inverse, about);
    }
}

/// Weight of a candidate so far from the largest: e^distance in units of 2^-40, rounded down. 0 where the distance is not a number.
__device__ inline u64 weight_of(float distance) {
    // e^-30 is less than a unit.
    u32 bits = __float_as_uint(expf(fmaxf(distance, -30.0f)));
    u32 high = (bits >> 15 & 0xffu) | 0x100u, low = bits << 17;
    return (static_cast<u64>(high) << 32 | low) >> (127 - (bits >> 23));
}

} // namespace baton
