//! [`Dots`] in plain Rust: the meaning of the weights' bytes, one by one.

use super::super::portable::Portable;
use super::super::simd::LANES;
use super::{Dots, Panels};

// SAFETY: needs no CPU feature; pointer validity is passed on to the callers.
unsafe impl Dots for Portable {
    type Outputs = Portable;
    type I = [i32; LANES];
    const PANELS: usize = 1;

    unsafe fn beside(first: [f32; LANES], _: [f32; LANES]) -> [f32; LANES] {
        first
    }
    unsafe fn to_f32(x: Self::I) -> [f32; LANES] {
        x.map(|v| v as f32)
    }
    unsafe fn zero() -> Self::I {
        [0; LANES]
    }
    unsafe fn plus(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] + b[i])
    }
    unsafe fn mul_add(a: Self::I, b: Self::I, c: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    unsafe fn bytes(at: Panels) -> Self::I {
        // SAFETY: eight bytes are readable.
        std::array::from_fn(|i| unsafe { i32::from(*at.first.add(i)) })
    }
    unsafe fn pairs(first: Panels, second: Panels) -> Self::I {
        // SAFETY: eight bytes of both are readable.
        std::array::from_fn(|i| unsafe { i32::from(*first.first.add(i)) | i32::from(*second.first.add(i)) << 16 })
    }
    unsafe fn add_pairs(sum: Self::I, pairs: Self::I, by: *const i16) -> Self::I {
        // SAFETY: two numbers are readable.
        let [first, second] = [0, 1].map(|i| unsafe { i32::from(*by.add(i)) });
        std::array::from_fn(|i| sum[i] + (pairs[i] & 0xffff) * first + (pairs[i] >> 16) * second)
    }
    unsafe fn dot_u4<const T: usize>(w: Panels, a: [*const i8; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 128 weight bytes and 32 activation bytes are readable.
                unsafe {
                    let q = *w.first.add(byte) as i32;
                    let low = *a.add(vector * 4 + k) as i32;
                    let high = *a.add(16 + vector * 4 + k) as i32;
                    out[t][lane] += (q & 15) * low + (q >> 4) * high;
                }
            }
        }
        out
    }
    unsafe fn dot_u5<const T: usize>(w: Panels, a: [*const i8; T]) -> [Self::I; T] {
        // SAFETY: 160 weight bytes and 32 bytes of each activation group are readable.
        unsafe {
            let mut out = Self::dot_u4::<T>(w, a);
            for (t, a) in a.into_iter().enumerate() {
                for byte in 0..32 {
                    let bits = *w.first.add(128 + byte) as i32;
                    for k in (byte % 4..32).step_by(4) {
                        out[t][byte / 4] += (bits >> (k / 4) & 1) * 16 * *a.add(k) as i32;
                    }
                }
            }
            out
        }
    }
    unsafe fn dot_u6<const T: usize>(w: Panels, a: [*const i8; T], sums: [*const i16; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for t in 0..T {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 208 weight bytes, 32 activation bytes and two sums are readable.
                unsafe {
                    let nibbles = *w.first.add(byte) as i32;
                    for half in 0..2 {
                        let upper = *w.first.add(128 + 32 * half + byte % 32) as i32 >> (2 * vector) & 3;
                        let q =
                            (nibbles >> (4 * half) & 15 | upper << 4) * *a[t].add(16 * half + 4 * vector + k) as i32;
                        out[t][lane] += q * *w.first.add(192 + 2 * lane + half).cast::<i8>() as i32;
                    }
                }
            }
            for i in 0..2 * LANES {
                // SAFETY: as above.
                unsafe { out[t][i / 2] -= 32 * *w.first.add(192 + i).cast::<i8>() as i32 * *sums[t].add(i % 2) as i32 }
            }
        }
        out
    }
    unsafe fn dot_i8<const T: usize>(w: Panels, a: [*const i8; T], _: [*const i16; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..256 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 256 weight bytes and 32 activation bytes are readable.
                unsafe { out[t][lane] += *w.first.add(byte).cast::<i8>() as i32 * *a.add(vector * 4 + k) as i32 }
            }
        }
        out
    }
}
