//! What is done with a group's dot products, whatever made them: scales, minima, and the way of the sums from chunk to chunk and out.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::packing::SUPER;
use super::super::simd::LANES;
use super::super::tiles::Operands;
use super::{Columns, HALVES, Head, MINIMUM, Unpacked, Vector};

/// Of each row of a tile, a float for each output of the strip.
pub type Sums<const T: usize> = [[__m512; 2]; T];

/// A tile's first row, and a group of it.
#[derive(Clone, Copy)]
pub struct At {
    pub row: usize,
    pub group: usize,
    /// Groups of a whole row.
    pub all: usize,
}

impl At {
    /// The group of row `t` of the tile, among those of all rows.
    #[inline(always)]
    pub fn group_of(self, t: usize) -> usize {
        (self.row + t) * self.all + self.group
    }
}

/// Adds a group's dot products, scaled, and its minimum.
///
/// # Safety
/// The group and the rows of the operands are readable, and the CPU has AVX-512.
#[inline(always)]
pub unsafe fn add_scaled<const T: usize, const KIND: u8>(
    acc: &mut Sums<T>,
    dots: Sums<T>,
    w: *const Unpacked,
    x: &Operands,
    at: At,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let factor = |i: usize| [(*w).factors[i][0].floats(), (*w).factors[i][1].floats()];
        let (scale, min) = (factor(0), factor(1));
        for t in 0..T {
            let of_row = _mm512_set1_ps(*x.scale.add(at.group_of(t)));
            for v in 0..2 {
                acc[t][v] = _mm512_fmadd_ps(dots[t][v], _mm512_mul_ps(scale[v], of_row), acc[t][v]);
            }
            if KIND == MINIMUM {
                let sum = _mm512_set1_ps(*x.minus_sum.add(at.group_of(t)));
                for v in 0..2 {
                    acc[t][v] = _mm512_fmadd_ps(min[v], sum, acc[t][v]);
                }
            }
        }
    }
}

/// Adds products of 16 bits, by twos, to sums: one instruction, of which compilers make two.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_pairs(mut sums: __m512i, x: __m512i, y: __m512i) -> __m512i {
    // SAFETY: an instruction that the CPU has, of registers alone.
    unsafe {
        asm!(
            "vpdpwssd {sums}, {x}, {y}",
            sums = inout(zmm_reg) sums, x = in(zmm_reg) x, y = in(zmm_reg) y,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds a super-block's sums of dot products times small scales, scaled, and its minima.
///
/// # Safety
/// The head and the rows of the operands are readable, and the CPU has AVX-512 with VNNI.
#[inline(always)]
pub unsafe fn add_super<const T: usize, const KIND: u8>(
    acc: &mut Sums<T>,
    sums: Sums<T>,
    head: *const Head,
    x: &Operands,
    at: At,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for t in 0..T {
            let scale = _mm512_set1_ps(*x.scale.add(at.group_of(t) / SUPER));
            let mut minima = [_mm512_setzero_si512(); 2];
            if KIND != HALVES {
                let minus = x.minus.add(at.group_of(t)).cast::<i32>();
                for pair in 0..SUPER / 2 {
                    let by = _mm512_set1_epi32(minus.add(pair).read_unaligned());
                    for v in 0..2 {
                        minima[v] = add_pairs(minima[v], (*head).minima[pair][v].integers(), by);
                    }
                }
            }
            for v in 0..2 {
                let mut sum = _mm512_mul_ps(sums[t][v], (*head).scales[0][v].floats());
                if KIND != HALVES {
                    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(minima[v]), (*head).scales[1][v].floats(), sum);
                }
                acc[t][v] = _mm512_fmadd_ps(sum, scale, acc[t][v]);
            }
        }
    }
}

/// The sums that a tile has before group `group`.
///
/// # Safety
/// `kept` has the tile's rows, and the CPU AVX-512.
#[inline(always)]
pub unsafe fn begin<const T: usize>(kept: *const [Vector; 2], group: usize) -> Sums<T> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; T];
        if group > 0 {
            for t in 0..T {
                acc[t] = [(*kept.add(t))[0].floats(), (*kept.add(t))[1].floats()];
            }
        }
        acc
    }
}

/// Keeps the sums of a tile, or writes them to their columns of the output from row `row` on. A tile at a time: these stores miss the
/// cache, and the next tile hides it.
///
/// # Safety
/// `kept` has the tile's rows; the columns of the output belong to this strip alone, and a bias has all; the CPU has AVX-512.
#[inline(always)]
pub unsafe fn end<const T: usize>(
    acc: Sums<T>,
    kept: *mut [Vector; 2],
    x: &Operands,
    row: usize,
    columns: Option<Columns>,
) {
    // SAFETY: the caller's promise. No element outside a mask is touched.
    unsafe {
        let Some(columns) = columns else {
            for t in 0..T {
                *kept.add(t) = [Vector::of(acc[t][0]), Vector::of(acc[t][1])];
            }
            return;
        };
        for v in 0..2 {
            let first = columns.first + v * 2 * LANES;
            let mask = ((1u32 << columns.end.saturating_sub(first).min(2 * LANES)) - 1) as __mmask16;
            let bias = x.bias.map(|bias| _mm512_maskz_loadu_ps(mask, bias.wrapping_add(first)));
            for t in 0..T {
                let sum = match bias {
                    Some(bias) => _mm512_add_ps(acc[t][v], bias),
                    None => acc[t][v],
                };
                _mm512_mask_storeu_ps(x.out.wrapping_add((row + t) * columns.all + first), mask, sum);
            }
        }
    }
}
