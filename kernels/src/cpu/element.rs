//! Float types of weights and KV rows: how eight of them become f32 lanes, and back.

use half::{bf16, f16};

use super::simd::{Floats, Simd, Wide, prefetch};

/// An element type that loads as eight f32 lanes.
pub trait Element: Copy {
    /// Loads eight elements.
    ///
    /// # Safety
    /// Eight elements are readable at `p`, and the CPU has `S`'s features.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Loads sixteen elements.
    ///
    /// # Safety
    /// Sixteen elements are readable at `p`, and the CPU has `S`'s features.
    unsafe fn load_wide<S: Simd>(p: *const Self) -> Wide<S>;
    /// Asks for a line, 64 bytes, of rows that are used where they lie. Others are asked for elsewhere.
    #[inline(always)]
    fn ask(rows: *const u8, line: usize) {
        if size_of::<Self>() == 2 {
            prefetch(rows.wrapping_add(64 * line));
        }
    }
    /// Stores eight elements, rounded to nearest.
    ///
    /// # Safety
    /// Eight elements are writable at `p`, and the CPU has `S`'s features.
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F);
}

macro_rules! element {
    ($ty:ty, $load:ident, $load_wide:path, $store:ident) => {
        impl Element for $ty {
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::F {
                // SAFETY: the caller's promise.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn load_wide<S: Simd>(p: *const Self) -> Wide<S> {
                // SAFETY: the caller's promise.
                unsafe { $load_wide(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
                // SAFETY: the caller's promise.
                unsafe { S::$store(p, x) }
            }
        }
    };
}
element!(f32, load, S::Wide::load, store);
element!(f16, load_f16, S::wide_f16, store_f16);
element!(bf16, load_bf16, S::wide_bf16, store_bf16);
