// Rows of E4M3 as plain code makes them: of all codes the nearest.
#pragma once

#include "harness.hpp"

namespace test {

/// What a code below the NaN stands for.
inline double e4m3(u32 code) {
    u32 exponent = code >> 3, mantissa = code & 7;
    return exponent ? std::ldexp(1.0 + mantissa / 8.0, static_cast<int>(exponent) - 7) : std::ldexp(mantissa / 8.0, -6);
}

/// The nearest code, of two as near the even one; beyond the largest, that one.
inline u32 nearest(double y) {
    u32 best = 0;
    double magnitude = std::fabs(y);
    for (u32 code = 1; code <= 0x7e; code++) {
        double now = std::fabs(e4m3(code) - magnitude), before = std::fabs(e4m3(best) - magnitude);
        if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(y) ? 0x80 : 0);
}

/// A row's scale and codes, from its elements as they are stored.
inline void check_row(const char* what, const std::vector<float>& x, float scale, const u8* codes) {
    float largest = 0;
    for (float v : x) largest = std::fabs(v) > largest ? std::fabs(v) : largest;
    float want = largest / 448.0f, inverse = 0;
    if (want < 0x1p-126f) want = 0; else inverse = 1.0f / want;
    CHECK(scale == want, "%s: scale %g, not %g", what, static_cast<double>(scale), static_cast<double>(want));
    for (u64 i = 0; i < x.size(); i++) {
        float y = x[i] * inverse;
        u32 code = y == y ? nearest(y) : 0x7f;
        CHECK(codes[i] == code, "%s: element %llu of %zu, %g: code %02x, not %02x", what, static_cast<u64>(i), x.size(),
              static_cast<double>(x[i]), codes[i], code);
    }
}

} // namespace test
