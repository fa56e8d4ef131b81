// The kernels as a library: what a driver is to a program with a GPU, this is to tests without one. Kernels are launched by name on a
// struct of parameters, in memory of the process, and products are computed plainly. Built by `kernels/cuda/tests/run library`, opened by
// kernels/src/cuda/host.rs.
//
// It also tells how the structs of parameters are laid out, and refuses a launch whose grid is not what `launch_of` says, so that the
// Rust that fills in the one and computes the other cannot drift from the kernels.
#include "adjust_logits.cu"
#include "add.cu"
#include "attention_decode.cu"
#include "attention_hopper.cu"
#include "attention_prefill.cu"
#include "copy_blocks.cu"
#include "dequantise.cu"
#include "embed.cu"
#include "gate_mul.cu"
#include "mask_logits.cu"
#include "move_runs.cu"
#include "quantise_rows.cu"
#include "rms_norm.cu"
#include "rope_store_kv.cu"
#include "sample.cu"
#include "scale_products.cu"
#include "seeded_rows.cu"

#include <initializer_list>
#include <limits>
#include <vector>

namespace {

using namespace baton;

struct Kernel {
    const char* name;
    u64 bytes;
    Launch (*launch)(const void* params);
    void (*run)(const void* params, const Launch& launch);
};

template <class P, void (*KERNEL)(P)>
constexpr Kernel kernel(const char* name) {
    return {name, sizeof(P), [](const void* p) { return launch_of(*static_cast<const P*>(p)); },
            [](const void* p, const Launch& launch) {
                const P& params = *static_cast<const P*>(p);
                shim::launch(launch.grid, launch.block, launch.shared, [&] { KERNEL(params); }, shim::Order::Ascending);
            }};
}

#define K(P, name) kernel<P, name>(#name)
#define ATTENTION(type)                                                                                                              \
    K(AttentionDecode, baton_attention_decode_##type##_64), K(AttentionDecode, baton_attention_decode_##type##_128),                \
        K(AttentionDecode, baton_attention_decode_##type##_256), K(AttentionPrefill, baton_attention_prefill_##type##_64),          \
        K(AttentionPrefill, baton_attention_prefill_##type##_128), K(AttentionPrefill, baton_attention_prefill_##type##_256)

const Kernel KERNELS[] = {
    K(Add, baton_add),
    K(AdjustLogits, baton_adjust_logits),
    ATTENTION(f16),
    ATTENTION(bf16),
    ATTENTION(q8),
    ATTENTION(fp8),
    K(AttentionHopper, baton_attention_hopper_f16_64),
    K(AttentionHopper, baton_attention_hopper_f16_128),
    K(AttentionHopper, baton_attention_hopper_bf16_64),
    K(AttentionHopper, baton_attention_hopper_bf16_128),
    K(CopyBlocks, baton_copy_blocks),
    K(Dequantise, baton_dequantise),
    K(Embed, baton_embed),
    K(GateMul, baton_gate_mul),
    K(MaskLogits, baton_mask_logits),
    K(MoveRuns, baton_move_runs),
    K(QuantiseRows, baton_quantise_rows),
    K(RmsNorm, baton_rms_norm),
    K(RopeStoreKv, baton_rope_store_kv),
    K(Sample, baton_sample),
    K(ScaleProducts, baton_scale_products),
    K(SeededRows, baton_seeded_rows),
};

/// A struct's size and the offsets of its fields, in order.
struct Structure {
    const char* name;
    std::vector<u64> layout;
};

#define S(T, ...) {#T, {sizeof(T), __VA_ARGS__}}
#define O(T, field) offsetof(T, field)

const std::vector<Structure>& structures() {
    static const std::vector<Structure> all = {
        S(Tile, O(Tile, row), O(Tile, rows), O(Tile, position), O(Tile, table)),
        S(KvPlanes, O(KvPlanes, base), O(KvPlanes, block), O(KvPlanes, value), O(KvPlanes, head), O(KvPlanes, type),
          O(KvPlanes, block_size), O(KvPlanes, head_dim)),
        S(Embed, O(Embed, table), O(Embed, rows), O(Embed, out), O(Embed, table_type), O(Embed, out_type), O(Embed, count),
          O(Embed, width), O(Embed, scale), O(Embed, drawn)),
        S(RmsNorm, O(RmsNorm, x), O(RmsNorm, add), O(RmsNorm, weight), O(RmsNorm, out), O(RmsNorm, scales),
          O(RmsNorm, x_type), O(RmsNorm, y_type), O(RmsNorm, rows), O(RmsNorm, width), O(RmsNorm, together),
          O(RmsNorm, x_stride), O(RmsNorm, out_stride), O(RmsNorm, eps)),
        S(Add, O(Add, x), O(Add, y), O(Add, elements), O(Add, x_type), O(Add, y_type)),
        S(GateMul, O(GateMul, gate), O(GateMul, up), O(GateMul, out), O(GateMul, type), O(GateMul, out_type), O(GateMul, act),
          O(GateMul, rows), O(GateMul, width), O(GateMul, gate_stride), O(GateMul, up_stride), O(GateMul, out_stride)),
        S(RopeStoreKv, O(RopeStoreKv, planes), O(RopeStoreKv, q), O(RopeStoreKv, k), O(RopeStoreKv, v), O(RopeStoreKv, q_out),
          O(RopeStoreKv, cos), O(RopeStoreKv, sin), O(RopeStoreKv, tiles), O(RopeStoreKv, blocks), O(RopeStoreKv, in_type),
          O(RopeStoreKv, q_type), O(RopeStoreKv, tile_count), O(RopeStoreKv, tile_rows), O(RopeStoreKv, heads),
          O(RopeStoreKv, kv_heads), O(RopeStoreKv, q_stride), O(RopeStoreKv, k_stride), O(RopeStoreKv, v_stride),
          O(RopeStoreKv, q_out_stride)),
        S(Attention, O(Attention, planes), O(Attention, q), O(Attention, out), O(Attention, tiles), O(Attention, blocks),
          O(Attention, q_type), O(Attention, out_type), O(Attention, tile_count), O(Attention, tile_rows), O(Attention, heads),
          O(Attention, kv_heads), O(Attention, q_stride), O(Attention, window), O(Attention, scale_log2)),
        S(DecodeWork, O(DecodeWork, first), O(DecodeWork, count)),
        S(DecodeSplit, O(DecodeSplit, tile), O(DecodeSplit, split), O(DecodeSplit, slot)),
        S(AttentionDecode, O(AttentionDecode, a), O(AttentionDecode, work), O(AttentionDecode, partial), O(AttentionDecode, stats),
          O(AttentionDecode, done), O(AttentionDecode, split), O(AttentionDecode, thread_blocks)),
        S(TensorMap, O(TensorMap, words)),
        S(AttentionHopper, O(AttentionHopper, a), O(AttentionHopper, pool)),
        S(CopyBlocks, O(CopyBlocks, base), O(CopyBlocks, layer_stride), O(CopyBlocks, pairs), O(CopyBlocks, bytes), O(CopyBlocks, count),
          O(CopyBlocks, layers)),
        S(Moved, O(Moved, source), O(Moved, target), O(Moved, lane)),
        S(MoveRuns, O(MoveRuns, source), O(MoveRuns, target), O(MoveRuns, runs), O(MoveRuns, digests), O(MoveRuns, bytes),
          O(MoveRuns, count)),
        S(Dequantise, O(Dequantise, source), O(Dequantise, row_order), O(Dequantise, out), O(Dequantise, type),
          O(Dequantise, out_type), O(Dequantise, rows), O(Dequantise, cols)),
        S(QuantiseRows, O(QuantiseRows, x), O(QuantiseRows, out), O(QuantiseRows, scales), O(QuantiseRows, x_type),
          O(QuantiseRows, rows), O(QuantiseRows, width), O(QuantiseRows, x_stride)),
        S(ScaleProducts, O(ScaleProducts, x), O(ScaleProducts, row_scales), O(ScaleProducts, column_scales), O(ScaleProducts, bias),
          O(ScaleProducts, rows), O(ScaleProducts, width), O(ScaleProducts, stride)),
        S(SeededRows, O(SeededRows, out), O(SeededRows, key), O(SeededRows, first), O(SeededRows, stride), O(SeededRows, rows),
          O(SeededRows, width), O(SeededRows, middle), O(SeededRows, spread)),
        S(SampleRow, O(SampleRow, seed), O(SampleRow, index), O(SampleRow, temperature), O(SampleRow, top_k), O(SampleRow, top_p),
          O(SampleRow, min_p), O(SampleRow, top_logprobs), O(SampleRow, row)),
        S(Sampled, O(Sampled, id), O(Sampled, logprob), O(Sampled, digest), O(Sampled, top_ids), O(Sampled, top_logprobs)),
        S(Sample, O(Sample, logits), O(Sample, raw), O(Sample, rows), O(Sample, out), O(Sample, count), O(Sample, vocab)),
        S(LogitEntry, O(LogitEntry, row), O(LogitEntry, id), O(LogitEntry, divide), O(LogitEntry, subtract), O(LogitEntry, add)),
        S(AdjustLogits, O(AdjustLogits, logits), O(AdjustLogits, entries), O(AdjustLogits, count), O(AdjustLogits, vocab)),
        S(MaskLogits, O(MaskLogits, logits), O(MaskLogits, rows), O(MaskLogits, masks), O(MaskLogits, count), O(MaskLogits, vocab)),
    };
    return all;
}

/// What a code of E4M3 stands for to tensor cores: bias 7, no infinities, NaN where all seven bits are set.
float e4m3(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    float magnitude = exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    return code & 0x80 ? -magnitude : magnitude;
}

bool same(dim3 got, const u32* want) { return got.x == want[0] && got.y == want[1] && got.z == want[2]; }

} // namespace

extern "C" {

/// Runs a kernel on its struct of parameters, of `bytes` bytes. 0: done; 1: there is no such kernel; 2: its parameters have another size;
/// 3: it is launched with another grid, block or dynamic shared memory. One launch at a time.
u32 baton_host_launch(const char* name, const void* params, u64 bytes, const u32* grid, const u32* block, u32 shared) {
    for (const Kernel& kernel : KERNELS) {
        if (std::strcmp(kernel.name, name) != 0) continue;
        if (kernel.bytes != bytes) return 2;
        Launch launch = kernel.launch(params);
        if (!same(launch.grid, grid) || !same(launch.block, block) || launch.shared != shared) return 3;
        kernel.run(params, launch);
        return 0;
    }
    return 1;
}

/// Encodes rows of 16-bit elements as a tensor map, as cuTensorMapEncodeTiled does. 0: done; 1: it would refuse.
u32 baton_host_tensor_map(void* map, void* base, u64 width, u64 rows, u64 stride, u32 box_width, u32 box_rows) {
    return !shim::encode_rows(map, base, width, rows, stride, box_width, box_rows);
}

/// Size and offsets of a struct, up to `room` numbers; how many there are, 0 for a struct it does not know.
u64 baton_host_layout(const char* name, u64* out, u64 room) {
    for (const Structure& structure : structures()) {
        if (std::strcmp(structure.name, name) != 0) continue;
        for (u64 i = 0; i < structure.layout.size() && i < room; i++) out[i] = structure.layout[i];
        return structure.layout.size();
    }
    return 0;
}

/// out[r][o] = bias[o] + sum over k of weight[o][k] · x[r][k], in f32, k ascending, products fused; no bias where it is null;
/// rows of out are `stride` apart.
void baton_host_product(const u16* weight, const u16* x, const float* bias, float* out, u64 rows, u64 outs, u64 cols,
                        u64 stride) {
    auto wide = [](u16 bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); };
    for (u64 r = 0; r < rows; r++) {
        for (u64 o = 0; o < outs; o++) {
            float sum = 0.0f;
            for (u64 k = 0; k < cols; k++) sum = std::fma(wide(weight[o * cols + k]), wide(x[r * cols + k]), sum);
            out[r * stride + o] = bias ? sum + bias[o] : sum;
        }
    }
}

/// out[r][o] = (sum over k of weight[o][k] · x[r][k]) · (x_scales[r] · weight_scales[o]), of E4M3 codes, in f32, k ascending, products fused;
/// the bare sum where the scales are null; rows of out as above.
void baton_host_product_e4m3(const u8* weight, const u8* x, const float* weight_scales, const float* x_scales, float* out, u64 rows,
                             u64 outs, u64 cols, u64 stride) {
    float values[256];
    for (u32 code = 0; code < 256; code++) values[code] = e4m3(static_cast<u8>(code));
    for (u64 r = 0; r < rows; r++) {
        for (u64 o = 0; o < outs; o++) {
            float sum = 0.0f;
            for (u64 k = 0; k < cols; k++) sum = std::fma(values[weight[o * cols + k]], values[x[r * cols + k]], sum);
            out[r * stride + o] = weight_scales ? sum * (x_scales[r] * weight_scales[o]) : sum;
        }
    }
}
}
