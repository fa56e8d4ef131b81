// What is left to do to the product of two E4M3 matrices: x[r][c] = x[r][c] · (row_scales[r] · column_scales[c]) + bias[c].
//
// x: [rows, width] f32, each row `stride` behind the one before, sums of products of codes. row_scales: [rows], column_scales, bias: [width],
// f32; no scales where the product has applied them itself, no bias where there is none.
//
// Threads: one octet each. Bytes moved: x twice, scales and bias once. Bound: memory bandwidth. Limits: width a multiple of 8.
#include "common.cuh"

namespace baton {

struct ScaleProducts {
    float* x;
    const float* row_scales;
    const float* column_scales;
    const float* bias;
    u32 rows;
    u32 width;
    /// Elements of x from one row to the next.
    u32 stride;
};

constexpr u32 SCALE_PRODUCTS_THREADS = 256;

inline Launch launch_of(const ScaleProducts& p) {
    return launch_by_octets(static_cast<u64>(p.rows) * (p.width / OCTET), SCALE_PRODUCTS_THREADS);
}

BATON_KERNEL(SCALE_PRODUCTS_THREADS) baton_scale_products(const __grid_constant__ ScaleProducts p) {
    u64 i = static_cast<u64>(blockIdx.x) * SCALE_PRODUCTS_THREADS + threadIdx.x;
    u32 across = p.width / OCTET;
    u64 row = i / across;
    if (row >= p.rows) return;
    u64 column = i % across * OCTET;
    Octet x = load8(Element::F32, p.x, row * p.stride + column);
    if (p.row_scales) {
        float scale = p.row_scales[row];
        Octet scales = load8(Element::F32, p.column_scales, column);
#pragma unroll
        for (u32 k = 0; k < OCTET; k++) x.x[k] *= scale * scales.x[k];
    }
    if (p.bias) {
        Octet bias = load8(Element::F32, p.bias, column);
#pragma unroll
        for (u32 k = 0; k < OCTET; k++) x.x[k] += bias.x[k];
    }
    store8(Element::F32, p.x, row * p.stride + column, x);
}

} // namespace baton
