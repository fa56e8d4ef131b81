// The gated activation, the addition and the embedding.
#include "add.cu"
#include "embed.cu"
#include "gate_mul.cu"

#include "harness.hpp"

namespace test {

static double activation(Gate act, double x) {
    if (act == Gate::Silu) return x / (1.0 + std::exp(-x));
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void check_gate(Element type, Element out_type, Gate act, u32 rows, u32 width, u32 padding, bool in_place) {
    Random random{rows + 31ull * width};
    u32 gate_stride = width + padding, up_stride = width + 2 * padding, out_stride = in_place ? gate_stride : width + padding / 2;
    u64 count = static_cast<u64>(rows) * width;
    Array before = normals(type, count, random, 4.0), up = normals(type, count, random);
    Array gate = spaced(before, width, gate_stride), up_placed = spaced(up, width, up_stride);
    Array out = spaced(Array(out_type, count), width, out_stride);
    Array& target = in_place ? gate : out;
    run(baton_gate_mul, GateMul{gate.data(), up_placed.data(), target.data(), type, out_type, act, rows, width, gate_stride, up_stride, out_stride});
    Array got = dense_of(target, width, out_stride);
    if (!in_place) CHECK(dense_of(gate, width, gate_stride).bytes == before.bytes, "gate was written");
    for (u64 i = 0; i < count; i++) {
        double want = activation(act, before[i]) * up[i];
        CHECK_NEAR(got[i], want, std::fabs(want) * (rounding(out_type) * 1.01 + 4e-6) + 1e-7, "element %llu, %s", i, name_of(out_type));
    }
}

TEST(gate_mul_is_the_activation_times_up) {
    for (Element type : {Element::F32, Element::F16, Element::Bf16}) {
        for (Gate act : {Gate::Silu, Gate::GeluTanh}) {
            for (u32 rows : {0u, 1u, 2u, 7u}) {
                check_gate(type, type, act, rows, 8, 0, false);
                check_gate(type, type, act, rows, 248, 16, true);
                check_gate(type, Element::Bf16, act, rows, 2056, 2064, false);
            }
        }
    }
}

TEST(gate_mul_of_large_values_saturates) {
    for (Gate act : {Gate::Silu, Gate::GeluTanh}) {
        Array gate = Array::of(Element::F32, 8, [](u64 i) { return i % 2 ? -1e4 : 1e4; });
        Array up = Array::of(Element::F32, 8, [](u64) { return 1.0; }), out(Element::F32, 8);
        run(baton_gate_mul, GateMul{gate.data(), up.data(), out.data(), Element::F32, Element::F32, act, 1, 8, 8, 8, 8});
        for (u64 i = 0; i < 8; i++) CHECK(out[i] == (i % 2 ? 0.0 : 1e4), "element %llu is %g", i, out[i]);
    }
}

TEST(add_adds) {
    Random random{41};
    for (u64 elements : {0ull, 8ull, 2040ull, 2048ull, 2056ull}) {
        for (Element type : {Element::F32, Element::Bf16}) {
            Array x = normals(type, elements, random), before = x, y = normals(Element::Bf16, elements, random);
            run(baton_add, Add{x.data(), y.data(), elements, type, Element::Bf16});
            for (u64 i = 0; i < elements; i++) {
                double want = before[i] + y[i];
                CHECK_NEAR(x[i], want, std::fabs(want) * rounding(type) * 1.001, "element %llu of %llu", i, elements);
            }
        }
    }
}

TEST(embed_takes_the_rows_and_scales_them) {
    Random random{3};
    for (u32 width : {8u, 24u, 640u, 1032u}) {
        for (u32 count : {0u, 1u, 5u, 33u}) {
            u32 vocabulary = 11;
            Array table = normals(Element::Bf16, vocabulary * width, random);
            std::vector<u32> rows(count);
            for (u32& row : rows) row = random.below(vocabulary);
            if (count > 1) rows[0] = vocabulary - 1;
            for (Element type : {Element::F32, Element::Bf16}) {
                Array out(type, static_cast<u64>(count) * width);
                run(baton_embed, Embed{table.data(), rows.data(), out.data(), Element::Bf16, type, count, width, 25.25f, nullptr});
                for (u64 i = 0; i < out.count; i++) {
                    double want = table[rows[i / width] * width + i % width] * 25.25;
                    CHECK_NEAR(out[i], want, std::fabs(want) * rounding(type), "element %llu of %u rows of %u", i, count, width);
                }
            }
        }
    }
}

TEST(embed_takes_the_rows_of_what_was_drawn) {
    Random random{4};
    u32 vocabulary = 11, width = 136;
    Array table = normals(Element::Bf16, vocabulary * width, random), out(Element::F32, 4ull * width);
    std::vector<Sampled> drawn(3);
    for (u32 i = 0; i < 3; i++) drawn[i].id = 10 - 4 * i;
    std::vector<u32> rows = {FOLLOWS | 2, 5, FOLLOWS | 0, FOLLOWS | 2}, want = {2, 5, 10, 2};
    run(baton_embed, Embed{table.data(), rows.data(), out.data(), Element::Bf16, Element::F32, 4, width, 1.0f, drawn.data()});
    for (u64 i = 0; i < out.count; i++) CHECK(out[i] == table[want[i / width] * width + i % width], "element %llu", i);
}

} // namespace test
