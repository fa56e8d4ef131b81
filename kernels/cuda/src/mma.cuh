// One tensor-core instruction: D = A · B + D for a 16 × 16 A, a 16 × 8 B and f32 sums, by the lanes of a warp (mma.sync m16n8k16).
//
// With g = lane / 4 and t = lane % 4, words of two 16-bit elements each, the first in the low half:
//   a[0]: row g,     columns 2t, 2t + 1      a[1]: row g + 8, the same columns
//   a[2]: row g,     columns 2t + 8, 2t + 9  a[3]: row g + 8, the same columns
//   b[0]: rows 2t, 2t + 1 of column g        b[1]: rows 2t + 8, 2t + 9 of column g
//   d[0], d[1]: row g, columns 2t, 2t + 1    d[2], d[3]: row g + 8, the same columns
//
// Inline PTX is here and in hopper.cuh. The twin without it, in the host shim, takes the same words from the same lanes, so all that kernels do
// with fragments is tested there; that hardware places them as above is its manual's word.
#pragma once

#include "common.cuh"

namespace baton {

#ifdef BATON_SHIM

template <Element T>
inline float mma_element(u32 word, u32 half) {
    u16 bits = static_cast<u16>(half ? word >> 16 : word);
    return T == Element::F16 ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}

template <Element T>
inline void mma16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const shim::Words* all = shim::exchange(shim::Collective::Mma, words, 6);
    u32 g = lane() / 4, t = lane() % 4;
    for (u32 i = 0; i < 4; i++) {
        u32 row = i / 2, column = 2 * t + i % 2;
        for (u32 k = 0; k < 16; k++) {
            // Element k of a row of A, or of a column of B, is with lane k % 8 / 2 of its four, in its second words from 8 on.
            const shim::Words& left = all[4 * g + k % 8 / 2];
            const shim::Words& right = all[4 * column + k % 8 / 2];
            d[i] = fmaf(mma_element<T>(left[row + k / 8 * 2], k % 2), mma_element<T>(right[4 + k / 8], k % 2), d[i]);
        }
    }
}

#else

template <Element T>
__device__ inline void mma16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T == Element::F16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

#endif

} // namespace baton
