// Rotation, the store of K and V, and conversion between KV types: the same bytes as the rounding's definition gives.
#include "convert_kv.cu"
#include "rope_store_kv.cu"

#include "kv_pool.hpp"

namespace test {

static float* f32(Array& array) { return reinterpret_cast<float*>(array.data()); }

/// Sequences of (position, rows), each with a table of blocks in no order.
static void check_store(KvType type, Element in_type, u32 dim, std::vector<std::pair<u32, u32>> spans) {
    u32 heads = 6, kv_heads = 2, block_size = 16, positions = 64;
    Random random{dim * 7ull + spans.size()};
    std::vector<Tile> tiles;
    std::vector<u32> tables;
    u32 rows = 0, largest = 1;
    for (auto [position, count] : spans) {
        tiles.push_back({rows, count, position, static_cast<i32>(tables.size())});
        for (u32 b = 0; b < positions / block_size; b++) tables.push_back(static_cast<u32>(spans.size() * 4 - 1 - tables.size()));
        rows += count;
        largest = std::max(largest, count);
    }
    // A place that is kept for another batch.
    tiles.push_back({1u << 20, 0, 1u << 20, -(1 << 20)});
    Pool pool(type, static_cast<u32>(spans.size()) * 4, kv_heads, block_size, dim), want = pool;
    auto table_of = [&](const Tile& t) { return std::vector<u32>(tables.begin() + t.table, tables.begin() + t.table + 4); };
    Array cos(Element::F32, positions * dim / 2), sin = cos;
    for (u64 i = 0; i < cos.count; i++) {
        cos.set(i, std::cos(i * 0.37));
        sin.set(i, std::sin(i * 0.37));
    }
    Array q = normals(in_type, static_cast<u64>(rows) * heads * dim, random), k = normals(in_type, static_cast<u64>(rows) * kv_heads * dim, random);
    Array v = normals(in_type, k.count, random), before = q, rounded(Element::F16, q.count);
    if (rows > 1) {
        // A row of zeros, and one with a large element.
        for (u32 d = 0; d < dim; d++) v.set(d, 0.0);
        k.set(kv_heads * dim, 1000.0);
    }
    // In f32 elements, each product rounded once more than a fused one: the same operations as the kernel's.
    auto rotate = [&](Array& x, u64 at, u32 position, std::vector<float>& out) {
        for (u32 i = 0; i < dim / 2; i++) {
            float a = static_cast<float>(x[at + i]), b = static_cast<float>(x[at + dim / 2 + i]);
            float c = static_cast<float>(cos[position * dim / 2 + i]), s = static_cast<float>(sin[position * dim / 2 + i]);
            out[i] = std::fma(a, c, -(b * s));
            out[dim / 2 + i] = std::fma(b, c, a * s);
        }
    };
    // Rows between those of others, each its own way; q in place where its type stays.
    u32 q_width = heads * dim, kv_width = kv_heads * dim, q_stride = q_width + 2 * kv_width, k_stride = q_stride + 8, v_stride = kv_width + 24;
    Array q_placed = spaced(q, q_width, q_stride), k_placed = spaced(k, kv_width, k_stride), v_placed = spaced(v, kv_width, v_stride);
    bool in_place = in_type == Element::F32;
    RopeStoreKv p{pool.planes(), q_placed.data(), k_placed.data(), v_placed.data(), in_place ? q_placed.data() : rounded.data(), f32(cos), f32(sin),
                  tiles.data(), tables.data(), in_type, in_type == Element::F32 ? Element::F32 : Element::F16,
                  static_cast<u32>(tiles.size()), largest, heads, kv_heads, q_stride, k_stride, v_stride, in_place ? q_stride : q_width};
    run(baton_rope_store_kv, p);
    if (in_place) q = dense_of(q_placed, q_width, q_stride);
    std::vector<float> out(dim);
    for (const Tile& tile : tiles) {
        for (u32 j = 0; j < tile.rows; j++) {
            u64 row = tile.row + j;
            for (u32 h = 0; h < heads; h++) {
                u64 at = (row * heads + h) * dim;
                rotate(before, at, tile.position + j, out);
                for (u32 d = 0; d < dim; d++) {
                    double got = in_type == Element::F32 ? q[at + d] : rounded[at + d];
                    double wanted = in_type == Element::F32 ? out[d] : __half2float(__float2half_rn(out[d]));
                    CHECK(got == wanted, "q of row %llu head %u element %u: %g, not %g", row, h, d, got, wanted);
                }
            }
            for (u32 h = 0; h < kv_heads; h++) {
                u64 at = (row * kv_heads + h) * dim;
                rotate(k, at, tile.position + j, out);
                want.write(table_of(tile), 0, h, tile.position + j, out.data());
                for (u32 d = 0; d < dim; d++) out[d] = static_cast<float>(v[at + d]);
                want.write(table_of(tile), 1, h, tile.position + j, out.data());
            }
        }
    }
    for (u64 i = 0; i < pool.bytes.size(); i++) {
        CHECK(pool.bytes[i] == want.bytes[i], "%s x %u from %s: byte %llu of the pool is %02x, not %02x", name_of(type), dim,
              name_of(in_type), i, pool.bytes[i], want.bytes[i]);
    }
}

TEST(stored_rows_are_the_bytes_their_type_defines) {
    for (KvType type : KV_TYPES) {
        for (u32 dim : {8u, 40u, 64u, 128u, 256u}) {
            if (quick && dim == 256) continue;
            check_store(type, Element::F32, dim, {{0, 1}});
            check_store(type, Element::Bf16, dim, {{5, 17}, {63, 1}, {16, 3}});
        }
    }
    check_store(KvType::F16, Element::F32, 64, {});
}

TEST(values_that_are_not_finite_give_defined_codes) {
    u32 dim = 64;
    for (KvType type : {KvType::Q8, KvType::Fp8, KvType::Int4}) {
        std::vector<u8> source(slice_bytes(KvType::F32, 16, dim)), target(slice_bytes(type, 16, dim));
        auto* x = reinterpret_cast<float*>(source.data());
        for (u32 i = 0; i < 16 * dim; i++) x[i] = static_cast<float>(i % 7);
        x[3] = NAN;
        x[dim] = INFINITY;
        x[2 * dim + 1] = -INFINITY;
        run(baton_convert_kv, ConvertKv{source.data(), target.data(), KvType::F32, type, 1, 16, dim});
        const u8* parameters = target.data() + 16 * elements_bytes(type, dim);
        for (u32 row = 0; row < 4; row++) {
            double scale = half_of(parameters + row * parameter_bytes(type, dim));
            CHECK(std::isfinite(scale) == (row == 3), "%s: the scale of row %u is %g", name_of(type), row, scale);
        }
    }
}

TEST(every_kv_type_turns_into_every_other_as_a_store_would) {
    Random random{13};
    for (u32 dim : {8u, 64u, 96u, 264u, 512u}) {
        u32 block_size = dim == 64 ? 32 : 16, slices = dim == 96 ? 3 : 1;
        if (quick && dim > 96) break;
        for (KvType from : KV_TYPES) {
            u64 bytes = slice_bytes(from, block_size, dim);
            std::vector<u8> source(slices * bytes);
            std::vector<float> x(dim);
            for (u32 row = 0; row < slices * block_size; row++) {
                for (float& value : x) value = row == 1 ? 0.0f : static_cast<float>(random.normal() * (row + 1));
                if (row == 2 || row == 3) {
                    // Scales of 1 and elements halfway between two codes: of E4M3 in row 2, of q8 in row 3.
                    for (float& value : x) {
                        value = row == 2 ? std::ldexp(static_cast<float>(random.below(16)) + 0.5f, static_cast<int>(random.below(13)) - 9)
                                         : static_cast<float>(random.below(253)) - 126.5f;
                    }
                    x[0] = row == 2 ? 448.0f : 127.0f;
                }
                write_row(from, &source[row / block_size * bytes], block_size, dim, row % block_size, x.data());
            }
            for (KvType to : KV_TYPES) {
                u64 out_bytes = slice_bytes(to, block_size, dim);
                std::vector<u8> got(slices * out_bytes), want = got;
                run(baton_convert_kv, ConvertKv{source.data(), got.data(), from, to, slices, block_size, dim});
                for (u32 row = 0; row < slices * block_size; row++) {
                    for (u32 d = 0; d < dim; d++) {
                        x[d] = static_cast<float>(read_row(from, &source[row / block_size * bytes], block_size, dim, row % block_size, d));
                    }
                    write_row(to, &want[row / block_size * out_bytes], block_size, dim, row % block_size, x.data());
                }
                CHECK(got == want, "%s to %s, rows of %u", name_of(from), name_of(to), dim);
            }
        }
    }
}

} // namespace test
