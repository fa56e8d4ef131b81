// Rows of a table by their numbers, scaled: out[i] = table[rows[i]] · scale. With a scale of 1 it gathers rows of activations.
//
// table: [any, width] of table_type. rows: [count] u32, each inside the table (the host has checked the ids), or FOLLOWS with the number of a
// token in `drawn` (sample.cu) whose id it is, which the host need not know; row i is row i of the table without them, so that this is also
// how f32 becomes bf16 before a product. out: [count, width] of out_type. Same operations: `embed` (of
// a table made dense by dequantise.cu) and `gather_rows` in kernels/src/backend.rs.
//
// Threads: one octet each. Bytes moved: count rows of the table, and out. Bound: memory bandwidth. Limits: width a multiple of 8.
#include "common.cuh"
#include "drawn.cuh"

namespace baton {

struct Embed {
    const void* table;
    const u32* rows;
    void* out;
    Element table_type;
    Element out_type;
    u32 count;
    u32 width;
    float scale;
    const Sampled* drawn;
};

/// In place of a row: that of a token in `drawn`.
constexpr u32 FOLLOWS = 1u << 31;

constexpr u32 EMBED_THREADS = 128;

inline Launch launch_of(const Embed& p) { return {dim3(p.count, parts(p.width / OCTET, EMBED_THREADS)), dim3(EMBED_THREADS)}; }

BATON_KERNEL(EMBED_THREADS) baton_embed(const __grid_constant__ Embed p) {
    u32 column = (blockIdx.y * EMBED_THREADS + threadIdx.x) * OCTET;
    if (column >= p.width) return;
    u64 row = p.rows ? p.rows[blockIdx.x] : blockIdx.x;
    if (p.rows && row & FOLLOWS) row = p.drawn[row & ~FOLLOWS].id;
    Octet x = load8(p.table_type, p.table, row * p.width + column);
#pragma unroll
    for (u32 k = 0; k < OCTET; k++) x.x[k] *= p.scale;
    store8(p.out_type, p.out, static_cast<u64>(blockIdx.x) * p.width + column, x);
}

} // namespace baton
