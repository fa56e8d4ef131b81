// What sample.cu chose, as the host reads it and embed.cu looks it up.
#pragma once
#include "common.cuh"

namespace baton {

constexpr u32 MAX_TOP_LOGPROBS = 20;

/// What was chosen; all but `id` only with log probabilities.
struct Sampled {
    u32 id;
    /// Of `id`.
    float logprob;
    /// Of the row of raw logits.
    u64 digest;
    u32 top_ids[MAX_TOP_LOGPROBS];
    float top_logprobs[MAX_TOP_LOGPROBS];
};

} // namespace baton
