// GGUF weights made dense: quantised rows to bf16, f16 or f32, once, at load.
//
// source: rows as a file stores them, `row_bytes` each. out: [rows, cols] of out_type; row i is the stored row row_order[i], or i
// without one. Block layouts are those of kernels/src/cpu/unpack.rs (GGUF's own); a weight is d·scale·q - dmin·min with one rounding in
// f32, the same bits as `element` there, and then rounded to nearest in out_type.
//
// Threads: one octet each; an octet lies in one group of 32 and, for Q6_K, has one scale. Bytes moved: source and out once; bound:
// memory bandwidth, reached by no means, since blocks have odd sizes and are read by bytes; it runs once. Limits: cols a multiple of the
// block's elements.
#include "common.cuh"

namespace baton {

/// The quantised types, in the order of `WeightDtype` (crates/types/src/weight.rs).
enum class Quant : u32 { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K };

struct Dequantise {
    const u8* source;
    const u32* row_order;
    void* out;
    Quant type;
    Element out_type;
    u32 rows;
    u32 cols;
};

constexpr u32 DEQUANTISE_THREADS = 128;

inline Launch launch_of(const Dequantise& p) {
    return {dim3(p.rows, parts(p.cols / OCTET, DEQUANTISE_THREADS)), dim3(DEQUANTISE_THREADS)};
}

/// Elements and bytes of a block.
__host__ __device__ constexpr u32 quant_elements(Quant type) { return type >= Quant::Q4K ? 256 : 32; }
__host__ __device__ constexpr u32 quant_bytes(Quant type) {
    switch (type) {
    case Quant::Q4_0: return 18;
    case Quant::Q4_1: return 20;
    case Quant::Q5_0: return 22;
    case Quant::Q5_1: return 24;
    case Quant::Q8_0: return 34;
    case Quant::Q4K: return 144;
    case Quant::Q5K: return 176;
    default: return 210;
    }
}

__device__ inline float half_at(const u8* p) { return __half2float(__ushort_as_half(static_cast<u16>(p[0] | p[1] << 8))); }

/// weight = scale · q - min
struct Affine {
    float scale;
    float min;
};

/// 32 elements of 4 or 5 bits: low nibbles are 0..16, high ones 16..32; bit k of `high` is the fifth of element k.
__device__ inline Octet small_octet(const u8* nibbles, u32 high, u32 k, Affine a) {
    Octet out;
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        u32 q = (nibbles[(k + i) % 16] >> (k / 16 * 4) & 15) | (high >> (k + i) & 1) << 4;
        out.x[i] = fmaf(a.scale, static_cast<float>(q), -a.min);
    }
    return out;
}

/// Elements k..k + 8 of a block of 32.
__device__ inline Octet plain_octet(Quant type, const u8* block, u32 k) {
    float d = half_at(block);
    bool five = type == Quant::Q5_0 || type == Quant::Q5_1, with_min = type == Quant::Q4_1 || type == Quant::Q5_1;
    const u8* at = block + (with_min ? 4 : 2);
    Octet out;
    if (type == Quant::Q8_0) {
#pragma unroll
        for (u32 i = 0; i < OCTET; i++) out.x[i] = d * static_cast<float>(static_cast<i8>(at[k + i]));
        return out;
    }
    u32 high = five ? at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24 : 0;
    float min = with_min ? -half_at(block + 2) : (five ? 16.0f : 8.0f) * d;
    return small_octet(at + (five ? 4 : 0), high, k, {d, min});
}

/// Elements k..k + 8 of a Q4_K or Q5_K super-block: eight groups with 6-bit scales and minima.
__device__ inline Octet super_octet(Quant type, const u8* block, u32 k) {
    u32 group = k / 32;
    const u8* packed = block + 4;
    u32 scale, min;
    if (group < 4) {
        scale = packed[group] & 63;
        min = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
        min = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    }
    Affine a = {half_at(block) * static_cast<float>(scale), half_at(block + 2) * static_cast<float>(min)};
    bool five = type == Quant::Q5K;
    const u8* low = block + (five ? 48 : 16) + group / 2 * 32;
    Octet out;
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        u32 e = k % 32 + i;
        u32 q = (low[e] >> (group % 2 * 4) & 15) | (five ? (block[16 + e] >> group & 1) << 4 : 0);
        out.x[i] = fmaf(a.scale, static_cast<float>(q), -a.min);
    }
    return out;
}

/// Elements k..k + 8 of a Q6_K super-block: sixteen groups of 16 with 8-bit scales; two halves of 128, in each four quarters of 32.
__device__ inline Octet six_octet(const u8* block, u32 k) {
    u32 part = k / 128, quarter = k / 32 % 4;
    const u8* low = block + 64 * part + quarter % 2 * 32;
    const u8* high = block + 128 + 32 * part;
    float scale = half_at(block + 208) * static_cast<float>(static_cast<i8>(block[192 + k / 16]));
    Octet out;
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        u32 e = k % 32 + i;
        int q = static_cast<int>((low[e] >> (quarter / 2 * 4) & 15) | (high[e] >> (2 * quarter) & 3) << 4) - 32;
        out.x[i] = scale * static_cast<float>(q);
    }
    return out;
}

BATON_KERNEL(DEQUANTISE_THREADS) baton_dequantise(const __grid_constant__ Dequantise p) {
    u32 column = (blockIdx.y * DEQUANTISE_THREADS + threadIdx.x) * OCTET;
    if (column >= p.cols) return;
    u32 elements = quant_elements(p.type), bytes = quant_bytes(p.type);
    u64 stored = p.row_order ? p.row_order[blockIdx.x] : blockIdx.x;
    const u8* block = p.source + (stored * (p.cols / elements) + column / elements) * bytes;
    u32 k = column % elements;
    Octet x;
    if (p.type < Quant::Q4K) {
        x = plain_octet(p.type, block, k);
    } else {
        x = p.type == Quant::Q6K ? six_octet(block, k) : super_octet(p.type, block, k);
    }
    store8(p.out_type, p.out, static_cast<u64>(blockIdx.x) * p.cols + column, x);
}

} // namespace baton
