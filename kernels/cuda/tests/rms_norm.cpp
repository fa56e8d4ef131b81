#include "rms_norm.cu"

#include "e4m3_reference.hpp"

namespace test {

static void check_norm(Element x_type, Element y_type, u32 rows, u32 width, bool residual, bool in_place) {
    Random random{rows * 1000003ull + width};
    u64 count = static_cast<u64>(rows) * width;
    Array x = normals(x_type, count, random), before = x, add = normals(x_type, count, random), out(y_type, count);
    Array weight = normals(Element::F32, width, random);
    float eps = 1e-5f;
    RmsNorm p{x.data(),  residual ? add.data() : nullptr, reinterpret_cast<float*>(weight.data()), in_place ? x.data() : out.data(), nullptr,
              x_type, y_type, rows, width, 1, width, width, eps};
    run(baton_rms_norm, p);
    const Array& result = in_place ? x : out;
    for (u32 r = 0; r < rows; r++) {
        std::vector<double> sum(width);
        double squares = 0;
        for (u32 i = 0; i < width; i++) {
            u64 at = static_cast<u64>(r) * width + i;
            sum[i] = before[at] + (residual ? add[at] : 0.0);
            if (residual && !in_place) {
                CHECK_NEAR(x[at], sum[i], std::fabs(sum[i]) * rounding(x_type), "row %u element %u of the residual", r, i);
                sum[i] = x[at];
            }
            squares += sum[i] * sum[i];
        }
        double factor = 1.0 / std::sqrt(squares / width + eps);
        for (u32 i = 0; i < width; i++) {
            double want = sum[i] * factor * weight[i];
            double allowed = std::fabs(want) * (rounding(y_type) * 1.01 + 2e-6) + 1e-30;
            CHECK_NEAR(result[static_cast<u64>(r) * width + i], want, allowed, "%u rows of %u, row %u element %u, %s to %s", rows, width,
                       r, i, name_of(x_type), name_of(y_type));
        }
    }
    if (!residual && !in_place) CHECK(x.bytes == before.bytes, "x was written without a residual");
}

TEST(rms_norm_is_the_norm_of_each_row) {
    for (u32 width : {8u, 64u, 248u, 256u, 264u, 576u, 1024u, 1032u, 4104u}) {
        for (u32 rows : {0u, 1u, 3u, 5u}) {
            check_norm(Element::F32, Element::F32, rows, width, false, false);
            check_norm(Element::F32, Element::Bf16, rows, width, true, false);
            check_norm(Element::Bf16, Element::Bf16, rows, width, true, false);
            check_norm(Element::F32, Element::F32, rows, width, false, true);
        }
        if (quick && width >= 1032) break;
    }
}

TEST(rms_norm_of_a_row_is_the_same_in_any_batch) {
    Random random{7};
    u32 width = 1160;
    Array x = normals(Element::F32, 5 * width, random), weight = normals(Element::F32, width, random);
    Array all(Element::F32, 5 * width), one(Element::F32, width);
    auto* w = reinterpret_cast<float*>(weight.data());
    run(baton_rms_norm, RmsNorm{x.data(), nullptr, w, all.data(), nullptr, Element::F32, Element::F32, 5, width, 1, width, width, 1e-6f});
    run(baton_rms_norm, RmsNorm{x.data() + 3 * width * 4, nullptr, w, one.data(), nullptr, Element::F32, Element::F32, 1, width, 1, width, width, 1e-6f});
    CHECK(std::memcmp(one.data(), all.data() + 3 * width * 4, width * 4) == 0, "a row alone differs from itself in a batch"); // I1
}

/// Heads that are normed within a token's row have the bits of rows, wherever they lie, and nothing between them is touched.
TEST(rms_norm_of_heads_within_rows) {
    Random random{17};
    for (u32 heads : {1u, 3u}) {
        u32 rows = 4, width = 72, across = heads * width, stride = across + 40;
        Array x = normals(Element::F32, static_cast<u64>(rows) * across, random), weight = normals(Element::F32, width, random);
        Array want(Element::F32, x.count), apart = spaced(x, across, stride), other = spaced(x, across, across + 8);
        auto* w = reinterpret_cast<float*>(weight.data());
        Element f32 = Element::F32;
        run(baton_rms_norm, RmsNorm{x.data(), nullptr, w, want.data(), nullptr, f32, f32, rows * heads, width, 1, width, width, 1e-6f});
        run(baton_rms_norm, RmsNorm{apart.data(), nullptr, w, other.data(), nullptr, f32, f32, rows * heads, width, heads, stride, across + 8, 1e-6f});
        CHECK(dense_of(other, across, across + 8).bytes == want.bytes, "%u heads, to rows elsewhere", heads);
        CHECK(dense_of(apart, across, stride).bytes == x.bytes, "%u heads: x was written", heads);
        run(baton_rms_norm, RmsNorm{apart.data(), nullptr, w, apart.data(), nullptr, f32, f32, rows * heads, width, heads, stride, stride, 1e-6f});
        CHECK(dense_of(apart, across, stride).bytes == want.bytes, "%u heads in place", heads);
    }
}

/// Norm and quantisation in one are the two after each other, to the bit, whatever else is in the batch (I1).
TEST(a_norm_quantises_as_its_result_would_be) {
    for (u32 width : {64u, 1024u, 1160u}) {
        for (bool residual : {false, true}) {
            Random random{width};
            u32 rows = 5;
            u64 count = static_cast<u64>(rows) * width;
            Array x = normals(Element::F32, count, random), again = x, add = normals(Element::F32, count, random);
            Array weight = normals(Element::F32, width, random), normed(Element::F32, count);
            void* y = residual ? add.data() : nullptr;
            auto* w = reinterpret_cast<float*>(weight.data());
            auto* floats = reinterpret_cast<const float*>(normed.data());
            std::vector<u8> codes(count), alone(width);
            std::vector<float> scales(rows);
            float eps = 1e-6f, scale;
            run(baton_rms_norm, RmsNorm{x.data(), y, w, normed.data(), nullptr, Element::F32, Element::F32, rows, width, 1, width, width, eps});
            run(baton_rms_norm, RmsNorm{again.data(), y, w, codes.data(), scales.data(), Element::F32, Element::F32, rows, width, 1, width, width, eps});
            CHECK(again.bytes == x.bytes, "the residual of rows of %u", width);
            for (u32 r = 0; r < rows; r++) {
                u64 at = static_cast<u64>(r) * width;
                check_row("norm", {floats + at, floats + at + width}, scales[r], &codes[at]);
            }
            u64 fourth = 3ull * width;
            run(baton_rms_norm, RmsNorm{x.data() + fourth * 4, nullptr, w, alone.data(), &scale, Element::F32, Element::F32, 1, width, 1, width, width, eps});
            bool same = std::memcmp(alone.data(), &codes[fourth], width) == 0 && scale == scales[3];
            CHECK(same, "a row of %u alone differs from itself in a batch", width);
        }
    }
}

} // namespace test
