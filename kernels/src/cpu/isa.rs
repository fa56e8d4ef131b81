//! Which instruction set the kernels run with, found once at start.

/// An instantiation of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// AVX2, FMA and F16C. Made only by [`Isa::available`], so that holding it proves the CPU has them.
    Avx2(Proof),
    /// AVX2's with AVX-512 F, BW, VL and VNNI. Made only by [`Isa::available`] too.
    Vnni(Proof),
    /// Plain Rust.
    Portable,
}

/// Proof that the CPU's features were checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof(());

impl Isa {
    /// The best this CPU has.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All this CPU has, the best first, [`Isa::Portable`] last.
    pub fn available() -> Vec<Isa> {
        let mut found = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            found.insert(0, Isa::Avx2(Proof(())));
            let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            if wide && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512vnni") {
                found.insert(0, Isa::Vnni(Proof(())));
            }
        }
        found
    }

    /// For logs and `--help`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx2(_) => "avx2",
            Isa::Vnni(_) => "avx512-vnni",
            Isa::Portable => "portable",
        }
    }
}

/// Defines a safe-to-dispatch function over the generic kernel of the same name: `kernel!(fn name(args) = path::<S>)`.
/// The AVX2 and VNNI copies are compiled with the features on, so the generic code inlines into them.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? = $kernel:path) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn with_avx2($($arg: $ty),*) $(-> $out)? {
                use crate::cpu::avx2::Avx2 as Set;
                // SAFETY: the features are enabled for this function; the rest is the caller's promise.
                unsafe { $kernel(Set, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn with_vnni($($arg: $ty),*) $(-> $out)? {
                use crate::cpu::avx512::Vnni as Set;
                // SAFETY: as for AVX2.
                unsafe { $kernel(Set, $($arg),*) }
            }
            match isa {
                // SAFETY: `Isa::Vnni` is made only after the CPU was found to have the features.
                #[cfg(target_arch = "x86_64")]
                crate::cpu::isa::Isa::Vnni(_) => unsafe { with_vnni($($arg),*) },
                // SAFETY: `Isa::Avx2` is made only after the CPU was found to have the features.
                #[cfg(target_arch = "x86_64")]
                crate::cpu::isa::Isa::Avx2(_) => unsafe { with_avx2($($arg),*) },
                // SAFETY: the caller's promise.
                _ => unsafe { $kernel(crate::cpu::portable::Portable, $($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;
