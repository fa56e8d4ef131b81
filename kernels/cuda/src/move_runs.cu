// Runs of KV copied from one pool to another, possibly another process's or GPU's, and digested on the way (I2): memory is read once.
//
// Run i is `bytes` bytes from source + runs[i].source, which go to target + runs[i].target; without a target they are only digested.
// digests[i] gets their digest added, the value of `digest_block` in crates/types/src/digest.rs with `lane` as the number of the run's
// first lane in its block; the caller zeroes it. A wrapping sum does not depend on its order, so atomic additions do not make it vary.
//
// runs: [count], apart from one another in the target. digests: [count], or null.
// Threads: a thread block for each 16 KiB of a run. Bytes moved: the runs once in, once out. Bound: memory bandwidth, or that of the link.
// Limits: addresses and bytes multiples of 8, as those of every layout that a GPU serves are; runs up to 1 GiB.
#include "digest.cuh"

namespace baton {

/// Offsets into source and target, and the number of the first lane.
struct Moved {
    u64 source;
    u64 target;
    u64 lane;
};

struct MoveRuns {
    const u8* source;
    u8* target;
    const Moved* runs;
    u64* digests;
    u64 bytes;
    u32 count;
};

constexpr u32 MOVE_THREADS = 256;
/// Lanes of a thread, all loaded before the first is stored.
constexpr u32 MOVE_LANES = 8;
constexpr u32 MOVE_PART = MOVE_THREADS * MOVE_LANES;

inline Launch launch_of(const MoveRuns& p) {
    return {dim3(p.count, static_cast<u32>((p.bytes / 8 + MOVE_PART - 1) / MOVE_PART)), dim3(MOVE_THREADS)};
}

BATON_KERNEL(MOVE_THREADS) baton_move_runs(const __grid_constant__ MoveRuns p) {
    Moved run = p.runs[blockIdx.x];
    const u64* from = reinterpret_cast<const u64*>(p.source + run.source);
    u64 lanes = p.bytes / 8, first = static_cast<u64>(blockIdx.y) * MOVE_PART + threadIdx.x, sum = 0;
    u64 values[MOVE_LANES];
#pragma unroll
    for (u32 i = 0; i < MOVE_LANES; i++) {
        u64 at = first + i * MOVE_THREADS;
        if (at < lanes) values[i] = from[at];
    }
    u64* to = p.target ? reinterpret_cast<u64*>(p.target + run.target) : nullptr;
#pragma unroll
    for (u32 i = 0; i < MOVE_LANES; i++) {
        u64 at = first + i * MOVE_THREADS;
        if (at >= lanes) continue;
        if (to) to[at] = values[i];
        sum += digest_share(values[i], run.lane + at);
    }
    if (!p.digests) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(&p.digests[blockIdx.x], sum);
}

} // namespace baton
