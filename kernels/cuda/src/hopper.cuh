// Hopper's asynchronous units, for sm_90a alone: copies of boxes by tensor maps (TMA), barriers that count their bytes, products of a
// warpgroup of 128 threads (wgmma). The second place with inline PTX, beside mma.cuh.
//
// A tile of an operand is rows of 64 elements of 16 bits, 128 bytes, at a multiple of 1024; its sixteen bytes number i of row r lie at i ^
// r % 8 (swizzle of 128 bytes), which copies write and products read by the address. Wider operands are several such tiles.
//
//   K-major (rows are M or N, k runs along a row): eight rows from the last every 1024 bytes; k + 16 is 32 bytes further.
//   MN-major (rows are k, M or N runs along a row): tiles `leading` bytes apart for each 64 of N; k + 16 is 2048 bytes further.
//
// Sums and A's words are with the threads as in mma.cuh, sixteen rows a warp: with g = lane / 4 and t = lane % 4, d[4j + 2h + e] is row 16 ·
// warp + g + 8h, column 8j + 2t + e.
//
// Sources: PTX ISA ("Asynchronous Warpgroup Level Matrix Instructions", "Tensor copy", "mbarrier"), read against the layouts that CUTLASS,
// ThunderKittens and FlashAttention use. In the host shim the units are emulated from the same manual (../shim/units.hpp); that
// hardware does what it says is the manual's word.
#pragma once

#include "common.cuh"

#ifdef BATON_SHIM
#include "units.hpp"
#endif

namespace baton {

/// What the driver has encoded of an array's shape; aligned as its headers have it since CUDA 13.
struct alignas(128) TensorMap {
    u64 words[16];
};

/// A barrier in shared memory whose phases end when all have arrived and all announced bytes are there (mbarrier).
struct PhaseBarrier {
    u64 word;
};

#ifdef BATON_SHIM

inline void phase_init(PhaseBarrier& b, u32 arrivals) { shim::phase_init(&b, arrivals); }
inline void phases_begin() {}
inline void phase_arrive(PhaseBarrier& b) { shim::phase_arrive(&b); }
inline void phase_expect(PhaseBarrier& b, u32 bytes) { shim::phase_expect(&b, bytes); }
inline void phase_wait(PhaseBarrier& b, u32 parity) { shim::phase_wait(&b, parity); }
inline void copy_box(void* to, const TensorMap& map, PhaseBarrier& b, u32 x, u32 y) {
    shim::copy_box(to, &map, &b, static_cast<int>(x), static_cast<int>(y));
}
inline void named_sync(u32 id, u32 threads) { shim::named_sync(id, threads); }
inline void named_arrive(u32 id, u32 threads) { shim::named_arrive(id, threads); }
inline void async_fence() { shim::async_fence(); }
inline u32 shared_address(const void* at) { return shim::shared_address(at); }
template <u32 COUNT>
inline void more_registers() {}
template <u32 COUNT>
inline void fewer_registers() {}
inline void wgmma_fence() { shim::wgmma_fence(); }
inline void wgmma_commit() { shim::wgmma_commit(); }
template <u32 GROUPS>
inline void wgmma_wait() {
    shim::wgmma_wait(GROUPS);
}
template <u32 COUNT>
inline void settle(float (&)[COUNT]) {}
inline void wait_after(float, float) {}
/// 2^x; less than the smallest normal number is 0.
inline float exp2_fast(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

template <Element T>
inline float wgmma_element(u16 bits) {
    return T == Element::F16 ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}
template <Element T>
inline void wgmma_n128(float (&d)[64], u64 a, u64 b, bool accumulate) {
    shim::wgmma({d, 128, nullptr, a, b, false, accumulate, wgmma_element<T>});
}
template <Element T, u32 COUNT>
inline void wgmma_transposed(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
    shim::wgmma({d, 2 * COUNT, a, 0, b, true, true, wgmma_element<T>});
}

#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

/// A new barrier, of so many arrivals a phase.
__device__ inline void phase_init(PhaseBarrier& b, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals) : "memory");
}

/// Makes new barriers known to the units; the block meets after it.
__device__ inline void phases_begin() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void phase_arrive(PhaseBarrier& b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
}

/// Arrives, and announces bytes that copies of this phase bring.
__device__ inline void phase_expect(PhaseBarrier& b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes) : "memory");
}

/// Waits until the phase of this parity has ended: the first has parity 0. One before the first has ended.
__device__ inline void phase_wait(PhaseBarrier& b, u32 parity) {
    u32 ended;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(ended)
                     : "r"(shared_address(&b)), "r"(parity)
                     : "memory");
    } while (!ended);
}

/// Copies the box at element x of row y; the barrier counts its bytes when they are there.
__device__ inline void copy_box(void* to, const TensorMap& map, PhaseBarrier& b, u32 x, u32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(shared_address(&b)), "r"(x), "r"(y)
                 : "memory");
}

/// Barriers 1 to 15 of a block, for some of its warps: arrives and waits, or arrives alone.
__device__ inline void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// What this thread has written to shared memory is there for the units when those who meet after it go on.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Registers of each thread of the warpgroup from here on.
template <u32 COUNT>
__device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
__device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/// Before the first product, and after sums or A were written by anything else.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// The products since the last are a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until no more than the latest GROUPS are under way. `settle` of what they have written or read follows.
template <u32 GROUPS>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
/// The compiler may move no use of these registers across it.
template <u32 COUNT>
__device__ inline void settle(float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/// What follows waits until these have been computed. The assembler takes no wait of products for later than what it does not need,
/// and would put it before computations that are meant to be done meanwhile.
__device__ inline void wait_after(float x, float y) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.nan.f32 p, %0, %1;\n\t@p nanosleep.u32 0;\n\t}" ::"f"(x), "f"(y) : "memory");
}

/// 2^x; less than the smallest normal number is 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define BATON_SUMS8(i)                                                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define BATON_SUMS32 BATON_SUMS8(0), BATON_SUMS8(8), BATON_SUMS8(16), BATON_SUMS8(24)
#define BATON_SUMS64 BATON_SUMS32, BATON_SUMS8(32), BATON_SUMS8(40), BATON_SUMS8(48), BATON_SUMS8(56)
#define BATON_NAMES32                                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
    "%27, %28, %29, %30, %31"
#define BATON_NAMES64                                                                                                                \
    BATON_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "     \
                  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// The numbers after the predicate: A and B as they are, not negated; then 1 for an operand that is MN-major.
#define BATON_WGMMA_N128(types)                                                                                                      \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " {" BATON_NAMES64 "}, %64, %65, p, 1, 1, 0, 0;\n\t}"          \
                 : BATON_SUMS64                                                                                                      \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)))
#define BATON_WGMMA_TRANSPOSED_N128(types)                                                                                           \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " {" BATON_NAMES64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, "   \
                 "1;\n\t}"                                                                                                           \
                 : BATON_SUMS64                                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))
#define BATON_WGMMA_TRANSPOSED_N64(types)                                                                                            \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " {" BATON_NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, "    \
                 "1;\n\t}"                                                                                                           \
                 : BATON_SUMS32                                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

/// D = A · B, or D + A · B: 64 × 16 and 16 × 128, both K-major in shared memory.
template <Element T>
__device__ inline void wgmma_n128(float (&d)[64], u64 a, u64 b, bool accumulate) {
    if constexpr (T == Element::F16) {
        BATON_WGMMA_N128("f16.f16");
    } else {
        BATON_WGMMA_N128("bf16.bf16");
    }
}

/// D = D + A · B: 64 × 16 in registers, and 16 × 2 COUNT, MN-major in shared memory.
template <Element T, u32 COUNT>
__device__ inline void wgmma_transposed(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
    static_assert(COUNT == 32 || COUNT == 64);
    if constexpr (COUNT == 32 && T == Element::F16) {
        BATON_WGMMA_TRANSPOSED_N64("f16.f16");
    } else if constexpr (COUNT == 32) {
        BATON_WGMMA_TRANSPOSED_N64("bf16.bf16");
    } else if constexpr (T == Element::F16) {
        BATON_WGMMA_TRANSPOSED_N128("f16.f16");
    } else {
        BATON_WGMMA_TRANSPOSED_N128("bf16.bf16");
    }
}

#endif

#if defined(BATON_SHIM) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Descriptor of an operand that begins at this address. `leading` counts for MN-major operands only.
__device__ inline u64 operand_at(u32 address, u32 leading) {
    constexpr u64 EIGHT_ROWS = 1024, SWIZZLE_128 = 1;
    return (address >> 4 & 0x3fff) | static_cast<u64>(leading >> 4) << 16 | EIGHT_ROWS >> 4 << 32 | SWIZZLE_128 << 62;
}

/// Where sixteen bytes of a swizzled tile of rows of 128 bytes lie, in bytes from the tile's begin.
__device__ inline u32 swizzled_piece(u32 row, u32 piece) { return row * 128 + (piece ^ row % 8) * 16; }

#endif

} // namespace baton

#if !defined(BATON_SHIM)
/// The block's dynamic shared memory, at a multiple of 1024.
#define BATON_DYNAMIC_SHARED(type, name)                                                                                             \
    extern __shared__ __align__(1024) unsigned char baton_dynamic_shared[];                                                          \
    type& name = *reinterpret_cast<type*>(baton_dynamic_shared)
#endif
