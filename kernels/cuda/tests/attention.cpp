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

/// How decode rows' work is listed and shared. No bit of a result may depend on it.
struct Listed {
    u32 thread_blocks = 3;
    /// Lists the work in another order, and gives rows other slots, with some in between that nobody has.
    bool mixed = false;
    /// Launches, each with the work of so many rows; 0: one launch.
    u32 rows = 0;
};

/// What splits leave.
struct Scratch {
    std::vector<float> partial;
    std::vector<float2> stats;
};

static Array decode(Case& c, u32 split, Listed how = {}, Element out_type = Element::F32, Scratch* left = nullptr) {
    KvType type = c.type;
    auto kernel = c.dim <= 64    ? BY_TYPE(baton_attention_decode, 64)
                  : c.dim <= 128 ? BY_TYPE(baton_attention_decode, 128)
                                 : BY_TYPE(baton_attention_decode, 256);
    u32 most = how.rows ? how.rows : static_cast<u32>(c.tiles.size());
    std::vector<std::vector<DecodeSplit>> passes;
    u32 slots = 0;
    for (u32 first = 0; first < c.tiles.size(); first += most) {
        std::vector<DecodeSplit> list;
        u32 slot = how.mixed ? 2 : 0;
        u32 end = std::min(first + most, static_cast<u32>(c.tiles.size()));
        for (u32 i = 0; i < end - first; i++) {
            u32 tile = how.mixed ? end - 1 - i : first + i;
            if (c.tiles[tile].rows == 0) continue;
            u32 position = c.tiles[tile].position, of = c.window && position >= c.window ? (position + 1 - c.window) / split : 0;
            u32 count = position / split - of + 1;
            for (u32 s = of; s <= position / split; s++) list.push_back({tile, s, count > 1 ? slot + s - of : 1u << 30});
            slot += count > 1 ? count : 0;
        }
        Random random{list.size()};
        for (u32 i = 1; how.mixed && i < list.size(); i++) std::swap(list[i], list[random.below(i + 1)]);
        slots = std::max(slots, slot);
        passes.push_back(list);
    }
    u32 columns = c.kv_heads * parts(c.heads / c.kv_heads, 16);
    std::vector<float> partial(static_cast<u64>(slots) * c.heads * c.dim, NAN);
    std::vector<float2> stats(static_cast<u64>(slots) * c.heads, make_float2(NAN, NAN));
    std::vector<u32> done(static_cast<u64>(slots) * columns, 0);
    Array out(out_type, c.q.count);
    for (const std::vector<DecodeSplit>& list : passes) {
        // Behind the block tables, as the host packs it.
        DecodeWork work{static_cast<u32>(c.tables.size()), static_cast<u32>(list.size())};
        std::vector<u32> blocks = c.tables;
        for (const DecodeSplit& s : list) blocks.insert(blocks.end(), {s.tile, s.split, s.slot});
        AttentionDecode p{c.params(out, c.tiles), &work, partial.data(), stats.data(), done.data(), split, how.thread_blocks};
        p.a.blocks = blocks.data();
        run(kernel, p);
        for (u32 count : done) CHECK(count == 0, "a count is %u after a launch", count);
    }
    if (left) *left = {partial, stats};
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
        odd.check(decode(odd, 64, {}, Element::Bf16), "decode");
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
            c.check(decode(c, 64), "decode");
            if (quick) break;
        }
    }
}

TEST(decode_of_a_row_is_the_same_in_any_batch) {
    Case c(KvType::Bf16, 64, 8, 2, 0, {{5, 1}, {150, 1}, {40, 1}});
    Array all = decode(c, 64);
    Case alone = c;
    alone.tiles = {c.tiles[1]};
    Array one = decode(alone, 64);
    u64 row = 8 * 64 * 4;
    CHECK(std::memcmp(all.data() + row, one.data() + row, row) == 0, "a row alone differs from itself in a batch"); // I1
}

TEST(decode_does_not_depend_on_who_does_what_and_ends_last) {
    // Rows of one split, of a few and of many, with and without a window, some places without rows; heads in two parts.
    for (u32 window : {0u, 150u}) {
        Case c(KvType::F16, 64, quick ? 4 : 36, 2, window, {{5, 1}, {640, 1}, {64, 1}, {200, 1}, {63, 1}});
        c.tiles.insert(c.tiles.begin() + 1, KEPT);
        c.tiles.push_back(KEPT);
        Array want = decode(c, 64, {1});
        Case rows = c;
        std::erase_if(rows.tiles, [](const Tile& tile) { return tile.rows == 0; });
        rows.check(want, "decode");
        // Fewer thread blocks than there is work, as many, and more.
        for (Listed how : {Listed{2, true}, Listed{7, true}, Listed{500, false}, Listed{5, false, 2}, Listed{5, true, 1}}) {
            CHECK(decode(c, 64, how).bytes == want.bytes, "%u thread blocks, window %u", how.thread_blocks, window); // I1
            if (quick && how.thread_blocks > 7) break;
        }
    }
}

TEST(decode_brings_splits_together_in_ascending_order) {
    // More splits than a warp has lanes.
    u32 splits = quick ? 6 : 37;
    Case c(KvType::Bf16, 64, 4, 2, 0, {{64 * splits - 5, 1}});
    Scratch left;
    Array got = decode(c, 64, {2}, Element::F32, &left);
    for (u32 at = 0; at < c.heads * c.dim; at++) {
        u32 head = at / c.dim, heads = c.heads;
        float largest = -INFINITY, sum = 0.0f, x = 0.0f;
        for (u32 s = 0; s < splits; s++) largest = std::max(largest, left.stats[s * heads + head].x);
        for (u32 s = 0; s < splits; s++) {
            float2 of = left.stats[s * heads + head];
            float weight = exp2f(of.x - largest);
            sum = fmaf(of.y, weight, sum);
            x = fmaf(left.partial[s * heads * c.dim + at], weight, x);
        }
        CHECK(got[at] == static_cast<double>(x * (1.0f / sum)), "head %u, element %u", head, at % c.dim);
    }
}

TEST(decode_of_no_row_does_nothing) {
    Case c(KvType::Bf16, 64, 4, 2, 0, {{70, 1}});
    c.tiles = {KEPT, KEPT};
    Array out = decode(c, 64);
    CHECK(out.bytes == Array(Element::F32, c.q.count).bytes, "something is written");
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
    CHECK(decode(c, 64).bytes == alone.bytes, "decode");
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
