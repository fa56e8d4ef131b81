//! What this machine can do at most, measured: the figures a benchmark divides by.
//!
//! Loops that do nothing but one thing, from registers or over more memory than caches hold, on as many threads as the kernels
//! use. They share the kernels' threads and dispatch, so that what is measured is what the kernels could reach.

use std::hint::black_box;
use std::time::Instant;

use super::CpuOptions;
use super::isa::{Isa, dispatch};
use super::simd::{Floats, LANES, Simd};
use super::threads::Threads;
use crate::KernelError;
use crate::pages::Arena;

/// The best rates of all threads together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ceilings {
    /// Bytes a second read from memory.
    pub read: f64,
    /// f32 multiplications and additions a second, by fused multiply-add.
    pub f32: f64,
    /// 8-bit multiplications and additions a second, by the instruction set's dot products.
    pub int8: f64,
}

/// Rounds of each measurement; the best counts, because everything else on the machine only slows down.
const ROUNDS: usize = 5;
/// Shortest round worth timing.
const LONG_ENOUGH: f64 = 0.03;
/// f32 read in a round: well beyond any cache.
const READ: usize = 64 << 20;
/// f32 a task reads: small enough to balance.
const PIECE: usize = 64 << 10;
/// Independent chains: enough to hide the latency of an instruction, few enough for 16 registers.
const CHAINS: usize = 12;
/// Most lanes of a register.
const WIDEST: usize = 2 * LANES;

impl Ceilings {
    /// Measures; takes about a second.
    pub fn measure(options: CpuOptions) -> Result<Ceilings, KernelError> {
        let mut threads = Threads::new(options.threads.max(1), options.pinned)?;
        // Lanes of 32 bits of a register.
        let lanes = if matches!(options.isa, Isa::Vnni(_) | Isa::Amx(_)) { WIDEST } else { LANES };
        let int8 = match options.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(_) => super::strips::CHAINS_WORK,
            _ => CHAINS * lanes * 8,
        };
        Ok(Ceilings {
            read: read(&mut threads, options.isa)?,
            // SAFETY: no memory is touched.
            f32: rate(&mut threads, (CHAINS * lanes * 2) as f64, &|steps| unsafe { fma_chains(options.isa, steps) }),
            int8: rate(&mut threads, int8 as f64, &|steps| int8_chains(options.isa, steps)),
        })
    }
}

/// Reads memory of the kind that weights lie in.
fn read(threads: &mut Threads, isa: Isa) -> Result<f64, KernelError> {
    let mut memory = Arena::default().zeroed(READ * size_of::<f32>())?;
    // Pages that were never written would all be the same one.
    memory.fill(1);
    let mut best = 0.0f64;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        threads.run(READ / PIECE, &|i| {
            let piece = &memory[i * PIECE * size_of::<f32>()..][..PIECE * size_of::<f32>()];
            // SAFETY: the piece has `PIECE` elements, a multiple of what a step reads; any bits are a float.
            black_box(unsafe { sum(isa, piece.as_ptr().cast(), PIECE) });
        });
        best = best.max((READ * 4) as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Work a second when each thread does `steps` steps of `work` each, with as many steps as a round needs.
fn rate(threads: &mut Threads, work: f64, run: &(dyn Fn(usize) -> f32 + Sync)) -> f64 {
    let count = threads.count();
    let mut round = |steps: usize| {
        let started = Instant::now();
        threads.run(count, &|_| {
            black_box(run(black_box(steps)));
        });
        started.elapsed().as_secs_f64()
    };
    let mut steps = 1 << 10;
    while round(steps) < LONG_ENOUGH {
        steps *= 2;
    }
    let best = (0..ROUNDS).map(|_| round(steps)).fold(f64::INFINITY, f64::min);
    work * (steps * count) as f64 / best
}

#[inline(always)]
unsafe fn sum_kernel<S: Simd>(_: S, p: *const f32, count: usize) -> f32 {
    // SAFETY: `count` elements are readable, a multiple of 64.
    unsafe {
        let mut acc = [S::splat(0.0); 8];
        for i in (0..count).step_by(8 * LANES) {
            for j in 0..8 {
                acc[j] = S::add(acc[j], S::load(p.add(i + j * LANES)));
            }
        }
        acc.into_iter().fold(0.0, |total, a| total + S::sum(a))
    }
}

dispatch! {
    /// Sum of `count` elements, a multiple of 64.
    ///
    /// # Safety
    /// `p` is readable for `count` elements.
    unsafe fn sum(p: *const f32, count: usize) -> f32 = sum_kernel
}

#[inline(always)]
unsafe fn fma_vectors<L: Floats>(steps: usize) -> f32 {
    // SAFETY: no memory but `lanes` is touched, which has room for a vector.
    unsafe {
        let (a, b) = (L::splat(black_box(0.5)), L::splat(black_box(0.25)));
        let mut acc = [b; CHAINS];
        for _ in 0..steps {
            for acc in &mut acc {
                *acc = L::fma(*acc, a, b);
            }
        }
        let mut total = b;
        for acc in acc {
            total = L::add(total, acc);
        }
        let mut lanes = [0.0; WIDEST];
        L::store(lanes.as_mut_ptr(), total);
        lanes[0]
    }
}

#[inline(always)]
unsafe fn fma_kernel<S: Simd>(_: S, steps: usize) -> f32 {
    // SAFETY: as above.
    unsafe { if S::REGISTERS >= 32 { fma_vectors::<S::Wide>(steps) } else { fma_vectors::<S>(steps) } }
}

dispatch! {
    /// `steps` times one fused multiply-add on each of the chains.
    ///
    /// # Safety
    /// None beyond the dispatch's.
    unsafe fn fma_chains(steps: usize) -> f32 = fma_kernel
}

/// `steps` times the products and sums of a vector of bytes on each of the chains.
fn int8_chains(isa: Isa, steps: usize) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Vnni` is made only after the CPU was found to have the features.
        Isa::Vnni(_) => unsafe { int8_vnni(steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Amx` is made only after the process was permitted to use it.
        Isa::Amx(_) => unsafe { super::strips::chains(steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        Isa::Avx2(_) => unsafe { int8_avx2(steps) },
        // Elsewhere there is no other.
        _ => int8_portable(steps),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn int8_avx2(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    let (x, y) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi16(black_box(1)));
    let mut acc = [y; CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm256_add_epi16(_mm256_maddubs_epi16(*acc, x), y);
        }
    }
    let total = acc.into_iter().fold(y, |total, a| _mm256_add_epi16(total, a));
    _mm256_extract_epi16::<0>(total) as f32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn int8_vnni(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    let (x, y) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(1)));
    let mut acc = [x; CHAINS];
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_dpbusd_epi32(*acc, x, y);
        }
    }
    let total = acc.into_iter().fold(x, |total, a| _mm512_add_epi32(total, a));
    _mm512_reduce_add_epi32(total) as f32
}

fn int8_portable(steps: usize) -> f32 {
    let x = black_box(3i16);
    let mut acc = [[1i16; 16]; CHAINS];
    for _ in 0..steps {
        for lane in acc.iter_mut().flatten() {
            let (low, high) = (*lane & 0xff, *lane >> 8);
            *lane = low.wrapping_mul(x).wrapping_add(high.wrapping_mul(x)).wrapping_add(1);
        }
    }
    acc.iter().flatten().fold(0i16, |total, lane| total.wrapping_add(*lane)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ceiling_is_a_rate_with_any_instruction_set() {
        for isa in [Isa::detect(), Isa::Portable] {
            let found = Ceilings::measure(CpuOptions { threads: 2, isa, pinned: false }).unwrap();
            for rate in [found.read, found.f32, found.int8] {
                assert!(rate.is_finite() && rate > 1e6, "{found:?}");
            }
        }
    }
}
