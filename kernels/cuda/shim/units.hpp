// Hopper's asynchronous units for the host shim: barriers that count bytes, copies of boxes by a tensor map, products of a warpgroup. What
// src/hopper.cuh has as inline PTX is here as the instructions' manual (PTX ISA 8.0 to 9.0) describes it.
//
// Where turns are ascending, copies are done when they are asked for, and products when they are waited for: who lets go too early has its
// operands overwritten. Where they are descending, copies are done when nobody can go on without, and products at once: who does not
// wait reads what was there before. Where they are shuffled, either may be. The units see shared memory as it was at the last
// fence.proxy.async, and what copies have brought. Knows nothing of any kernel.
#pragma once

#include "shim.hpp"

#define BATON_DYNAMIC_SHARED(type, name)                                                                                             \
    static const char name##_key = 0;                                                                                                \
    auto& name = *static_cast<type*>(::shim::dynamic_shared(&name##_key, sizeof(type), alignof(type)))

namespace shim {

/// Memory of the block's dynamic shared variable, which must be as large as the launch says.
void* dynamic_shared(const void* key, std::size_t bytes, std::size_t align);

/// The address of a part of it in the block's shared window.
std::uint32_t shared_address(const void* at);

/// mbarrier.init, .arrive, .arrive.expect_tx, and .try_wait.parity until it says yes.
void phase_init(const void* barrier, unsigned arrivals);
void phase_arrive(const void* barrier);
void phase_expect(const void* barrier, unsigned bytes);
void phase_wait(const void* barrier, unsigned parity);

/// bar.sync and bar.arrive.
void named_sync(unsigned id, unsigned threads);
void named_arrive(unsigned id, unsigned threads);

/// fence.proxy.async.
void async_fence();

/// A tensor map of rows of 16-bit elements, copied by boxes with 128-byte swizzle: cuTensorMapEncodeTiled. False where it would refuse.
bool encode_rows(void* map, void* base, std::uint64_t width, std::uint64_t rows, std::uint64_t stride, std::uint32_t box_width,
                 std::uint32_t box_rows);

/// cp.async.bulk.tensor.2d of the box at (x, y), whose bytes the barrier counts. Elements outside of the tensor are zeros.
void copy_box(void* to, const void* map, const void* barrier, int x, int y);

/// Registers and operands of wgmma.mma_async.m64nNk16 with f32 sums, of one thread.
struct Wgmma {
    /// n / 2 sums.
    float* d;
    unsigned n;
    /// Four words of A, or null and a descriptor of A, K-major.
    const std::uint32_t* a;
    std::uint64_t a_shared;
    std::uint64_t b_shared;
    /// Whether B is MN-major.
    bool b_transposed;
    bool accumulate;
    float (*element)(std::uint16_t bits);
};

void wgmma_fence();
void wgmma(const Wgmma& what);
void wgmma_commit();
/// Waits until no more than `groups` of the latest groups are under way.
void wgmma_wait(unsigned groups);

} // namespace shim
