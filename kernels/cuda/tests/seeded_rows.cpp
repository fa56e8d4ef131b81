// Weights of a seed against the sequence stepped through number by number.
#include "seeded_rows.cu"

#include "harness.hpp"

namespace test {

/// Values of places 0.. of a tensor.
static std::vector<double> sequence(u64 key, u64 count, float middle, float spread) {
    std::vector<double> out;
    u64 state = key;
    while (out.size() < count) {
        state += 0x9e3779b97f4a7c15ull;
        u64 z = state;
        z ^= z >> 30, z *= 0xbf58476d1ce4e5b9ull;
        z ^= z >> 27, z *= 0x94d049bb133111ebull;
        z ^= z >> 31;
        short lanes[4];
        std::memcpy(lanes, &z, sizeof z);
        for (short lane : lanes) {
            float scaled = spread * (static_cast<float>(lane) / 32768);
            out.push_back(__bfloat162float(__float2bfloat16_rn(middle + scaled)));
        }
    }
    return out;
}

TEST(seeded_rows_are_those_of_the_whole_tensor) {
    u64 places = 60 * 2100, key = 0xfeedfacecafebeefull;
    for (float middle : {0.0f, 1.0f}) {
        std::vector<double> all = sequence(key, places, middle, 0.125f);
        for (u32 rows : {0u, 1u, 3u, 57u}) {
            for (u32 width : {8u, 24u, 2056u}) {
                for (u32 beyond : {0u, 8u, 43u}) {
                    for (u64 first : {0ull, 5ull, 64ull}) {
                        Array out(Element::Bf16, static_cast<u64>(rows) * width);
                        u64 stride = width + beyond;
                        run(baton_seeded_rows, SeededRows{out.data(), key, first, stride, rows, width, middle, 0.125f});
                        for (u64 i = 0; i < out.count; i++) {
                            double want = all[first + i / width * stride + i % width];
                            CHECK(out[i] == want, "element %llu of %u x %u, %u beyond: %g, not %g", i, rows, width, beyond, out[i], want);
                        }
                    }
                }
            }
        }
    }
}

/// Places are 64 bits wide: a tensor may have more elements than 32 bits tell.
TEST(seeded_rows_far_into_a_tensor) {
    u64 first = (1ull << 33) + 3, stride = (1ull << 32) + 1, key = 9;
    Array out(Element::Bf16, 16);
    run(baton_seeded_rows, SeededRows{out.data(), key, first, stride, 2, 8, 0.0f, 1.0f});
    for (u64 i = 0; i < 16; i++) {
        u64 place = first + i / 8 * stride + i % 8;
        // A sequence begun later is the rest of it.
        double want = sequence(key + place / 4 * 0x9e3779b97f4a7c15ull, 4, 0.0f, 1.0f)[place % 4];
        CHECK(out[i] == want, "element %llu is %g, not %g", i, out[i], want);
    }
}

} // namespace test
