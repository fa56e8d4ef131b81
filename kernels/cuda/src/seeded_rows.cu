// Rows of weights that a seed makes, each a function of its tensor's key and of its place there, bit for bit what
// crates/types/src/seeded.rs says: place i is middle + spread · n / 32768, rounded to f32 after each operation and to bf16 at the end; n is the
// i % 4-th 16 bits of number i / 4 of the sequence of SplitMix64 (Steele et al., OOPSLA 2014).
//
// first: place of row 0's first element. stride: places from row to row. out: [rows, width] bf16, one behind the other.
//
// Threads: one octet each. Bytes moved: out. Bound: integer products, about as long as the store. Limits: width a multiple of 8.
#include "common.cuh"

namespace baton {

struct SeededRows {
    void* out;
    u64 key;
    u64 first;
    u64 stride;
    u32 rows;
    u32 width;
    float middle;
    float spread;
};

constexpr u32 SEEDED_THREADS = 256;

inline Launch launch_of(const SeededRows& p) {
    return launch_by_octets(static_cast<u64>(p.rows) * (p.width / OCTET), SEEDED_THREADS);
}

/// Number `at` of the sequence.
__device__ inline u64 seeded_number(u64 key, u64 at) {
    u64 z = key + (at + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

BATON_KERNEL(SEEDED_THREADS) baton_seeded_rows(const __grid_constant__ SeededRows p) {
    u64 octet = static_cast<u64>(blockIdx.x) * SEEDED_THREADS + threadIdx.x;
    u32 octets = p.width / OCTET;
    if (octet >= static_cast<u64>(p.rows) * octets) return;
    u64 row = octet / octets, column = octet % octets * OCTET;
    u64 place = p.first + row * p.stride + column;
    Octet x;
#pragma unroll
    for (u32 k = 0; k < OCTET; k++) {
        u64 bits = seeded_number(p.key, (place + k) / 4) >> (place + k) % 4 * 16;
        float fraction = static_cast<float>(static_cast<short>(static_cast<u16>(bits))) / 32768.0f;
        x.x[k] = p.middle + p.spread * fraction;
    }
    store8(Element::Bf16, p.out, row * p.width + column, x);
}

} // namespace baton
