// Sums over warps and blocks, and octets of every type.
#include "harness.hpp"

namespace baton {

struct Sums {
    const float* x;
    float* out;
    u32 threads;
};
inline Launch launch_of(const Sums& p) { return {dim3(1), dim3(p.threads)}; }

/// Two sums, one right after the other.
BATON_KERNEL(1024) two_sums(const __grid_constant__ Sums p) {
    float first = block_sum(p.x[threadIdx.x]);
    float second = block_sum(p.x[threadIdx.x] * 2.0f);
    p.out[threadIdx.x] = first + second;
}

} // namespace baton

namespace test {

TEST(sums_of_a_block_follow_each_other) {
    for (u32 threads : {32u, 64u, 512u, 1024u}) {
        std::vector<float> x(threads), out(threads);
        float want = 0;
        for (u32 i = 0; i < threads; i++) want += 3.0f * (x[i] = static_cast<float>(i % 17));
        run(two_sums, Sums{x.data(), out.data(), threads});
        for (u32 i = 0; i < threads; i++) CHECK(out[i] == want, "thread %u of %u has %g, not %g", i, threads, out[i], want);
    }
}

TEST(octets_come_back_as_they_were_stored) {
    for (Element type : {Element::F32, Element::F16, Element::Bf16}) {
        Random random{37};
        Array x = normals(type, 32, random), out(type, 32);
        for (u64 at = 0; at < 32; at += 8) store8(type, out.data(), at, load8(type, x.data(), at));
        CHECK(x.bytes == out.bytes, "%s", name_of(type));
    }
}

} // namespace test
