// What all kernels share: element types, eight elements at a time, sums over a warp and a block. No operation, no layout.
//
// Rules that keep results the same whatever else is in the batch (I1), and let the same source run in the host shim (../shim):
// every output is a function of its own row; a sum's order depends on shapes only; collectives are by whole warps; blocks are
// whole warps; floating-point products are fused only where the source says fmaf (the build turns contraction off).
#pragma once

#ifdef BATON_SHIM
#include "shim.hpp"
#else
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define BATON_SHARED(type, name) __shared__ type name
#endif

/// A kernel's entry: one struct of parameters by value, `threads` at most in a block.
#define BATON_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)

namespace baton {

using u8 = std::uint8_t;
using i8 = std::int8_t;
using i32 = std::int32_t;
using i64 = long long;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = unsigned long long;
using f16 = __half;
using bf16 = __nv_bfloat16;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
/// Elements that are loaded and stored together. Widths are multiples of it, as `Backend` demands.
constexpr u32 OCTET = 8;

/// Element type of an activation or a dense table.
enum class Element : u32 { F32, F16, Bf16 };

/// How a kernel is launched. An empty batch has a grid of 0 and is not launched.
struct Launch {
    dim3 grid;
    dim3 block;
    /// Bytes of dynamic shared memory.
    u32 shared = 0;
};

/// Parts of `size` that hold `count`.
__host__ __device__ constexpr u32 parts(u32 count, u32 size) { return (count + size - 1) / size; }

/// A thread an octet.
inline Launch launch_by_octets(u64 octets, u32 threads) { return {dim3(static_cast<u32>((octets + threads - 1) / threads)), dim3(threads)}; }

/// A warp a row, or a block of `threads` where it has more than 1024 elements.
inline Launch launch_by_rows(u32 rows, u32 width, u32 threads) {
    constexpr u32 warps = 4;
    if (width <= 1024) return {dim3(parts(rows, warps)), dim3(WARP, warps)};
    return {dim3(rows), dim3(threads)};
}

__device__ inline u32 lane() { return threadIdx.x % WARP; }

struct Octet {
    float x[OCTET];
};

/// Elements `at..at + 8` of an array; `at` is a multiple of 8, the array aligned to 16 bytes.
__device__ inline Octet load8(Element type, const void* array, u64 at) {
    Octet out;
    if (type == Element::F32) {
        const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(array) + at);
        float4 low = p[0], high = p[1];
        out = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
        return out;
    }
    uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const u16*>(array) + at);
    u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (type == Element::Bf16) {
            out.x[2 * i] = __uint_as_float(words[i] << 16);
            out.x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
            out.x[2 * i] = __half2float(__ushort_as_half(static_cast<u16>(words[i])));
            out.x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<u16>(words[i] >> 16)));
        }
    }
    return out;
}

/// Two elements, rounded to nearest, the first in the low half.
__device__ inline u32 pack2(Element type, float low, float high) {
    if (type == Element::Bf16) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(low)) | static_cast<u32>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
    }
    return __half_as_ushort(__float2half_rn(low)) | static_cast<u32>(__half_as_ushort(__float2half_rn(high))) << 16;
}

/// The inverse of load8; rounds to nearest.
__device__ inline void store8(Element type, void* array, u64 at, const Octet& o) {
    if (type == Element::F32) {
        float4* p = reinterpret_cast<float4*>(static_cast<float*>(array) + at);
        p[0] = make_float4(o.x[0], o.x[1], o.x[2], o.x[3]);
        p[1] = make_float4(o.x[4], o.x[5], o.x[6], o.x[7]);
        return;
    }
    uint4 raw = make_uint4(pack2(type, o.x[0], o.x[1]), pack2(type, o.x[2], o.x[3]), pack2(type, o.x[4], o.x[5]),
                           pack2(type, o.x[6], o.x[7]));
    *reinterpret_cast<uint4*>(static_cast<u16*>(array) + at) = raw;
}

/// Sum over the lanes of a warp, in all of them.
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
    for (u32 bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

/// Largest over `lanes` neighbouring lanes (a power of two), in all of them; a comparison with a NaN keeps the other lane's.
__device__ inline float lanes_max(float x, u32 lanes) {
    for (u32 bits = lanes / 2; bits > 0; bits /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, bits);
        x = x > other ? x : other;
    }
    return x;
}

/// Sum over the threads of a block, in all of them: first over each warp, then over warps, ascending.
template <class T>
__device__ inline T block_sum(T x) {
    struct Sums {
        T of_warp[WARP];
    };
    BATON_SHARED(Sums, sums);
    u32 warps = blockDim.x / WARP;
    x = warp_sum(x);
    // Who is late may still read the last sum.
    __syncthreads();
    if (lane() == 0) sums.of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    x = sums.of_warp[0];
    for (u32 i = 1; i < warps; i++) x += sums.of_warp[i];
    return x;
}

/// Largest over the threads of a block, in all of them.
__device__ inline float block_max(float x) {
    struct Maxima {
        float of_warp[WARP];
    };
    BATON_SHARED(Maxima, maxima);
    u32 warps = blockDim.x / WARP;
    x = lanes_max(x, WARP);
    // Who is late may still read the last maximum.
    __syncthreads();
    if (lane() == 0) maxima.of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    x = maxima.of_warp[0];
    for (u32 i = 1; i < warps; i++) x = x > maxima.of_warp[i] ? x : maxima.of_warp[i];
    return x;
}

} // namespace baton
