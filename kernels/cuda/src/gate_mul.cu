// The gated activation: out = act(gate) · up, with act SiLU, x · sigmoid(x), or GELU's tanh approximation.
//
// gate and up, of `type`, and out, of out_type: `rows` rows of `width`, each with a stride of its own, so that gate and up may be halves of
// one product's rows; out may be gate where the types are the same. Same operation: `First::Gate` in kernels/src/backend.rs, the formula of
// kernels/src/cpu/elementwise.rs (both gates as x · sigmoid(y)).
//
// Threads: one octet each. Bytes moved: gate, up and out once. Bound: memory bandwidth. Limits: width and strides multiples of 8.
#include "common.cuh"

namespace baton {

enum class Gate : u32 { Silu, GeluTanh };

struct GateMul {
    const void* gate;
    const void* up;
    void* out;
    Element type;
    Element out_type;
    Gate act;
    u32 rows;
    u32 width;
    /// Elements from one row to the next.
    u32 gate_stride;
    u32 up_stride;
    u32 out_stride;
};

constexpr u32 GATE_MUL_THREADS = 256;

inline Launch launch_of(const GateMul& p) {
    return launch_by_octets(static_cast<u64>(p.rows) * (p.width / OCTET), GATE_MUL_THREADS);
}

BATON_KERNEL(GATE_MUL_THREADS) baton_gate_mul(const __grid_constant__ GateMul p) {
    u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 across = p.width / OCTET;
    u64 row = i / across;
    if (row >= p.rows) return;
    u64 column = i % across * OCTET;
    Octet gate = load8(p.type, p.gate, row * p.gate_stride + column);
    Octet up = load8(p.type, p.up, row * p.up_stride + column);
#pragma unroll
    for (u32 k = 0; k < OCTET; k++) {
        float x = gate.x[k], y = x;
        // sqrt(2/π), twice: (1 + tanh(u)) / 2 = sigmoid(2u).
        if (p.act == Gate::GeluTanh) y = fmaf(x * x * 0.044715f, x, x) * (2.0f * 0.7978846f);
        gate.x[k] = x * (1.0f / (1.0f + expf(-y))) * up.x[k];
    }
    store8(p.out_type, p.out, row * p.out_stride + column, gate);
}

} // namespace baton
