// What sampling reads of a row, and what it makes of one logit.
#include "logits.cuh"

#include "harness.hpp"

namespace test {

TEST(a_sampled_row_is_read_once_wherever_it_begins) {
    for (u32 ahead = 0; ahead < 5; ahead++) {
        for (u32 count : {0u, 1u, 2u, 3u, 4u, 5u, 31u, 63u, 64u, 127u, 130u, 1001u}) {
            // Of exactly this size, so that ASan sees a load beyond it.
            std::vector<float> row(ahead + count);
            for (u32 i = 0; i < row.size(); i++) row[i] = static_cast<float>(i);
            std::vector<u32> seen(ahead + count);
            for (u32 thread = 0; thread < WARP; thread++) {
                u32 next = 0;
                auto take = [&](auto& x, u32 id) {
                    for (float of : x) {
                        CHECK(of == static_cast<float>(id) && id >= next, "%g for id %u after %u", of, id, next);
                        next = id + 1;
                        seen[id++]++;
                    }
                };
                if (count % 2) each_logit<2>(row.data(), ahead, ahead + count, thread, WARP, take);
                if (count % 2 == 0) each_logit<4>(row.data(), ahead, ahead + count, thread, WARP, take);
            }
            for (u32 i = 0; i < row.size(); i++) CHECK(seen[i] == (i >= ahead), "%u of %u behind %u: %u times", i, count, ahead, seen[i]);
        }
    }
}

TEST(quotients_of_a_sampler_are_those_of_division) {
    Random random{61};
    float plain[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1.0f, 3.0f, 1e-42f, -1e-42f, 1e38f, 0x1p-100f, 0x1p100f};
    for (u32 i = 0; i < (quick ? 1000u : 400000u); i++) {
        // Any bits, or a logit and a temperature as they are.
        bool any = i % 4 == 0;
        float by = any ? std::fabs(std::bit_cast<float>(static_cast<u32>(random.next()))) : static_cast<float>(0.01 + 3 * random.uniform());
        if (!(by > 0.0f) || by == INFINITY) continue;
        float x[4], one[1];
        for (float& of : x) of = any ? std::bit_cast<float>(static_cast<u32>(random.next())) : static_cast<float>(random.normal() * 10);
        if (i % 8 == 1) x[i / 8 % 4] = plain[i / 32 % std::size(plain)];
        float four[4] = {x[0], x[1], x[2], x[3]};
        one[0] = x[1];
        Divisor d = divisor(by);
        divide(four, d);
        divide(one, d);
        CHECK(std::bit_cast<u32>(one[0]) == std::bit_cast<u32>(four[1]), "alone and among four");
        for (u32 k = 0; k < 4; k++) {
            float want = x[k] / by;
            bool same = std::bit_cast<u32>(four[k]) == std::bit_cast<u32>(want) || (four[k] != four[k] && want != want);
            CHECK(same, "%a / %a: %a, not %a", x[k], by, four[k], want);
        }
    }
}

TEST(quotients_of_a_sampler_are_rounded_as_those_of_division_where_that_is_hardest) {
    Random random{71};
    for (u32 i = 0; i < (quick ? 1000u : 200000u); i++) {
        // An odd mantissa, its inverse modulo 2^32, and the odd number of 25 bits whose product with it is next to a multiple of 2^25.
        u32 by = 0x800001u | (random.next() & 0x7fffffu), inverse = by;
        for (u32 k = 0; k < 5; k++) inverse *= 2 - by * inverse;
        bool over = (inverse & 0x1ffffffu) >= 1u << 24;
        u64 middle = (over ? inverse : 0u - inverse) & 0x1ffffffu;
        float x[1] = {static_cast<float>((middle * by + (over ? 0 : 1)) >> 25) * 0x1p-20f};
        float of = static_cast<float>(by) * 0x1p-22f, want = x[0] / of;
        divide(x, divisor(of));
        CHECK(x[0] == want, "%u / %u: %a, not %a", static_cast<u32>(middle * by >> 25), by, x[0], want);
    }
}

TEST(weights_of_a_sampler_are_whole_numbers_of_the_exponential) {
    Random random{67};
    for (u32 i = 0; i < (quick ? 1000u : 200000u); i++) {
        float distance = i < 8 ? -static_cast<float>(i) / 64 : static_cast<float>(-45 * random.uniform());
        u64 want = static_cast<u64>(expf(distance) * 0x1p40f);
        CHECK(weight_of(distance) == want, "e^%a: %llu, not %llu", distance, weight_of(distance), want);
    }
    CHECK(weight_of(0.0f) == WHOLE, "of the largest");
    for (float none : {-INFINITY, NAN, -NAN, -1e30f}) CHECK(weight_of(none) == 0, "of %g", none);
}

} // namespace test
