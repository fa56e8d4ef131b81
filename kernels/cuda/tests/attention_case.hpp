// A batch over a paged pool for tests of attention, and what it should give: a softmax in double, from what the pool really holds.
#pragma once

#include "attention.cuh"

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
    /// q as rows between those of others.
    Array placed;
    float scale;

    Case(KvType type, u32 dim, u32 heads, u32 kv_heads, u32 window, std::vector<std::pair<u32, u32>> spans, u32 block_size = 16)
        : type(type), dim(dim), heads(heads), kv_heads(kv_heads), block_size(block_size), window(window),
          pool(type, blocks_of(spans, block_size), kv_heads, block_size, dim), q(Element::F32, 0), placed(q), scale(1.0f / std::sqrt(float(dim))) {
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
        place();
    }

    u32 q_stride() const { return (heads + kv_heads) * dim; }
    /// After q has changed.
    void place() { placed = spaced(q, heads * dim, q_stride()); }

    static u32 blocks_of(const std::vector<std::pair<u32, u32>>& spans, u32 block_size) {
        u32 blocks = 1;
        for (auto [position, count] : spans) blocks += parts(position + count, block_size);
        return blocks;
    }

    u32 rows() const { return tiles.empty() ? 0 : tiles.back().row + tiles.back().rows; }

    Attention params(Array& out, const std::vector<Tile>& of) {
        u32 largest = 1;
        for (const Tile& tile : of) largest = std::max(largest, tile.rows);
        return {pool.planes(), placed.data(), out.data(), of.data(), tables.data(), q.type, out.type, static_cast<u32>(of.size()), largest,
                heads, kv_heads, q_stride(), window, scale * 1.44269504f};
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

/// No row; were it one, it would lie outside of everything.
inline constexpr Tile KEPT{1u << 20, 0, 1u << 20, -(1 << 20)};

/// A chunk's rows as chunks of so many each.
inline std::vector<Tile> cut_of(Tile chunk, const std::vector<u32>& sizes) {
    std::vector<Tile> cut;
    for (u32 rows : sizes) {
        cut.push_back({chunk.row, rows, chunk.position, chunk.table});
        chunk.row += rows, chunk.position += rows;
    }
    return cut;
}

} // namespace test
