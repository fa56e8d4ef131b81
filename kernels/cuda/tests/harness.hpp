// What the tests of kernels in the host shim share: a list of tests, random numbers, launching in every order of threads.
//
// A test computes what it expects by plain loops in double, or from the bytes a Rust source defines, without calling into the kernels'
// own headers for values. Arrays have exactly the size a kernel may touch, so that ASan sees the first byte beyond.
#pragma once

#include "common.cuh"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace test {

using namespace baton;

/// A test and its name; made by TEST.
struct Test {
    const char* name;
    void (*run)();
};
std::vector<Test>& tests();
struct Register {
    Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};
#define TEST(name)                                                                                                                   \
    static void name();                                                                                                              \
    static ::test::Register register_##name(#name, name);                                                                            \
    static void name()

/// The order in which a block's threads take turns, set by main.
extern shim::Order order;
/// Few and small cases, where threads are dear.
extern bool quick;

template <class... Args>
[[noreturn]] void failed(const char* file, int line, const char* format, Args... args) {
    std::fprintf(stderr, "%s:%d: ", file, line);
    std::fprintf(stderr, format, args...);
    std::fprintf(stderr, "\n");
    std::exit(1);
}
#define CHECK(condition, ...)                                                                                                        \
    do {                                                                                                                             \
        if (!(condition)) ::test::failed(__FILE__, __LINE__, __VA_ARGS__);                                                           \
    } while (0)

/// SplitMix64.
struct Random {
    u64 state;
    u64 next() {
        u64 z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    /// Below n.
    u32 below(u32 n) { return static_cast<u32>(next() % n); }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    /// About normal: the sum of twelve uniform numbers.
    double normal() {
        double sum = -6.0;
        for (int i = 0; i < 12; i++) sum += uniform();
        return sum;
    }
};

inline double to_double(Element type, const void* array, u64 i) {
    switch (type) {
    case Element::F32: return static_cast<const float*>(array)[i];
    case Element::F16: return __half2float(static_cast<const f16*>(array)[i]);
    default: return __bfloat162float(static_cast<const bf16*>(array)[i]);
    }
}

inline u32 element_bytes(Element type) { return type == Element::F32 ? 4 : 2; }
/// Half the distance between neighbours of 1.
inline double rounding(Element type) { return type == Element::F32 ? 0x1p-24 : type == Element::F16 ? 0x1p-11 : 0x1p-8; }
inline const char* name_of(Element type) { return type == Element::F32 ? "f32" : type == Element::F16 ? "f16" : "bf16"; }

/// An array of elements, aligned as device memory, of exactly its size.
struct Array {
    Element type;
    u64 count;
    std::vector<u8> bytes;

    Array(Element type, u64 count) : type(type), count(count), bytes(count * element_bytes(type)) {}
    template <class F>
    static Array of(Element type, u64 count, F value) {
        Array out(type, count);
        for (u64 i = 0; i < count; i++) out.set(i, value(i));
        return out;
    }
    void set(u64 i, double x) {
        float rounded = static_cast<float>(x);
        switch (type) {
        case Element::F32: reinterpret_cast<float*>(data())[i] = rounded; break;
        case Element::F16: reinterpret_cast<f16*>(data())[i] = __float2half_rn(rounded); break;
        default: reinterpret_cast<bf16*>(data())[i] = __float2bfloat16_rn(rounded);
        }
    }
    double operator[](u64 i) const { return to_double(type, bytes.data(), i); }
    u8* data() { return bytes.data(); }
};

/// Normal numbers.
inline Array normals(Element type, u64 count, Random& random, double scale = 1.0) {
    return Array::of(type, count, [&](u64) { return random.normal() * scale; });
}

/// Rows of `width` elements, each beginning `stride` behind the one before, with what is not a number in between.
inline Array spaced(const Array& dense, u32 width, u32 stride) {
    u64 rows = dense.count / width;
    Array out = Array::of(dense.type, rows * stride, [](u64) { return std::nan(""); });
    for (u64 i = 0; i < dense.count; i++) out.set(i / width * stride + i % width, dense[i]);
    return out;
}

/// The rows again; what lies between them is as it was.
inline Array dense_of(const Array& spaced, u32 width, u32 stride) {
    Array out(spaced.type, spaced.count / stride * width);
    for (u64 i = 0; i < spaced.count; i++) {
        if (i % stride < width) {
            out.set(i / stride * width + i % stride, spaced[i]);
        } else if (!std::isnan(spaced[i])) {
            failed(__FILE__, __LINE__, "element %llu between rows was written", i);
        }
    }
    return out;
}

/// Launches a kernel as its own `launch_of` says; an empty grid is not launched.
template <class P>
void run(void (*kernel)(P), const P& params) {
    Launch launch = launch_of(params);
    if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return;
    shim::launch(launch.grid, launch.block, launch.shared, [&] { kernel(params); }, order);
}

/// `got` within `allowed` of `want`.
#define CHECK_NEAR(got, want, allowed, ...)                                                                                          \
    do {                                                                                                                             \
        double got_ = (got), want_ = (want), allowed_ = (allowed);                                                                   \
        if (!(std::fabs(got_ - want_) <= allowed_)) {                                                                                \
            std::fprintf(stderr, "got %.9g, want %.9g within %.3g: ", got_, want_, allowed_);                                        \
            ::test::failed(__FILE__, __LINE__, __VA_ARGS__);                                                                         \
        }                                                                                                                            \
    } while (0)

} // namespace test
