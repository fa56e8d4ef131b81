// x += y, where no norm follows that would do it (rms_norm.cu).
//
// x: [elements] of x_type, y: [elements] of y_type. Same operation: `add` in kernels/src/backend.rs; in f32 the same bits.
//
// Threads: one octet each. Bytes moved: x twice, y once. Bound: memory bandwidth. Limits: elements a multiple of 8.
#include "common.cuh"

namespace baton {

struct Add {
    void* x;
    const void* y;
    u64 elements;
    Element x_type;
    Element y_type;
};

constexpr u32 ADD_THREADS = 256;

inline Launch launch_of(const Add& p) { return launch_by_octets(p.elements / OCTET, ADD_THREADS); }

BATON_KERNEL(ADD_THREADS) baton_add(const __grid_constant__ Add p) {
    u64 at = (static_cast<u64>(blockIdx.x) * ADD_THREADS + threadIdx.x) * OCTET;
    if (at >= p.elements) return;
    Octet x = load8(p.x_type, p.x, at), y = load8(p.y_type, p.y, at);
#pragma unroll
    for (u32 k = 0; k < OCTET; k++) x.x[k] += y.x[k];
    store8(p.x_type, p.x, at, x);
}

} // namespace baton
