#include "quantise_rows.cu"
#include "scale_products.cu"

#include "e4m3_reference.hpp"

namespace test {

static void check_rows(Element type, u32 rows, u32 width, Random& random) {
    u64 count = static_cast<u64>(rows) * width;
    Array x = normals(type, count, random, 3.0);
    if (rows > 2) {
        // All zeros, and less than any scale reaches.
        for (u32 i = 0; i < width; i++) x.set(width + i, 0), x.set(2 * width + i, i % 3 ? 0 : 1e-40);
    }
    // What a largest of 448 leaves as it is: ties, steps below the smallest normal number, and the largest.
    if (count >= 8) {
        double exact[8] = {448, -432, 17, 19, -0x1p-10, 0x3p-10, 0x1p-6 - 0x1p-10, -21};
        for (u32 i = 0; i < 8; i++) x.set(i, exact[i]);
        for (u32 i = 8; i < width; i++) x.set(i, 0.1 * x[i]);
    }
    std::vector<u8> out(count);
    std::vector<float> scales(rows);
    Array placed = spaced(x, width, width + 24);
    run(baton_quantise_rows, QuantiseRows{placed.data(), out.data(), scales.data(), type, rows, width, width + 24});
    for (u32 r = 0; r < rows; r++) {
        std::vector<float> row(width);
        for (u32 i = 0; i < width; i++) row[i] = static_cast<float>(x[static_cast<u64>(r) * width + i]);
        check_row(name_of(type), row, scales[r], &out[static_cast<u64>(r) * width]);
    }
}

TEST(quantised_rows_are_the_nearest_codes_of_each_row) {
    Random random{21};
    for (u32 width : {8u, 248u, 576u, 1024u, 1032u, 4104u}) {
        for (u32 rows : {0u, 1u, 5u}) {
            for (Element type : {Element::F32, Element::Bf16, Element::F16}) check_rows(type, rows, width, random);
        }
        if (quick && width >= 1032) break;
    }
}

TEST(what_is_not_a_number_stays_none) {
    for (u32 width : {64u, 1160u}) {
        Random random{3};
        Array x = normals(Element::F32, 2 * width, random);
        x.set(5, std::nan(""));
        x.set(width + 7, INFINITY);
        std::vector<u8> out(2 * width);
        float scales[2];
        run(baton_quantise_rows, QuantiseRows{x.data(), out.data(), scales, Element::F32, 2, width, width});
        CHECK(out[5] == 0x7f && std::isfinite(scales[0]), "a NaN is code %02x, scale %g", out[5], static_cast<double>(scales[0]));
        for (u32 i = 0; i < width; i++) CHECK(i == 5 || out[i] != 0x7f, "element %u beside a NaN", i);
        CHECK(out[width + 7] == 0x7f && std::isinf(scales[1]), "an infinity is code %02x", out[width + 7]);
    }
}

TEST(products_are_scaled_by_row_and_column) {
    for (u32 rows : {0u, 1u, 7u}) {
        for (u32 width : {16u, 304u}) {
            for (u32 with : {0u, 1u, 2u, 3u}) {
                Random random{rows * 31 + width};
                Array x = normals(Element::F32, static_cast<u64>(rows) * width, random), before = x;
                Array scales = normals(Element::F32, rows, random), columns = normals(Element::F32, width, random);
                Array bias = normals(Element::F32, width, random);
                auto floats = [&](Array& a, bool there) { return there ? reinterpret_cast<const float*>(a.data()) : nullptr; };
                Array placed = spaced(x, width, width + 8);
                run(baton_scale_products, ScaleProducts{reinterpret_cast<float*>(placed.data()), floats(scales, with & 1), floats(columns, with & 1),
                                                        floats(bias, with & 2), rows, width, width + 8});
                x = dense_of(placed, width, width + 8);
                for (u64 i = 0; i < x.count; i++) {
                    double want = before[i] * (with & 1 ? scales[i / width] * columns[i % width] : 1.0) + (with & 2 ? bias[i % width] : 0.0);
                    CHECK_NEAR(x[i], want, (std::fabs(want) + 4) * 3e-7, "element %llu of %u x %u", i, rows, width);
                }
            }
        }
    }
}

} // namespace test
