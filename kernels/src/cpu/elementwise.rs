//! Row-wise and element-wise kernels: RMS norm and the gated activation.
//!
//! Bytes moved: a norm reads each row twice, the second time from the nearest cache, and writes it once, 12 an element; a gate reads
//! two elements and writes one, 12. Bound: the cache that holds a step's activations; for the gate, about 20 instructions a
//! vector for its exponential.

use super::isa::dispatch;
use super::simd::{Floats, LANES, Simd, exp};
use crate::backend::Gate;

/// What a row is multiplied by: `1 / sqrt(mean(x²) + eps)`.
///
/// # Safety
/// `x` has `width` elements, a multiple of 8, and the CPU `S`'s features.
#[inline(always)]
pub unsafe fn rms_factor<S: Simd>(x: *const f32, eps: f32, width: usize) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        let mut squares = S::splat(0.0);
        for i in (0..width).step_by(LANES) {
            let v = S::load(x.add(i));
            squares = S::fma(v, v, squares);
        }
        S::splat(1.0 / (S::sum(squares) / width as f32 + eps).sqrt())
    }
}

/// Eight elements of a row, normed.
///
/// # Safety
/// `x` and `weight` have eight elements, and the CPU `S`'s features.
#[inline(always)]
pub unsafe fn normed<S: Simd>(x: *const f32, factor: S::F, weight: *const f32) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::mul(S::mul(S::load(x), factor), S::load(weight)) }
}

/// `out = x / sqrt(mean(x²) + eps) · weight`; `out` may be `x`.
#[inline(always)]
unsafe fn rms_norm_kernel<S: Simd>(_: S, x: *const f32, weight: *const f32, eps: f32, width: usize, out: *mut f32) {
    // SAFETY: all three have `width` elements, a multiple of 8.
    unsafe {
        let factor = rms_factor::<S>(x, eps, width);
        for i in (0..width).step_by(LANES) {
            S::store(out.add(i), normed::<S>(x.add(i), factor, weight.add(i)));
        }
    }
}

dispatch! {
    /// RMS norm of one row.
    ///
    /// # Safety
    /// `x` and `weight` are readable and `out` writable for `width` elements, a multiple of 8.
    pub unsafe fn rms_norm(x: *const f32, weight: *const f32, eps: f32, width: usize, out: *mut f32) = rms_norm_kernel
}

/// sqrt(2 / pi)
const GELU_SCALE: f32 = 0.797_884_6;

/// As many lanes of the gated activation as a vector has.
///
/// Both gates are `x · sigmoid(y)`: y = x for SiLU, and y = 2·sqrt(2/π)·(x + 0.044715·x³) for GELU because
/// (1 + tanh(u)) / 2 = sigmoid(2u).
#[inline(always)]
unsafe fn gate_vector<L: Floats>(act: Gate, gate: *mut f32, up: *const f32) {
    // SAFETY: both have `L::COUNT` elements.
    unsafe {
        let (x, one) = (L::load(gate), L::splat(1.0));
        let y = match act {
            Gate::Silu => x,
            Gate::GeluTanh => {
                let cubic = L::fma(L::mul(L::mul(x, x), L::splat(0.044_715)), x, x);
                L::mul(cubic, L::splat(2.0 * GELU_SCALE))
            }
        };
        let sigmoid = L::div(one, L::add(one, exp::<L>(L::sub(L::splat(0.0), y))));
        L::store(gate, L::mul(L::mul(x, sigmoid), L::load(up)));
    }
}

#[inline(always)]
unsafe fn gate_kernel<S: Simd>(_: S, act: Gate, gate: *mut f32, up: *const f32, count: usize) {
    let wide = S::Wide::COUNT;
    // SAFETY: both have `count` elements, a multiple of 8.
    unsafe {
        for i in (0..count / wide * wide).step_by(wide) {
            gate_vector::<S::Wide>(act, gate.add(i), up.add(i));
        }
        for i in (count / wide * wide..count).step_by(LANES) {
            gate_vector::<S>(act, gate.add(i), up.add(i));
        }
    }
}

dispatch! {
    /// `gate = act(gate) · up`.
    ///
    /// # Safety
    /// Both hold `count` elements, a multiple of 8.
    pub unsafe fn gate_mul(act: Gate, gate: *mut f32, up: *const f32, count: usize) = gate_kernel
}

#[inline(always)]
unsafe fn add_kernel<S: Simd>(_: S, x: *mut f32, y: *const f32, count: usize) {
    for i in (0..count).step_by(LANES) {
        // SAFETY: both have `count` elements, a multiple of 8.
        unsafe { S::store(x.add(i), S::add(S::load(x.add(i)), S::load(y.add(i)))) }
    }
}

dispatch! {
    /// `x += y`.
    ///
    /// # Safety
    /// Both hold `count` elements, a multiple of 8.
    pub unsafe fn add(x: *mut f32, y: *const f32, count: usize) = add_kernel
}
