// RMS norm of rows, with the residual added first: x += add (where given), out = x / sqrt(mean(x²) + eps) · weight.
//
// x: [rows, width] of x_type, written only when there is something to add. add: [rows, width] of x_type. out: [rows, width] of y_type.
// weight: [width] f32.
// With scales, [rows] f32, out is E4M3 instead, a row as quantise_rows.cu would make it of the norm in f32, to the bit.
// out may be x where the types are the same. Heads are rows when their dimensions are normed, and lie `together` in a token's row, which
// begins x_stride elements behind the one before, out_stride in out; where there is something to add, or are scales, rows lie one behind
// the other. Same operations: `rms_norm` and `First` in kernels/src/backend.rs; the sum's order differs from the CPU's.
//
// Threads: a row is taken by one warp when it has up to 1024 elements, otherwise by a block; one thread takes octets of it.
// Bytes moved: x and out once, and with a residual add once and x once more; a row's later reads hit L1, weight L2. Bound: memory bandwidth.
// Limits: width a multiple of 8; rows · width below 2^63.
#include "e4m3.cuh"

namespace baton {

struct RmsNorm {
    void* x;
    const void* add;
    const float* weight;
    void* out;
    float* scales;
    Element x_type;
    Element y_type;
    u32 rows;
    u32 width;
    /// Rows of x that lie one behind the other, and elements from the first of them to the next first; those of out likewise.
    u32 together;
    u32 x_stride;
    u32 out_stride;
    float eps;
};

constexpr u32 RMS_NORM_THREADS = 512;

inline Launch launch_of(const RmsNorm& p) { return launch_by_rows(p.rows, p.width, RMS_NORM_THREADS); }

/// Elements start + i.. of a row, normed.
__device__ inline Octet normed8(const RmsNorm& p, u64 start, u32 i, float factor) {
    Octet x = load8(p.x_type, p.x, start + i);
    Octet weight = load8(Element::F32, p.weight, i);
#pragma unroll
    for (u32 k = 0; k < OCTET; k++) x.x[k] = x.x[k] * factor * weight.x[k];
    return x;
}

BATON_KERNEL(RMS_NORM_THREADS) baton_rms_norm(const __grid_constant__ RmsNorm p) {
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= p.rows) return;
    u64 place = row % p.together * p.width;
    u64 start = row / p.together * static_cast<u64>(p.x_stride) + place, out = row / p.together * static_cast<u64>(p.out_stride) + place;
    u32 step = blockDim.x * OCTET;
    float squares = 0.0f;
    for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) {
        Octet x = load8(p.x_type, p.x, start + i);
        if (p.add) {
            Octet y = load8(p.x_type, p.add, start + i);
#pragma unroll
            for (u32 k = 0; k < OCTET; k++) x.x[k] += y.x[k];
            store8(p.x_type, p.x, start + i, x);
            // What the next reader sees is what is normed.
            x = load8(p.x_type, p.x, start + i);
        }
#pragma unroll
        for (u32 k = 0; k < OCTET; k++) squares = fmaf(x.x[k], x.x[k], squares);
    }
    squares = blockDim.x == WARP ? warp_sum(squares) : block_sum(squares);
    float factor = 1.0f / sqrtf(squares / static_cast<float>(p.width) + p.eps);
    if (!p.scales) {
        for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) store8(p.y_type, p.out, out + i, normed8(p, start, i, factor));
        return;
    }
    float largest = 0.0f;
    for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) largest = largest_of(normed8(p, start, i, factor), largest);
    RowScale row_of = row_scale(blockDim.x == WARP ? lanes_max(largest, WARP) : block_max(largest));
    if (threadIdx.x == 0) p.scales[row] = row_of.scale;
    u8* codes = static_cast<u8*>(p.out) + out;
    for (u32 i = threadIdx.x * OCTET; i < p.width; i += step) store_e4m3(codes + i, normed8(p, start, i, factor), row_of.inverse);
}

} // namespace baton
