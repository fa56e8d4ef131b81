// E4M3, the eight-bit floating-point type of 4 exponent and 3 mantissa bits: rounding, and rows with a scale of their own.
//
// A row of an fp8 matrix (a weight's output, a token's input) is codes with one f32 scale, its largest magnitude / 448: an element is
// code · scale. A row is rounded alone (I1). In such matrices 0x7f and 0xff are NaNs, as tensor cores read them; KV has none (kv.cuh).
#pragma once

#include "common.cuh"

namespace baton {

constexpr float E4M3_MAX = 448.0f;
constexpr u32 E4M3_NAN = 0x7f;

/// The nearest E4M3, ties to even; x is within ±448.
__device__ inline u32 to_e4m3(float x) {
    u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    u32 normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    // Here f32 are multiples of 2^-9, the step of E4M3 below its smallest normal number.
    constexpr float STEPS = 16384.0f;
    u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + STEPS) - __float_as_uint(STEPS);
    return bits >> 31 << 7 | (magnitude < (127 - 6) << 23 ? subnormal : normal);
}

/// x within low..=high; a NaN becomes `high`.
__device__ inline float clamp_to(float x, float low, float high) {
    x = x < high ? x : high;
    return x > low ? x : low;
}
constexpr float FINITE = 3.40282347e38f;

/// Eight codes of one byte each.
__device__ inline void store_codes(u8* at, const u32* codes) {
    uint2 raw = make_uint2(codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24,
                           codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24);
    *reinterpret_cast<uint2*>(at) = raw;
}

/// What a row's codes are multiplied with, and by what its elements are multiplied to become codes.
struct RowScale {
    float scale;
    float inverse;
};

/// Of a row with this largest magnitude. All is 0 where it is, or so small that its scale has no inverse.
__device__ inline RowScale row_scale(float largest) {
    constexpr float SMALLEST = 1.17549435e-38f;
    float scale = largest / E4M3_MAX;
    if (scale < SMALLEST) return {0.0f, 0.0f};
    return {scale, 1.0f / scale};
}

/// The larger of `largest` and all magnitudes; a NaN is passed over.
__device__ inline float largest_of(const Octet& x, float largest) {
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        float magnitude = fabsf(x.x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/// Codes of eight elements of a row, rounded to nearest even; what is not a number stays none.
__device__ inline void store_e4m3(u8* at, const Octet& x, float inverse) {
    u32 codes[OCTET];
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        float y = x.x[i] * inverse;
        codes[i] = y == y ? to_e4m3(clamp_to(y, -E4M3_MAX, E4M3_MAX)) : E4M3_NAN;
    }
    store_codes(at, codes);
}

} // namespace baton
