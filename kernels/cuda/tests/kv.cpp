// Rotation and the store of K and V: the same bytes as the rounding's definition gives.
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

/// A pool of one block with these rows of V.
static Pool stored(KvType type, u32 dim, const std::vector<float>& v) {
    u32 rows = static_cast<u32>(v.size()) / dim, block = 0;
    Pool pool(type, 1, 1, 16, dim);
    std::vector<float> q(v.size()), k(v.size()), cos(v.size() / 2, 1.0f), sin(v.size() / 2);
    Tile tile{0, rows, 0, 0};
    run(baton_rope_store_kv, RopeStoreKv{pool.planes(), q.data(), k.data(), v.data(), q.data(), cos.data(), sin.data(), &tile, &block,
                                         Element::F32, Element::F32, 1, rows, 1, 1, dim, dim, dim, dim});
    return pool;
}

TEST(values_that_are_not_finite_give_defined_codes) {
    u32 dim = 64;
    for (KvType type : {KvType::Q8, KvType::Fp8, KvType::Int4}) {
        std::vector<float> v(4 * dim);
        for (u32 i = 0; i < v.size(); i++) v[i] = static_cast<float>(i % 7);
        v[3] = NAN;
        v[dim] = INFINITY;
        v[2 * dim + 1] = -INFINITY;
        Pool pool = stored(type, dim, v);
        const u8* parameters = pool.slice_at(0, 1, 0) + 16 * elements_bytes(type, dim);
        for (u32 row = 0; row < 4; row++) {
            double scale = half_of(parameters + row * parameter_bytes(type, dim));
            CHECK(std::isfinite(scale) == (row == 3), "%s: the scale of row %u is %g", name_of(type), row, scale);
        }
    }
}

TEST(values_halfway_between_two_codes_go_to_the_even_one) {
    Random random{13};
    for (u32 dim : {8u, 64u, 96u, 256u}) {
        std::vector<float> v(2 * dim);
        // Scales of 1 and elements between two codes: of E4M3 in row 0, of q8 in row 1.
        for (u32 d = 0; d < dim; d++) {
            v[d] = std::ldexp(static_cast<float>(random.below(16)) + 0.5f, static_cast<int>(random.below(13)) - 9);
            v[dim + d] = static_cast<float>(random.below(253)) - 126.5f;
        }
        v[0] = 448.0f;
        v[dim] = 127.0f;
        for (KvType type : KV_TYPES) {
            Pool pool = stored(type, dim, v);
            std::vector<u8> want(pool.slice(), 0xff);
            for (u32 row = 0; row < 2; row++) write_row(type, want.data(), 16, dim, row, &v[row * dim]);
            CHECK(std::memcmp(pool.slice_at(0, 1, 0), want.data(), want.size()) == 0, "%s, rows of %u", name_of(type), dim);
        }
    }
}

} // namespace test
