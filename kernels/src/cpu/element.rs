//! Float types of weights and KV rows: how eight of them become f32 lanes, and back.

use half::{bf16, f16};

use super::simd::Simd;

/// An element type that loads as eight f32 lanes.
pub trait Element: Copy {
    /// Loads eight elements.
    ///
    /// # Safety
    /// Eight elements are readable at `p`, and the CPU has `S`'s features.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Stores eight elements, rounded to nearest.
    ///
    /// # Safety
    /// Eight elements are writable at `p`, and the CPU has `S`'s features.
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F);
}

macro_rules! element {
    ($ty:ty, $load:ident, $store:ident) => {
        impl Element for $ty {
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::F {
                // SAFETY: the caller's promise.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
                // SAFETY: the caller's promise.
                unsafe { S::$store(p, x) }
            }
        }
    };
}
element!(f32, load, store);
element!(f16, load_f16, store_f16);
element!(bf16, load_bf16, store_bf16);
