// Attention over a paged pool against a softmax in double, from what the pool really holds.
#include "attention_decode.cu"
#include "attention_prefill.cu"

#include "attention_case.hpp"

namespace test {

#define BY_TYPE(kernel, dim)                                                                                                         \
    (type == KvType::F16 ? kernel##_f16_##dim : type == KvType::Bf16 ? kernel##_bf16_##dim : type == KvType::Q8 ? kernel##_q8_##dim \
                                                                                             : kernel##_fp8_##dim)

static Array prefill(Case& c, const std::vector<Tile>& tiles, Element out_type = Element::F32) {
    KvType type = c.type;
    auto kernel = c.dim <= 64    ? BY_TYPE(baton_attention_prefill, 64)
                  : c.dim <= 128 ? BY_TYPE(baton_attention_prefill, 128)
                                 : BY_TYPE(baton_attention_prefill, 256);
    Array out(out_type, c.q.count);
    run(kernel, AttentionPrefill{c.params(out, tiles)});
    return out;
}

/// Splits as many as the longest row needs, and `more` that nobody does.
static Array decode(Case& c, u32 split, u32 more = 0, Element out_type = Element::F32) {
    KvType type = c.type;
    auto kernel = c.dim <= 64    ? BY_TYPE(baton_attention_decode, 64)
                  : c.dim <= 128 ? BY_TYPE(baton_attention_decode, 128)
                                 : BY_TYPE(baton_attention_decode, 256);
    u32 splits = 1;
    for (const Tile& tile : c.tiles) splits = std::max(splits, tile.rows ? tile.position / split + 1 : 0);
    splits += more;
    // Scratch of splits that a row does not have stays NaN.
    u64 sums = static_cast<u64>(c.tiles.size()) * c.heads * splits;
    std::vector<float> partial(sums * c.dim, NAN);
    std::vector<float2> stats(sums, make_float2(NAN, NAN));
    Array out(out_type, c.q.count);
    AttentionDecode p{c.params(out, c.tiles), partial.data(), stats.data(), split, splits};
    run(kernel, p);
    run(baton_attention_combine, AttentionCombine{p});
    return out;
}

static const KvType ATTENDED[] = {KvType::F16, KvType::Bf16, KvType::Q8, KvType::Fp8};

TEST(decode_attends_to_all_that_each_row_sees) {
    for (KvType type : ATTENDED) {
        for (u32 dim : {64u, 128u, 256u}) {
            if (quick && dim != 64 && type != KvType::Bf16) continue;
            // Nothing but itself, around a warp's slots, around a split, some more; lengths end inside their last blocks.
            std::vector<std::pair<u32, u32>> spans = {{0, 1}, {14, 1}, {15, 1}, {16, 1}, {63, 1}, {64, 1}, {210, 1}};
            if (quick) spans.erase(spans.begin(), spans.begin() + 4);
            Case c(type, dim, 4, 2, 0, spans);
            c.check(decode(c, 64), "decode");
            // So that a warp has several sixteens of slots in a split.
            if (dim == 64) c.check(decode(c, 192), "decode");
        }
        Case odd(type, 40, 3, 1, 0, {{33, 1}, {7, 1}}, 32);
        odd.check(decode(odd, 64, 2, Element::Bf16), "decode");
    }
}

TEST(decode_packs_any_number_of_heads) {
    for (u32 group : {1u, 7u, 8u, 16u, 17u, 40u}) {
        Case c(KvType::Bf16, 64, 2 * group, 2, 0, {{100, 1}, {3, 1}});
        c.check(decode(c, 64), "decode");
        if (quick && group == 7) break;
    }
}

TEST(decode_sees_no_further_back_than_its_window) {
    for (KvType type : {KvType::Bf16, KvType::Q8}) {
        for (u32 window : {1u, 17u, 64u, 100u}) {
            Case c(type, 64, 4, 2, window, {{0, 1}, {15, 1}, {99, 1}, {100, 1}, {191, 1}, {200, 1}});
            c.check(decode(c, 64, 1), "decode");
            if (quick) break;
        }
    }
}

TEST(decode_of_a_row_is_the_same_in_any_batch) {
    Case c(KvType::Bf16, 64, 8, 2, 0, {{5, 1}, {150, 1}, {40, 1}});
    Array all = decode(c, 64);
    Case alone = c;
    alone.tiles = {c.tiles[1]};
    Array one = decode(alone, 64, 3);
    u64 row = 8 * 64 * 4;
    CHECK(std::memcmp(all.data() + row, one.data() + row, row) == 0, "a row alone differs from itself in a batch"); // I1
}

TEST(prefill_is_causal_attention_of_every_row) {
    for (KvType type : ATTENDED) {
        for (u32 dim : {64u, 128u, 256u}) {
            if (quick && dim != 64) continue;
            Case c(type, dim, 4, 2, 0, {{0, 1}, {0, 17}, {37, 13}, {95, 2}});
            c.check(prefill(c, c.tiles), "prefill");
        }
        Case odd(type, 48, 6, 6, 0, {{31, 19}}, 32);
        odd.check(prefill(odd, odd.tiles, Element::Bf16), "prefill");
    }
}

TEST(prefill_packs_any_number_of_heads) {
    for (u32 group : {1u, 3u, 16u, 24u}) {
        Case c(KvType::Bf16, 64, group, 1, 0, {{5, 67 / group + 1}});
        c.check(prefill(c, c.tiles), "prefill");
        if (quick) break;
    }
}

TEST(prefill_sees_no_further_back_than_its_window) {
    for (KvType type : {KvType::F16, KvType::Fp8}) {
        for (u32 window : {1u, 16u, 33u}) {
            Case c(type, 64, 4, 2, window, {{0, 5}, {30, 21}, {100, 3}});
            c.check(prefill(c, c.tiles), "prefill");
            if (quick) break;
        }
    }
}

TEST(prefill_of_a_row_is_the_same_however_the_chunk_is_cut) {
    // Slots that a row does not see but others of its warp do change nothing of it.
    for (u32 window : {0u, 19u}) {
        Case c(KvType::Bf16, 64, 4, 2, window, {{20, 37}});
        Array whole = prefill(c, c.tiles);
        std::vector<Tile> cut = cut_of(c.tiles[0], {1, 16, 20});
        CHECK(prefill(c, cut).bytes == whole.bytes, "the cut of a chunk changes its rows"); // I1
    }
}

TEST(places_without_rows_are_passed_over) {
    Case c(KvType::Bf16, 64, 4, 2, 0, {{5, 1}, {150, 1}});
    Array alone = decode(c, 64), chunks = prefill(c, c.tiles);
    std::vector<Tile> kept = {c.tiles[0], KEPT, c.tiles[1], KEPT};
    CHECK(prefill(c, kept).bytes == chunks.bytes, "prefill");
    c.tiles = kept;
    CHECK(decode(c, 64, 2).bytes == alone.bytes, "decode");
}

TEST(attention_takes_queries_of_16_bits) {
    Case c(KvType::Bf16, 64, 4, 2, 0, {{20, 9}});
    Array q16 = Array::of(Element::Bf16, c.q.count, [&](u64 i) { return c.q[i]; });
    Array want = prefill(c, c.tiles);
    c.q = q16;
    c.place();
    CHECK(prefill(c, c.tiles).bytes == want.bytes, "q rounded before and q rounded here differ");
}

} // namespace test
