//! Eight-lane arithmetic with three instantiations: AVX2 + FMA + F16C, the same with AVX-512 VNNI, and portable Rust.
//!
//! Every CPU kernel is written once over [`Simd`]. All instantiations do the same operations in the same order and round
//! in the same places (the portable one uses fused `mul_add`), so they give the same bits (I1), and a worker without AVX2 can
//! stand in for one that has it. All methods are unsafe because the AVX2 ones need the CPU to have the features; the
//! safe dispatch is in [`super::isa`].

use half::{bf16, f16};

/// Rows of a weight panel and lanes of a vector.
pub const LANES: usize = 8;

/// Eight f32 lanes and the integer dot products the quantised kernels need.
///
/// # Safety
/// Callers of any method must run on a CPU with the instantiation's features, and pointers must be valid for the lanes read
/// or written. There is no alignment requirement.
pub unsafe trait Simd: Copy + 'static {
    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type I: Copy;
    /// Rows of a quantised product computed together: as many as its registers hold.
    const TILE: usize;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    unsafe fn load_u8(p: *const u8) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn store_f16(p: *mut f16, x: Self::F);
    unsafe fn store_bf16(p: *mut bf16, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// 2 to the power of integers in [-126, 127].
    unsafe fn exp2i(n: Self::F) -> Self::F;
    /// Sum of lanes in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
    unsafe fn sum(a: Self::F) -> f32;
    /// Largest lane; no lane is NaN.
    unsafe fn max_lane(a: Self::F) -> f32;
    /// Lanes `low..high` of `a`, the others replaced by `other`.
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F;
    /// Stores lanes (integers in [-128, 127]) as bytes.
    unsafe fn store_i8(p: *mut i8, x: Self::F);
    /// Eight integers as f32.
    unsafe fn to_f32(x: Self::I) -> Self::F;

    /// Dot products of one group of 32 unsigned 4-bit weights of eight rows with `T` activation groups.
    /// `w`: 128 bytes; the low nibbles of 32-byte vector i hold weights 4i..4i+4 of each row, the high nibbles 16+4i..16+4i+4.
    unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T];
    /// The same for 5-bit weights. `w`: the nibbles, then 32 bytes of fifth bits as [`super::packing`] lays them.
    unsafe fn dot_u5<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T];
    /// The same for 6-bit weights raised by 32, each half group times its scale. `w`: the nibbles, 64 bytes of upper bits, 16 signed
    /// scales, two a row. `sums`: of the two half groups of each activation group.
    unsafe fn dot_u6<const T: usize>(w: *const u8, a: [*const i8; T], sums: [*const i16; T]) -> [Self::I; T];
    /// Dot products of one half group of 16 signed 8-bit weights of eight rows with `T` half groups of activations.
    /// `w`: 128 bytes; 32-byte vector i holds weights 4i..4i+4 of each row. `sums`: of each half group of activations.
    unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T], sums: [i16; T]) -> [Self::I; T];
    /// Lane-wise integer sum.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// Rows become columns.
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES];
}

/// e to the power of each lane, within 2 units in the last place on [-87, 88]; arguments outside are clamped.
/// Cody-Waite reduction and a degree-6 polynomial.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the CPU features; no memory is touched.
    unsafe {
        let x = S::max(S::min(x, S::splat(88.0)), S::splat(-87.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::mul(p, S::exp2i(n))
    }
}

/// The portable instantiation.
#[derive(Clone, Copy)]
pub struct Portable;

macro_rules! lanewise {
    ($a:expr, $f:expr) => {{
        let (a, f) = ($a, $f);
        let mut r = [0.0f32; LANES];
        for i in 0..LANES {
            r[i] = f(a[i]);
        }
        r
    }};
    ($a:expr, $b:expr, $f:expr) => {{
        let (a, b, f) = ($a, $b, $f);
        let mut r = [0.0f32; LANES];
        for i in 0..LANES {
            r[i] = f(a[i], b[i]);
        }
        r
    }};
}

// SAFETY: needs no CPU feature; pointer validity is passed on to the callers.
unsafe impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    const TILE: usize = 4;

    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: eight f32 are readable at p.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    unsafe fn load_f16(p: *const f16) -> Self::F {
        // SAFETY: eight f16 are readable at p.
        unsafe { p.cast::<[f16; LANES]>().read_unaligned().map(f16::to_f32) }
    }
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        // SAFETY: eight bf16 are readable at p.
        unsafe { p.cast::<[bf16; LANES]>().read_unaligned().map(bf16::to_f32) }
    }
    unsafe fn load_u8(p: *const u8) -> Self::F {
        // SAFETY: eight bytes are readable at p.
        unsafe { p.cast::<[u8; LANES]>().read().map(f32::from) }
    }
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: eight f32 are writable at p.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    unsafe fn store_f16(p: *mut f16, x: Self::F) {
        // SAFETY: eight f16 are writable at p.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(x.map(f16::from_f32)) }
    }
    unsafe fn store_bf16(p: *mut bf16, x: Self::F) {
        // SAFETY: eight bf16 are writable at p.
        unsafe { p.cast::<[bf16; LANES]>().write_unaligned(x.map(bf16::from_f32)) }
    }
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x + y)
    }
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x - y)
    }
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x * y)
    }
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x, y| x / y)
    }
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut r = c;
        for i in 0..LANES {
            r[i] = a[i].mul_add(b[i], c[i]);
        }
        r
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x > y { x } else { y })
    }
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanewise!(a, b, |x: f32, y: f32| if x < y { x } else { y })
    }
    unsafe fn abs(a: Self::F) -> Self::F {
        lanewise!(a, f32::abs)
    }
    unsafe fn round(a: Self::F) -> Self::F {
        lanewise!(a, f32::round_ties_even)
    }
    unsafe fn exp2i(n: Self::F) -> Self::F {
        lanewise!(n, |x: f32| f32::from_bits(((x as i32 + 127) << 23) as u32))
    }
    unsafe fn sum(a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    unsafe fn max_lane(a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F {
        let mut r = [other; LANES];
        r[low..high].copy_from_slice(&a[low..high]);
        r
    }
    unsafe fn store_i8(p: *mut i8, x: Self::F) {
        // SAFETY: eight bytes are writable at p.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(x.map(|v| v as i8)) }
    }
    unsafe fn to_f32(x: Self::I) -> Self::F {
        x.map(|v| v as f32)
    }
    unsafe fn dot_u4<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 128 weight bytes and 32 activation bytes are readable.
                unsafe {
                    let q = *w.add(byte) as i32;
                    let low = *a.add(vector * 4 + k) as i32;
                    let high = *a.add(16 + vector * 4 + k) as i32;
                    out[t][lane] += (q & 15) * low + (q >> 4) * high;
                }
            }
        }
        out
    }
    unsafe fn dot_u5<const T: usize>(w: *const u8, a: [*const i8; T]) -> [Self::I; T] {
        // SAFETY: 160 weight bytes and 32 bytes of each activation group are readable.
        unsafe {
            let mut out = Self::dot_u4::<T>(w, a);
            for (t, a) in a.into_iter().enumerate() {
                for byte in 0..32 {
                    let bits = *w.add(128 + byte) as i32;
                    for k in (byte % 4..32).step_by(4) {
                        out[t][byte / 4] += (bits >> (k / 4) & 1) * 16 * *a.add(k) as i32;
                    }
                }
            }
            out
        }
    }
    unsafe fn dot_u6<const T: usize>(w: *const u8, a: [*const i8; T], sums: [*const i16; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for t in 0..T {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 208 weight bytes, 32 activation bytes and two sums are readable.
                unsafe {
                    let nibbles = *w.add(byte) as i32;
                    for half in 0..2 {
                        let upper = *w.add(128 + 32 * half + byte % 32) as i32 >> (2 * vector) & 3;
                        let q =
                            (nibbles >> (4 * half) & 15 | upper << 4) * *a[t].add(16 * half + 4 * vector + k) as i32;
                        out[t][lane] += q * *w.add(192 + 2 * lane + half).cast::<i8>() as i32;
                    }
                }
            }
            for i in 0..2 * LANES {
                // SAFETY: as above.
                unsafe { out[t][i / 2] -= 32 * *w.add(192 + i).cast::<i8>() as i32 * *sums[t].add(i % 2) as i32 }
            }
        }
        out
    }
    unsafe fn dot_i8<const T: usize>(w: *const i8, a: [*const i8; T], _: [i16; T]) -> [Self::I; T] {
        let mut out = [[0i32; LANES]; T];
        for (t, a) in a.into_iter().enumerate() {
            for byte in 0..128 {
                let (vector, lane, k) = (byte / 32, byte % 32 / 4, byte % 4);
                // SAFETY: 128 weight bytes and 16 activation bytes are readable.
                unsafe { out[t][lane] += *w.add(byte) as i32 * *a.add(vector * 4 + k) as i32 }
            }
        }
        out
    }
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        let mut r = a;
        for i in 0..LANES {
            r[i] += b[i];
        }
        r
    }
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES] {
        std::array::from_fn(|c| std::array::from_fn(|r| rows[r][c]))
    }
}
