// Rows of K and V in the pool: where they lie, and how each KV type rounds them. For stores and attention.
//
// Places are those of `KvLayout` in crates/types/src/layout.rs ([K, V][kv_head]{ [slot][head_dim] elements, [slot][parameters] f16 });
// rounding is that of kernels/src/cpu/kv_row.rs and codes.rs, bit for bit, so that CPU and GPU workers fill a pool with the same bytes. A
// row is rounded alone (I1). Every slice of a head begins at a multiple of 16 bytes if the pool does.
#pragma once

#include "e4m3.cuh"

namespace baton {

/// Element type of a pool, in the order of `KvDtype::ALL`.
enum class KvType : u32 { F32, F16, Bf16, Q8, Fp8, Int4 };

/// One layer's K and V, as `Planes` in kernels/src/cpu/kv_row.rs; strides in bytes.
struct KvPlanes {
    /// K plane of the layer's block 0.
    u8* base;
    /// From one block to the next, from K to V, from one head's slice to the next.
    u64 block;
    u64 value;
    u64 head;
    KvType type;
    /// Slots of a block, a multiple of 16, and elements of a row, a multiple of 8.
    u32 block_size;
    u32 head_dim;
};

/// Rows of one sequence that a kernel takes together: a tile of `Ragged` in kernels/src/backend.rs. A decode row is a tile of one.
struct Tile {
    /// First row in the batch's buffers, and how many. None: the place is kept for a batch with more sequences; nothing is done for it, and
    /// nothing else here is looked at.
    u32 row;
    u32 rows;
    /// Position of the first row in its sequence.
    u32 position;
    /// Entry of its sequence's first position in the block tables; before their begin where a window has passed that position and its
    /// block is no longer there.
    i32 table;
};

/// Bytes of a row's elements, and how many f16 parameters it has.
__host__ __device__ constexpr u32 kv_row_bytes(KvType type, u32 dim) {
    switch (type) {
    case KvType::F32: return dim * 4;
    case KvType::F16:
    case KvType::Bf16: return dim * 2;
    case KvType::Int4: return dim / 2;
    default: return dim;
    }
}
__host__ __device__ constexpr u32 kv_row_parameters(KvType type, u32 dim) {
    return type == KvType::Int4 ? 2 * parts(dim, 32) : type == KvType::Q8 || type == KvType::Fp8 ? 1 : 0;
}

/// A row of a head's slice.
struct KvRow {
    u8* elements;
    f16* parameters;
};

/// Row `slot` of the slice that begins at `slice`.
__device__ inline KvRow kv_row(u8* slice, KvType type, u32 block_size, u32 dim, u32 slot) {
    u32 bytes = kv_row_bytes(type, dim);
    f16* parameters = reinterpret_cast<f16*>(slice + block_size * bytes);
    return {slice + slot * bytes, parameters + slot * kv_row_parameters(type, dim)};
}

/// K (plane 0) or V (plane 1) of a position.
__device__ inline KvRow kv_row_at(const KvPlanes& p, const u32* table, u32 head, u32 position, u32 plane) {
    u8* slice = p.base + table[position / p.block_size] * p.block + plane * p.value + head * p.head;
    return kv_row(slice, p.type, p.block_size, p.head_dim, position % p.block_size);
}

/// Rounds a parameter; what a reader will see.
__device__ inline float through_half(float x) { return __half2float(__float2half_rn(x)); }
/// 1 / scale, and 0 for 0: a row without a spread has the code 0 everywhere.
__device__ inline float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/// Rounds and stores a row of up to 256 elements: a whole warp, lane l with elements 8 l … + 8.
__device__ inline void kv_store_row(KvType type, const KvRow& row, u32 dim, const Octet& x) {
    u32 d = lane() * OCTET;
    bool inside = d < dim;
    if (type == KvType::Int4) {
        // Four lanes have the elements of a group, in which those beyond the row do not count.
        float low = FINITE, high = -FINITE;
#pragma unroll
        for (u32 i = 0; i < OCTET; i++) {
            float finite = clamp_to(x.x[i], -FINITE, FINITE);
            low = inside && finite < low ? finite : low;
            high = inside && finite > high ? finite : high;
        }
        low = -lanes_max(0.0f - low, 4);
        float scale = through_half((lanes_max(high, 4) - low) / 15.0f), minimum = through_half(low);
        if (!inside) return;
        f16* parameters = row.parameters + d / 32 * 2;
        if (d % 32 == 0) {
            parameters[0] = __float2half_rn(scale);
            parameters[1] = __float2half_rn(minimum);
        }
        float inverse = inverse_of(scale);
        u32 word = 0;
#pragma unroll
        for (u32 i = 0; i < OCTET; i++) {
            float q = clamp_to(rintf((x.x[i] - minimum) * inverse), 0.0f, 15.0f);
            word |= static_cast<u32>(q) << (4 * i);
        }
        *reinterpret_cast<u32*>(row.elements + d / 2) = word;
        return;
    }
    if (type != KvType::Q8 && type != KvType::Fp8) {
        if (inside) store8(static_cast<Element>(type), row.elements, d, x);
        return;
    }
    float largest = 0.0f;
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        float magnitude = fabsf(clamp_to(x.x[i], -FINITE, FINITE));
        largest = inside && magnitude > largest ? magnitude : largest;
    }
    float limit = type == KvType::Q8 ? 127.0f : E4M3_MAX;
    float scale = through_half(lanes_max(largest, WARP) / limit), inverse = inverse_of(scale);
    if (lane() == 0) row.parameters[0] = __float2half_rn(scale);
    if (!inside) return;
    u32 codes[OCTET];
#pragma unroll
    for (u32 i = 0; i < OCTET; i++) {
        float y = x.x[i] * inverse;
        if (type == KvType::Q8) {
            codes[i] = static_cast<u32>(static_cast<int>(clamp_to(rintf(y), -127.0f, 127.0f))) & 255;
        } else {
            codes[i] = to_e4m3(clamp_to(y, -E4M3_MAX, E4M3_MAX));
        }
    }
    store_codes(row.elements + d, codes);
}

} // namespace baton
