//! Which instruction set the kernels run with, found once at start.

/// An instantiation of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// AVX2, FMA and F16C. Made only by [`Isa::detect`], so that holding it proves the CPU has them.
    Avx2(Proof),
    /// Plain Rust.
    Portable,
}

/// Proof that the CPU's features were checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof(());

impl Isa {
    /// The best this CPU has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Isa::Avx2(Proof(()));
        }
        Isa::Portable
    }

    /// For logs and `--help`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx2(_) => "avx2",
            Isa::Portable => "portable",
        }
    }
}

/// Defines a safe-to-dispatch function over the generic kernel of the same name: `kernel!(fn name(args) = path::<S>)`.
/// The AVX2 copy is compiled with the features on, so the generic code inlines into it.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $kernel:path) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: crate::cpu::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn with_avx2($($arg: $ty),*) {
                use crate::cpu::simd::Avx2 as Set;
                // SAFETY: the features are enabled for this function; the rest is the caller's promise.
                unsafe { $kernel(Set, $($arg),*) }
            }
            match isa {
                // SAFETY: `Isa::Avx2` is made only after the CPU was found to have the features.
                #[cfg(target_arch = "x86_64")]
                crate::cpu::isa::Isa::Avx2(_) => unsafe { with_avx2($($arg),*) },
                // SAFETY: the caller's promise.
                _ => unsafe { $kernel(crate::cpu::simd::Portable, $($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;
