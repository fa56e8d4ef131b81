// A KV pool of one layer for tests, read and written byte by byte as crates/types/src/layout.rs describes it, and rounded by a reference
// written from the description of `KvDtype`, not from the kernels.
#pragma once

#include "kv.cuh"

#include "harness.hpp"

namespace test {

inline constexpr KvType KV_TYPES[] = {KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8, KvType::Fp8, KvType::Int4};
inline const char* name_of(KvType type) {
    static const char* names[] = {"f32", "f16", "bf16", "q8", "fp8", "int4"};
    return names[static_cast<u32>(type)];
}

/// Bytes of the elements of a row, and of its parameters.
inline u64 elements_bytes(KvType type, u32 dim) {
    static const u32 bits[] = {32, 16, 16, 8, 8, 4};
    return static_cast<u64>(dim) * bits[static_cast<u32>(type)] / 8;
}
inline u64 parameter_bytes(KvType type, u32 dim) {
    switch (type) {
    case KvType::Q8:
    case KvType::Fp8: return 2;
    case KvType::Int4: return (dim + 31) / 32 * 4;
    default: return 0;
    }
}
inline u64 slice_bytes(KvType type, u32 block_size, u32 dim) {
    return block_size * (elements_bytes(type, dim) + parameter_bytes(type, dim));
}

inline double half_of(const u8* p) {
    u16 bits;
    std::memcpy(&bits, p, 2);
    return __half2float(__ushort_as_half(bits));
}

/// E4M3 from its definition: sign, four exponent bits with bias 7, three mantissa bits; 0x7f counts on to 480.
inline double e4m3(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double magnitude = exponent ? std::ldexp(1.0 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa / 8.0, -6);
    return code & 0x80 ? -magnitude : magnitude;
}

/// Element `d` of row `slot` of a slice.
inline double read_row(KvType type, const u8* slice, u32 block_size, u32 dim, u32 slot, u32 d) {
    const u8* row = slice + slot * elements_bytes(type, dim);
    const u8* parameters = slice + block_size * elements_bytes(type, dim) + slot * parameter_bytes(type, dim);
    switch (type) {
    case KvType::F32: return to_double(Element::F32, row, d);
    case KvType::F16: return to_double(Element::F16, row, d);
    case KvType::Bf16: return to_double(Element::Bf16, row, d);
    case KvType::Q8: return static_cast<signed char>(row[d]) * half_of(parameters);
    case KvType::Fp8: return e4m3(row[d]) * half_of(parameters);
    default: {
        int code = d % 2 ? row[d / 2] / 16 : row[d / 2] % 16;
        return code * half_of(parameters + d / 32 * 4) + half_of(parameters + d / 32 * 4 + 2);
    }
    }
}

/// Rounds one row of f32 into a slice, by the definition of its type.
inline void write_row(KvType type, u8* slice, u32 block_size, u32 dim, u32 slot, const float* x) {
    u8* row = slice + slot * elements_bytes(type, dim);
    u8* parameters = slice + block_size * elements_bytes(type, dim) + slot * parameter_bytes(type, dim);
    auto put_half = [&](u32 i, float value) {
        f16 rounded = __float2half_rn(value);
        std::memcpy(parameters + 2 * i, &rounded, 2);
        return __half2float(rounded);
    };
    float largest = 0;
    for (u32 d = 0; d < dim; d++) largest = std::fmax(largest, std::fabs(x[d]));
    switch (type) {
    case KvType::F32: std::memcpy(row, x, dim * 4); break;
    case KvType::F16:
        for (u32 d = 0; d < dim; d++) reinterpret_cast<f16*>(row)[d] = __float2half_rn(x[d]);
        break;
    case KvType::Bf16:
        for (u32 d = 0; d < dim; d++) reinterpret_cast<bf16*>(row)[d] = __float2bfloat16_rn(x[d]);
        break;
    case KvType::Q8: {
        float scale = put_half(0, largest / 127.0f), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (u32 d = 0; d < dim; d++) {
            row[d] = static_cast<u8>(static_cast<signed char>(std::fmax(-127.0f, std::fmin(127.0f, std::nearbyint(x[d] * inverse)))));
        }
        break;
    }
    case KvType::Fp8: {
        float scale = put_half(0, largest / 448.0f), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (u32 d = 0; d < dim; d++) {
            double y = std::fmax(-448.0f, std::fmin(448.0f, x[d] * inverse));
            // The nearest of all codes; among two the even one.
            int best = 0;
            for (int code = 1; code <= 0x7e; code++) {
                double off = std::fabs(e4m3(static_cast<u8>(code)) - std::fabs(y)), least = std::fabs(e4m3(static_cast<u8>(best)) - std::fabs(y));
                if (off < least || (off == least && code % 2 == 0)) best = code;
            }
            row[d] = static_cast<u8>(best | (std::signbit(y) ? 0x80 : 0));
        }
        break;
    }
    case KvType::Int4:
        for (u32 first = 0; first < dim; first += 32) {
            u32 end = std::min(dim, first + 32);
            float low = x[first], high = x[first];
            for (u32 d = first; d < end; d++) {
                low = std::fmin(low, x[d]);
                high = std::fmax(high, x[d]);
            }
            if (low == 0.0f) low = -0.0f;
            float scale = put_half(first / 16, (high - low) / 15.0f), minimum = put_half(first / 16 + 1, low);
            float inverse = scale > 0 ? 1.0f / scale : 0.0f;
            for (u32 d = first; d < end; d++) {
                int code = static_cast<int>(std::fmax(0.0f, std::fmin(15.0f, std::nearbyint((x[d] - minimum) * inverse))));
                row[d / 2] = static_cast<u8>(d % 2 ? row[d / 2] % 16 + 16 * code : row[d / 2] / 16 * 16 + code);
            }
        }
    }
}

/// One layer of a pool.
struct Pool {
    KvType type;
    u32 blocks;
    u32 kv_heads;
    u32 block_size;
    u32 dim;
    std::vector<u8> bytes;

    Pool(KvType type, u32 blocks, u32 kv_heads, u32 block_size, u32 dim)
        : type(type), blocks(blocks), kv_heads(kv_heads), block_size(block_size), dim(dim),
          // What is no row yet is NaN, in elements and in parameters.
          bytes(blocks * 2 * kv_heads * slice_bytes(type, block_size, dim), 0xff) {}

    u64 slice() const { return slice_bytes(type, block_size, dim); }
    u8* slice_at(u32 block, u32 plane, u32 head) { return &bytes[((block * 2 + plane) * kv_heads + head) * slice()]; }
    KvPlanes planes() { return {bytes.data(), 2 * kv_heads * slice(), kv_heads * slice(), slice(), type, block_size, dim}; }
    void write(const std::vector<u32>& table, u32 plane, u32 head, u32 position, const float* x) {
        write_row(type, slice_at(table[position / block_size], plane, head), block_size, dim, position % block_size, x);
    }
    double read(const std::vector<u32>& table, u32 plane, u32 head, u32 position, u32 d) {
        return read_row(type, slice_at(table[position / block_size], plane, head), block_size, dim, position % block_size, d);
    }
};

} // namespace test
