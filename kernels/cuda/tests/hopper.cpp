// Hopper's kernel of attention over the emulated units, and the units alone: a product of tiles that a copy has brought.
#include "attention_hopper.cu"

#include "attention_case.hpp"

namespace baton {

/// One product of each kind: scores = a · bᵀ, and out = words of a's first sixteen columns · v.
struct Products {
    TensorMap rows;
    float* scores;
    float* out;
};

struct alignas(1024) ProductsShared {
    u8 a[64 * 128];
    u8 b[128 * 128];
    u8 v[2][16 * 128];
    PhaseBarrier full;
};

inline Launch launch_of(const Products&) { return {dim3(1), dim3(128), sizeof(ProductsShared)}; }

/// rows: 64 of a, 128 of b, 16 of v, of 128 elements; a and b take the first 64.
BATON_KERNEL(128) two_products(const __grid_constant__ Products p) {
    BATON_DYNAMIC_SHARED(ProductsShared, shared);
    if (threadIdx.x == 0) {
        phase_init(shared.full, 1);
        phases_begin();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        phase_expect(shared.full, sizeof shared.a + sizeof shared.b + sizeof shared.v);
        for (u32 row = 0; row < 192; row += 16) {
            copy_box(row < 64 ? shared.a + row * 128 : shared.b + (row - 64) * 128, p.rows, shared.full, 0, row);
        }
        copy_box(shared.v[0], p.rows, shared.full, 0, 192);
        copy_box(shared.v[1], p.rows, shared.full, 64, 192);
    }
    phase_wait(shared.full, 0);
    float scores[64], out[64] = {};
    wgmma_fence();
    for (u32 k = 0; k < 4; k++) {
        u64 a = operand_at(shared_address(shared.a) + 32 * k, 16), b = operand_at(shared_address(shared.b) + 32 * k, 16);
        wgmma_n128<Element::Bf16>(scores, a, b, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(scores);
    u32 words[4];
    for (u32 i = 0; i < 4; i++) words[i] = pack2(Element::Bf16, scores[2 * i], scores[2 * i + 1]);
    wgmma_fence();
    wgmma_transposed<Element::Bf16>(out, words, operand_at(shared_address(shared.v), sizeof shared.v[0]));
    wgmma_commit();
    wgmma_wait<0>();
    settle(out);
    u32 warp = threadIdx.x / 32, g = lane() / 4, t = lane() % 4;
    for (u32 i = 0; i < 64; i++) {
        u32 at = (16 * warp + g + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2;
        p.scores[at] = scores[i];
        p.out[at] = out[i];
    }
}

} // namespace baton

namespace test {

TEST(hopper_multiplies_what_copies_have_brought) {
    Random random{5};
    Array rows = normals(Element::Bf16, 208 * 128, random);
    std::vector<float> scores(64 * 128), out(64 * 128);
    Products p{{}, scores.data(), out.data()};
    CHECK(shim::encode_rows(&p.rows, rows.data(), 128, 208, 256, 64, 16), "the tensor map is refused");
    run(two_products, p);
    for (u32 i = 0; i < 64; i++) {
        for (u32 j = 0; j < 128; j++) {
            double want = 0, sum = 0;
            for (u32 k = 0; k < 64; k++) want += rows[i * 128 + k] * rows[(64 + j) * 128 + k];
            CHECK_NEAR(scores[i * 128 + j], want, 1e-4, "row %u, column %u of a · b", i, j);
            for (u32 k = 0; k < 16; k++) {
                Array word(Element::Bf16, 1);
                word.set(0, scores[i * 128 + k]);
                sum += word[0] * rows[(192 + k) * 128 + j];
            }
            CHECK_NEAR(out[i * 128 + j], sum, 1e-3, "row %u, column %u of a · v", i, j);
        }
    }
}

TEST(hopper_tensor_maps_are_refused_as_the_driver_does) {
    TensorMap map;
    Array rows(Element::Bf16, 64 * 64);
    CHECK(shim::encode_rows(&map, rows.data(), 64, 64, 128, 64, 16), "a good one");
    CHECK(!shim::encode_rows(&map, rows.data() + 2, 64, 63, 128, 64, 16), "not at a multiple of 16");
    CHECK(!shim::encode_rows(&map, rows.data(), 64, 64, 120, 64, 16), "a stride of no multiple of 16");
    CHECK(!shim::encode_rows(&map, rows.data(), 128, 32, 256, 128, 16), "a box wider than the swizzle");
}

static Array hopper(Case& c, const std::vector<Tile>& tiles, Element out_type = Element::F32) {
    bool half = c.type == KvType::F16;
    auto kernel = c.dim == 64 ? (half ? baton_attention_hopper_f16_64 : baton_attention_hopper_bf16_64)
                              : (half ? baton_attention_hopper_f16_128 : baton_attention_hopper_bf16_128);
    Array out(out_type, c.q.count);
    AttentionHopper p{c.params(out, tiles), {}};
    u64 row = 2 * c.dim;
    CHECK(shim::encode_rows(&p.pool, c.pool.bytes.data(), c.dim, c.pool.bytes.size() / row, row, 64, box_slots(c.block_size)),
          "the pool's tensor map is refused");
    run(kernel, p);
    return out;
}

static const KvType HALVES[] = {KvType::F16, KvType::Bf16};

TEST(hopper_is_causal_attention_of_every_row) {
    for (KvType type : HALVES) {
        for (u32 dim : {64u, 128u}) {
            if (quick && (dim == 128) != (type == KvType::Bf16)) continue;
            // One row, whole turns, several turns of the ring, a tile that a warpgroup has no row of.
            std::vector<std::pair<u32, u32>> spans = {{126, 3}, {300, 36}};
            if (!quick) spans.insert(spans.end(), {{0, 1}, {0, 64}, {128, 1}});
            if (!quick) spans.push_back({dim == 64 ? 700 : 490, 3});
            Case c(type, dim, 2, 1, 0, spans);
            c.check(hopper(c, c.tiles), "hopper");
        }
    }
    Case narrow(KvType::Bf16, 128, 2, 2, 0, {{31, 19}}, 32);
    narrow.check(hopper(narrow, narrow.tiles, Element::Bf16), "hopper");
}

TEST(hopper_takes_blocks_of_any_size) {
    for (u32 block_size : {16u, 48u, 64u, 256u}) {
        Case c(KvType::F16, 64, 2, 1, 0, {{140, 20}}, block_size);
        c.check(hopper(c, c.tiles), "hopper");
        if (quick && block_size == 48) break;
    }
}

TEST(hopper_packs_any_number_of_heads) {
    for (u32 group : {1u, 3u, 24u, 129u}) {
        Case c(KvType::Bf16, 64, group, 1, 0, {{5, 150 / group + 1}});
        c.check(hopper(c, c.tiles), "hopper");
        if (quick) break;
    }
}

TEST(hopper_sees_no_further_back_than_its_window) {
    for (u32 window : {1u, 100u, 130u}) {
        Case c(KvType::F16, 64, 4, 2, window, {{0, 5}, {250, 21}, {380, 9}});
        c.check(hopper(c, c.tiles), "hopper");
        if (quick) break;
    }
}

TEST(hopper_gives_a_row_the_same_however_the_chunk_is_cut) {
    for (u32 window : {0u, 133u}) {
        Case c(KvType::Bf16, 64, 4, 2, window, {{240, 37}});
        Array whole = hopper(c, c.tiles);
        std::vector<Tile> cut = cut_of(c.tiles[0], {1, 16, 20});
        CHECK(hopper(c, cut).bytes == whole.bytes, "the cut of a chunk changes its rows"); // I1
        if (quick) break;
    }
}

TEST(hopper_passes_over_places_without_rows) {
    Case c(KvType::Bf16, 64, 4, 2, 0, {{5, 1}, {150, 2}});
    Array alone = hopper(c, c.tiles);
    std::vector<Tile> kept = {c.tiles[0], KEPT, c.tiles[1], KEPT};
    CHECK(hopper(c, kept).bytes == alone.bytes, "places without rows");
}

} // namespace test
