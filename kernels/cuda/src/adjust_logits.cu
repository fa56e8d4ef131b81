// Penalties and bias on single logits: x = (x > 0 ? x / divide : x · divide) - subtract + add.
//
// logits: [any, vocab] f32. entries: one for each (row, id) that changes; the host has counted tokens: divide is the repetition penalty or 1,
// subtract the presence penalty plus the frequency penalty times the count, add the bias. Steps and their order are those of `penalise` in
// crates/model/src/sampler.rs, so the bits are too.
//
// Threads: one an entry. Bytes moved: a sector an entry. Bound: latency. Limits: no two entries for one logit.
#include "common.cuh"

namespace baton {

struct LogitEntry {
    u32 row;
    u32 id;
    float divide;
    float subtract;
    float add;
};

struct AdjustLogits {
    float* logits;
    const LogitEntry* entries;
    u32 count;
    u32 vocab;
};

constexpr u32 ADJUST_THREADS = 128;

inline Launch launch_of(const AdjustLogits& p) { return {dim3(parts(p.count, ADJUST_THREADS)), dim3(ADJUST_THREADS)}; }

BATON_KERNEL(ADJUST_THREADS) baton_adjust_logits(const __grid_constant__ AdjustLogits p) {
    u32 i = blockIdx.x * ADJUST_THREADS + threadIdx.x;
    if (i >= p.count) return;
    LogitEntry entry = p.entries[i];
    float& x = p.logits[static_cast<u64>(entry.row) * p.vocab + entry.id];
    float penalised = x > 0.0f ? x / entry.divide : x * entry.divide;
    x = penalised - entry.subtract + entry.add;
}

} // namespace baton
