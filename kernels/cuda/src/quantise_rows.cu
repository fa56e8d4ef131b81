// Rows to E4M3 with a scale each (e4m3.cuh): a weight's outputs once, at load, and the tokens that products with such weights take.
//
// x: [rows, width] of x_type, each row x_stride elements behind the one before. out: [rows, width] codes. scales: [rows] f32. The norm of rows does the same at its end (rms_norm.cu).
//
// Threads: a row is taken by one warp when it has up to 1024 elements, otherwise by a block; one thread takes octets of it. Bytes moved:
// x and out once; a row's second read hits L1. Bound: memory bandwidth. Limits: width a multiple of 8; rows · width below 2^63.
#include "e4m3.cuh"

namespace baton {

struct QuantiseRows {
    const void* x;
    u8* out;
    float* scales;
    Element x_type;
    u32 rows;
    u32 width;
    /// Elements of x from one row to the next.
    u32 x_stride;
};

constexpr u32 QUANTISE_ROWS_THREADS = 512;

inline Launch launch_of(const QuantiseRows& p) { return launch_by_rows(p.rows, p.width, QUANTISE_ROWS_THREADS); }

BATON_KERNEL(QUANTISE_ROWS_THREADS) baton_quantise_rows(const __grid_constant__ QuantiseRows p) {
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= p.rows) return;
    u64 start = static_cast<u64>(row) * p.width, from = static_cast<u64>(row) * p.x_stride;
    u32 step = blockDim.x * OCTET;
    float largest = 0.0f;
    for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) largest = largest_of(load8(p.x_type, p.x, from + i), largest);
    RowScale row_of = row_scale(blockDim.x == WARP ? lanes_max(largest, WARP) : block_max(largest));
    if (threadIdx.x == 0) p.scales[row] = row_of.scale;
    for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) {
        store_e4m3(p.out + start + i, load8(p.x_type, p.x, from + i), row_of.inverse);
    }
}

} // namespace baton
