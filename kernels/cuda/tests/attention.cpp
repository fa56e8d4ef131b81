// Attention over a paged pool against a softmax in double, from what the pool really holds.
#include "attention_decode.cu"
#include "attention_prefill.cu"

#include "kv_pool.hpp"

namespace test {

/// A batch: spans of (first position, rows), their tables, a pool that holds every position up to the last row's, and queries.
struct Case {
    KvType type;
    u32 dim;
    u32 heads;
    u32 kv_heads;
    u32 block_size;
    u32 window;
    std::vector<Tile> tiles;
    std::vector<u32> tables;
    Pool pool;
    Array q;
    float scale;

    Case(KvType type, u32 dim, u32 heads, u32 kv_heads, u32 window, std::vector<std::pair<u32, u32>> spans, u32 block_size = 16)
        : type(type), dim(dim), heads(heads), kv_heads(kv_heads), block_size(block_size), window(window),
          pool(type, blocks_of(spans, block_size), kv_heads, block_size, dim), q(Element::F32, 0), scale(1.0f / std::sqrt(float(dim))) {
        Random random{dim * 131ull + heads * 7 + window + spans.size()};
        u32 rows = 0, next = pool.blocks;
        std::vector<float> x(dim);
        for (auto [position, count] : spans) {
            Tile tile{rows, count, position, static_cast<i32>(tables.size())};
            std::vector<u32> table;
            // Blocks that no row can see are not there: their entries name no block.
            u32 first = window && position >= window ? (position + 1 - window) / block_size : 0;
            for (u32 b = 0; b * block_size < position + count; b++) table.push_back(b < first ? 0xffffffu : --next);
            for (u32 at = first * block_size; at < position + count; at++) {
                for (u32 plane = 0; plane < 2; plane++) {
                    for (u32 h = 0; h < kv_heads; h++) {
                        for (float& value : x) value = static_cast<float>(random.normal() * (plane ? 0.5 : 1.5));
                        pool.write(table, plane, h, at, x.data());
                    }
                }
            }
            tables.insert(tables.end(), table.begin(), table.end());
            tiles.push_back(tile);
            rows += count;
        }
        q = normals(Element::F32, static_cast<u64>(rows) * heads * dim, random);
    }

    static u32 blocks_of(const std::vector<std::pair<u32, u32>>& spans, u32 block_size) {
        u32 blocks = 1;
        for (auto [position, count] : spans) blocks += parts(position + count, block_size);
        return blocks;
    }

    u32 rows() const { return tiles.empty() ? 0 : tiles.back().row + tiles.back().rows; }

    Attention params(Array& out, const std::vector<Tile>& of) {
        u32 largest = 1;
        for (const Tile& tile : of) largest = std::max(largest, tile.rows);
        return {pool.planes(), q.data(), out.data(), of.data(), tables.data(), q.type, out.type, static_cast<u32>(of.size()), largest,
                heads, kv_heads, window, scale * 1.44269504f};
    }

    /// What a row and head should be, and the most that rounding of q, weights and result may move each element.
    void expect(const Tile& tile, u32 j, u32 head, std::vector<double>& want, std::vector<double>& allowed, Element out_type) {
        Element rounded = mma_type(type);
        std::vector<u32> table(tables.begin() + tile.table, tables.begin() + tile.table + parts(tile.position + tile.rows, block_size));
        u32 position = tile.position + j, kv_head = head / (heads / kv_heads);
        u32 first = window && position >= window ? position + 1 - window : 0;
        u64 at = (static_cast<u64>(tile.row + j) * heads + head) * dim;
        std::vector<double> weights;
        double largest = -INFINITY, sum = 0;
        for (u32 s = first; s <= position; s++) {
            double score = 0;
            for (u32 d = 0; d < dim; d++) {
                Array one(rounded, 1);
                one.set(0, q[at + d]);
                score += one[0] * pool.read(table, 0, kv_head, s, d);
            }
            weights.push_back(score * scale);
            largest = std::max(largest, weights.back());
        }
        for (double& w : weights) sum += w = std::exp(w - largest);
        want.assign(dim, 0);
        allowed.assign(dim, 1e-6);
        for (u32 s = first; s <= position; s++) {
            for (u32 d = 0; d < dim; d++) {
                double share = weights[s - first] / sum * pool.read(table, 1, kv_head, s, d);
                want[d] += share;
                allowed[d] += std::fabs(share) * (rounding(rounded) + 1e-5);
            }
        }
        for (u32 d = 0; d < dim; d++) allowed[d] += std::fabs(want[d]) * rounding(out_type);
    }

    void check(const Array& out, const char* what) {
        std::vector<double> want, allowed;
        for (const Tile& tile : tiles) {
            for (u32 j = 0; j < tile.rows; j++) {
                for (u32 h = 0; h < heads; h++) {
                    expect(tile, j, h, want, allowed, out.type);
                    for (u32 d = 0; d < dim; d++) {
                        double got = out[(static_cast<u64>(tile.row + j) * heads + h) * dim + d];
                        CHECK_NEAR(got, want[d], allowed[d], "%s, %s x %u, %u/%u heads, window %u, position %u, head %u, element %u", what,
                                   name_of(type), dim, heads, kv_heads, window, tile.position + j, h, d);
                    }
                }
            }
        }
    }
};

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
        std::vector<Tile> cut;
        for (auto [first, rows] : {std::pair{0u, 1u}, {1u, 16u}, {17u, 20u}}) {
            cut.push_back({c.tiles[0].row + first, rows, c.tiles[0].position + first, c.tiles[0].table});
        }
        CHECK(prefill(c, cut).bytes == whole.bytes, "the cut of a chunk changes its rows"); // I1
    }
}

/// No row; were it one, it would lie outside of everything.
constexpr Tile KEPT{1u << 20, 0, 1u << 20, -(1 << 20)};

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
    CHECK(prefill(c, c.tiles).bytes == want.bytes, "q rounded before and q rounded here differ");
}

} // namespace test
