// The mask of a constraint: logits of tokens that must not come next become -inf.
//
// logits: [any, vocab] f32. rows: [count] which rows have a mask. masks: [count, ceil(vocab / 32)] u32, bit i of word w allows token
// 32 w + i, as crates/grammar computes it on the host.
//
// Threads: one a logit. Bytes moved: masks, and the logits that are forbidden. Bound: memory bandwidth. Limits: vocab up to 2^24.
#include "common.cuh"

namespace baton {

struct MaskLogits {
    float* logits;
    const u32* rows;
    const u32* masks;
    u32 count;
    u32 vocab;
};

constexpr u32 MASK_THREADS = 256;

inline Launch launch_of(const MaskLogits& p) { return {dim3(p.count, parts(p.vocab, MASK_THREADS)), dim3(MASK_THREADS)}; }

BATON_KERNEL(MASK_THREADS) baton_mask_logits(const __grid_constant__ MaskLogits p) {
    u32 id = blockIdx.y * MASK_THREADS + threadIdx.x;
    if (id >= p.vocab) return;
    u32 word = p.masks[static_cast<u64>(blockIdx.x) * parts(p.vocab, 32) + id / 32];
    if (!(word >> (id % 32) & 1)) p.logits[static_cast<u64>(p.rows[blockIdx.x]) * p.vocab + id] = -INFINITY;
}

} // namespace baton
