//! Which instruction set the kernels run with, found once at start.

/// An instantiation of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// AVX2, FMA and F16C. Made only by [`Isa::available`], so that holding it proves the CPU has them.
    Avx2(Proof),
    /// AVX2's with AVX-512 F, BW, VL and VNNI. Made only by [`Isa::available`] too.
    Vnni(Proof),
    /// VNNI's with AMX's tiles of bytes, which this process may use. Made only by [`Isa::available`] too.
    Amx(Proof),
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

    /// All this CPU has, the best first, [`Isa::Portable`] last. Asks the kernel for AMX, for all threads of this process.
    pub fn available() -> Vec<Isa> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there is no other"))]
        let mut found = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            found.insert(0, Isa::Avx2(Proof(())));
            let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            if wide && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512vnni") {
                found.insert(0, Isa::Vnni(Proof(())));
                if tiles_permitted() {
                    found.insert(0, Isa::Amx(Proof(())));
                }
            }
        }
        found
    }

    /// [`Isa::available`], and AMX where the CPU has all of it but the tiles: those are emulated from now on (`cpu/emulated.rs`).
    #[cfg(feature = "testing")]
    pub fn testable() -> Vec<Isa> {
        let mut found = Isa::available();
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if matches!(found[0], Isa::Vnni(_)) {
            super::emulated::install();
            found.insert(0, Isa::Amx(Proof(())));
        }
        found
    }

    /// For logs and `--help`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx2(_) => "avx2",
            Isa::Vnni(_) => "avx512-vnni",
            Isa::Amx(_) => "amx",
            Isa::Portable => "portable",
        }
    }
}

/// Whether the CPU has AMX with bytes, and the kernel lets this process use it. Linux does not save tiles for a process that has not asked.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    // Leaf 7 is there where AVX-512 is. Bit 24 is AMX-TILE, bit 25 AMX-INT8.
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    if features >> 24 & 3 != 3 {
        return false;
    }
    let result: isize;
    // SAFETY: arch_prctl with this code takes a number, and touches no memory of ours; the call clobbers rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL as isize => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_permitted() -> bool {
    false
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
                // SAFETY: these are made only after the CPU was found to have the features.
                #[cfg(target_arch = "x86_64")]
                crate::cpu::isa::Isa::Vnni(_) | crate::cpu::isa::Isa::Amx(_) => unsafe { with_vnni($($arg),*) },
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
