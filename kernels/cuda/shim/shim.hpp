// The host shim: what kernel bodies need of CUDA to be compiled and run as C++20 on any x86-64 host, for tests.
//
// Every CUDA thread is a fiber. Barriers, shuffles and votes are real: a thread waits in them for the others, collectives check that all
// lanes of the warp called the same one, and a block in which nobody can go on is a failure, not a hang. bf16 and f16 are the compiler's
// own headers. Shared variables are allocated for each block at their exact size and filled with 0xff, so that ASan sees an index too far
// and a missing initialisation shows as a NaN. What it does not know: inline PTX, for which kernels have twins (mma.cuh, and hopper.cuh over
// units.hpp here), partial masks, several streams, time.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace shim {

/// In which order the blocks of a grid run, and the threads of a block between two barriers.
enum class Order { Ascending, Descending, Shuffled };

/// What a thread can see of itself.
struct Thread {
    uint3 thread;
    uint3 block;
    dim3 block_dim;
    dim3 grid_dim;
    unsigned linear;
};

Thread& current();

/// Runs `body` once for every thread of the grid, block after block.
void launch(dim3 grid, dim3 block, std::size_t dynamic_bytes, const std::function<void()>& body, Order order);

/// Bytes of dynamic shared memory that the running launch gives a block.
std::size_t dynamic_bytes();

/// Waits for all threads of the block that have not returned.
void sync_threads();

/// Words that a lane may hand to the others at once.
constexpr int EXCHANGE = 8;
using Words = std::uint32_t[EXCHANGE];

/// Which collective a lane called; all lanes must agree.
enum class Collective : std::uint32_t { SyncWarp, Shuffle, Vote, Mma, Wgmma };

/// Hands `count` words to the other lanes and waits for theirs; `[lane]`, valid until this lane's next collective.
const Words* exchange(Collective collective, const std::uint32_t* words, int count);

/// Memory of a shared variable, the same for all threads of the running block. `key` is the variable's own.
void* shared(const void* key, std::size_t bytes, std::size_t align);

[[noreturn]] void fail(const char* why);

/// To ThreadSanitizer: what was done before a release of an address is ordered before what follows an acquire of it.
void release(void* at);
void acquire(void* at);

/// Where threads wait until `expected` have arrived; then it begins anew.
struct Barrier {
    unsigned expected = 0;
    unsigned arrived = 0;
    unsigned generation = 0;
    /// Addresses for release and acquire, by generation.
    char order[2];

    /// Begins anew if all have arrived.
    bool complete() {
        if (arrived == 0 || arrived < expected) return false;
        arrived = 0;
        generation++;
        return true;
    }
};

/// A fence of the running thread: what came before it is ordered before what others do that see, by an atomic on the same address and a fence
/// after that, an atomic that it does next. Only before the next barrier: what other threads hand over there is not behind the fence.
void fence();

/// An atomic of the running thread that fences can order others by.
void counted(void* at);

/// Arrives and waits for the others; whether what was done before is seen by them.
void wait(Barrier& barrier, bool orders_memory);

/// Arrives without waiting; what was done before is seen by those who wait.
void arrive(Barrier& barrier);

/// Waits until the barrier has begun anew since it was in this generation, and sees what was done before that.
void wait_past(Barrier& barrier, unsigned generation);

/// The order in which the running launch's threads take turns.
Order order_of_turns();

/// Work of a unit beside the threads: it is done at once where turns are ascending, when no thread can go on where they are
/// descending, and some time between where they are shuffled.
void later(std::function<void()> work);

/// What the running block has beside its threads; gone with it.
std::shared_ptr<void>& beside();

inline void whole_warp(unsigned mask) {
    if (mask != 0xffffffffu) fail("a collective of a part of a warp");
}

template <class T>
T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    whole_warp(mask);
    std::uint32_t words[2] = {};
    std::memcpy(words, &value, sizeof(T));
    const Words* all = exchange(Collective::Shuffle, words, 2);
    T out;
    std::memcpy(&out, all[source & 31], sizeof(T));
    return out;
}

inline unsigned vote(unsigned mask, bool predicate) {
    whole_warp(mask);
    std::uint32_t word = predicate;
    const Words* all = exchange(Collective::Vote, &word, 1);
    unsigned out = 0;
    for (int lane = 0; lane < 32; lane++) out |= all[lane][0] << lane;
    return out;
}

} // namespace shim

#define threadIdx (::shim::current().thread)
#define blockIdx (::shim::current().block)
#define blockDim (::shim::current().block_dim)
#define gridDim (::shim::current().grid_dim)

#define BATON_SHARED(type, name)                                                                                                     \
    static const char name##_key = 0;                                                                                                \
    auto& name = *static_cast<type*>(::shim::shared(&name##_key, sizeof(type), alignof(type)))

inline void __syncthreads() { shim::sync_threads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    shim::whole_warp(mask);
    shim::exchange(shim::Collective::SyncWarp, nullptr, 0);
}
inline int shim_lane() { return static_cast<int>(shim::current().linear % 32); }
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return shim::shuffle(mask, value, source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return shim::shuffle(mask, value, shim_lane() ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    int source = shim_lane() - static_cast<int>(by);
    return shim::shuffle(mask, value, source < 0 ? shim_lane() : source);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) { return shim::vote(mask, predicate); }
inline bool __any_sync(unsigned mask, bool predicate) { return shim::vote(mask, predicate) != 0; }

using std::max;
using std::min;
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return out;
}
template <class T>
T atomicAdd(T* at, T value) {
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
/// Counts up to `most` and begins anew at zero; what there was. Blocks run one after the other, so nobody else counts meanwhile.
inline unsigned atomicInc(unsigned* at, unsigned most) {
    unsigned before = __atomic_load_n(at, __ATOMIC_RELAXED);
    __atomic_store_n(at, before >= most ? 0 : before + 1, __ATOMIC_RELAXED);
    shim::counted(at);
    return before;
}
inline void __threadfence() { shim::fence(); }
