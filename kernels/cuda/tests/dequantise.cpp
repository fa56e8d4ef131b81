// Every GGUF type against a decoder written weight by weight, from the description of the format.
#include "dequantise.cu"

#include "harness.hpp"

namespace test {

struct Format {
    Quant type;
    const char* name;
    u32 elements;
    u32 bytes;
};
static const Format FORMATS[] = {
    {Quant::Q4_0, "Q4_0", 32, 18}, {Quant::Q4_1, "Q4_1", 32, 20},  {Quant::Q5_0, "Q5_0", 32, 22},  {Quant::Q5_1, "Q5_1", 32, 24},
    {Quant::Q8_0, "Q8_0", 32, 34}, {Quant::Q4K, "Q4_K", 256, 144}, {Quant::Q5K, "Q5_K", 256, 176}, {Quant::Q6K, "Q6_K", 256, 210},
};

static double half(const u8* p) {
    u16 bits;
    std::memcpy(&bits, p, 2);
    return __half2float(__ushort_as_half(bits));
}

/// The six-bit numbers of K-quants: eight scales and eight minima in twelve bytes.
static void six_bits(const u8* s, u32 j, int& scale, int& min) {
    // The first four of each are the low six bits of bytes 0..4 and 4..8; the others have four bits in bytes 8..12 and two at the top
    // of the first ones.
    int low_scale = j < 4 ? s[j] & 0x3f : s[j + 4] & 0x0f, low_min = j < 4 ? s[j + 4] & 0x3f : s[j + 4] >> 4;
    scale = j < 4 ? low_scale : low_scale + 16 * (s[j - 4] >> 6);
    min = j < 4 ? low_min : low_min + 16 * (s[j] >> 6);
}

static double weight(Quant type, const u8* b, u32 k) {
    auto nibble = [&](const u8* q) { return k < 16 ? q[k] % 16 : q[k - 16] / 16; };
    auto fifth = [&](const u8* q) { return q[k / 8] >> (k % 8) & 1; };
    int scale, min;
    switch (type) {
    case Quant::Q4_0: return half(b) * (nibble(b + 2) - 8);
    case Quant::Q4_1: return half(b) * nibble(b + 4) + half(b + 2);
    case Quant::Q5_0: return half(b) * (nibble(b + 6) + 16 * fifth(b + 2) - 16);
    case Quant::Q5_1: return half(b) * (nibble(b + 8) + 16 * fifth(b + 4)) + half(b + 2);
    case Quant::Q8_0: return half(b) * static_cast<signed char>(b[2 + k]);
    case Quant::Q4K: {
        six_bits(b + 4, k / 32, scale, min);
        u8 byte = b[16 + k / 64 * 32 + k % 32];
        return half(b) * scale * (k / 32 % 2 ? byte / 16 : byte % 16) - half(b + 2) * min;
    }
    case Quant::Q5K: {
        six_bits(b + 4, k / 32, scale, min);
        u8 byte = b[48 + k / 64 * 32 + k % 32];
        int q = (k / 32 % 2 ? byte / 16 : byte % 16) + 16 * (b[16 + k % 32] >> (k / 32) & 1);
        return half(b) * scale * q - half(b + 2) * min;
    }
    default: {
        // Low bits: 64 bytes a half, quarters 0 and 1 in low nibbles, 2 and 3 in high ones. High bits: 32 bytes a half, two bits a quarter.
        u32 part = k / 128, quarter = k / 32 % 4;
        u8 byte = b[64 * part + 32 * (quarter % 2) + k % 32];
        int q = (quarter < 2 ? byte % 16 : byte / 16) + 16 * (b[128 + 32 * part + k % 32] >> (2 * quarter) & 3) - 32;
        return half(b + 208) * static_cast<signed char>(b[192 + k / 16]) * q;
    }
    }
}

/// Random blocks with scales that are ordinary numbers.
static std::vector<u8> stored(const Format& format, u64 blocks, Random& random) {
    std::vector<u8> out(blocks * format.bytes);
    for (u8& byte : out) byte = static_cast<u8>(random.next());
    auto put_half = [&](u8* at) {
        u16 bits = __half_as_ushort(__float2half_rn(static_cast<float>(random.normal() * 0.01)));
        std::memcpy(at, &bits, 2);
    };
    for (u64 i = 0; i < blocks; i++) {
        u8* block = &out[i * format.bytes];
        put_half(block + (format.type == Quant::Q6K ? 208 : 0));
        if (format.type == Quant::Q4_1 || format.type == Quant::Q5_1 || format.type == Quant::Q4K || format.type == Quant::Q5K) {
            put_half(block + 2);
        }
    }
    return out;
}

TEST(dequantise_reads_every_type_of_gguf) {
    Random random{11};
    for (const Format& format : FORMATS) {
        CHECK(quant_elements(format.type) == format.elements && quant_bytes(format.type) == format.bytes, "%s", format.name);
        for (u32 blocks : {1u, 3u, 40u}) {
            u32 rows = 5, cols = blocks * format.elements;
            if (cols > 2048) continue;
            std::vector<u8> source = stored(format, static_cast<u64>(rows) * blocks, random);
            std::vector<u32> order = {4, 2, 0, 1, 3};
            for (Element type : {Element::F32, Element::Bf16, Element::F16}) {
                for (bool ordered : {false, true}) {
                    Array out(type, static_cast<u64>(rows) * cols);
                    run(baton_dequantise, Dequantise{source.data(), ordered ? order.data() : nullptr, out.data(), format.type, type, rows, cols});
                    for (u64 i = 0; i < out.count; i++) {
                        u64 row = ordered ? order[i / cols] : i / cols, column = i % cols;
                        double want = weight(format.type, &source[(row * blocks + column / format.elements) * format.bytes],
                                             static_cast<u32>(column % format.elements));
                        double allowed = std::fabs(want) * rounding(type) * 1.0001 + (type == Element::F16 ? 0x1p-25 : 0);
                        CHECK_NEAR(out[i], want, allowed, "%s to %s, element %llu of rows of %u", format.name, name_of(type), i, cols);
                    }
                }
            }
        }
    }
}

} // namespace test
