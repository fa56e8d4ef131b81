//! The portable instantiation of [`Simd`]: what the others are compared with, and what runs where they cannot.

use half::{bf16, f16};

use super::simd::{Floats, LANES, Simd, Twice};

/// Plain Rust.
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
unsafe impl Floats for Portable {
    type F = [f32; LANES];
    const COUNT: usize = LANES;

    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: eight f32 are readable at p.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: eight f32 are writable at p.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
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
    unsafe fn round(a: Self::F) -> Self::F {
        lanewise!(a, f32::round_ties_even)
    }
    unsafe fn exp2i(n: Self::F) -> Self::F {
        lanewise!(n, |x: f32| f32::from_bits(((x as i32 + 127) << 23) as u32))
    }
    unsafe fn any_larger(a: Self::F, b: Self::F) -> bool {
        a.into_iter().zip(b).any(|(x, y)| x > y)
    }
    unsafe fn select_range(a: Self::F, low: usize, high: usize, other: f32) -> Self::F {
        let mut r = [other; LANES];
        r[low..high].copy_from_slice(&a[low..high]);
        r
    }
}

// SAFETY: as above.
unsafe impl Simd for Portable {
    type Wide = Twice<Portable>;
    const REGISTERS: usize = 16;

    unsafe fn join(low: Self::F, high: Self::F) -> [Self::F; 2] {
        [low, high]
    }
    unsafe fn split(x: [Self::F; 2]) -> [Self::F; 2] {
        x
    }
    unsafe fn load_f16(p: *const f16) -> Self::F {
        // SAFETY: eight f16 are readable at p.
        unsafe { p.cast::<[f16; LANES]>().read_unaligned().map(f16::to_f32) }
    }
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        // SAFETY: eight bf16 are readable at p.
        unsafe { p.cast::<[bf16; LANES]>().read_unaligned().map(bf16::to_f32) }
    }
    unsafe fn store_f16(p: *mut f16, x: Self::F) {
        // SAFETY: eight f16 are writable at p.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(x.map(f16::from_f32)) }
    }
    unsafe fn store_bf16(p: *mut bf16, x: Self::F) {
        // SAFETY: eight bf16 are writable at p.
        unsafe { p.cast::<[bf16; LANES]>().write_unaligned(x.map(bf16::from_f32)) }
    }
    unsafe fn abs(a: Self::F) -> Self::F {
        lanewise!(a, f32::abs)
    }
    unsafe fn sum(a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    unsafe fn max_lane(a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    unsafe fn store_i8(p: *mut i8, x: Self::F) {
        // SAFETY: eight bytes are writable at p.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(x.map(|v| v as i8)) }
    }
    unsafe fn store_group_i8(p: *mut i8, x: [Self::F; 4]) {
        // SAFETY: 32 bytes are writable at p.
        unsafe { p.cast::<[[i8; LANES]; 4]>().write_unaligned(x.map(|v| v.map(|v| v as i8))) }
    }
    unsafe fn transpose(rows: [Self::F; LANES]) -> [Self::F; LANES] {
        std::array::from_fn(|c| std::array::from_fn(|r| rows[r][c]))
    }
    unsafe fn transpose_16(rows: *const u8, apart: usize, out: *mut u16) {
        for s in 0..2 * LANES {
            // SAFETY: eight elements are readable at each row, 128 are writable at out.
            unsafe {
                let row = rows.add(s * apart).cast::<[u16; LANES]>().read_unaligned();
                for (d, x) in row.into_iter().enumerate() {
                    out.add(d * 2 * LANES + s).write_unaligned(x);
                }
            }
        }
    }
}
