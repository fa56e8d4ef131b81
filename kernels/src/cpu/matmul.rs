//! Matrix products: `out[t][o] = Σ_k x[t][k] · w[o][k] (+ bias[o])`.
//!
//! One kernel serves one row (decode) and many (prefill): which rows and panels make a tile changes no bit of an output (I1).
//!
//! Bytes moved: the packed weights once per call, from memory; activations and outputs from cache. Bound: memory bandwidth
//! for few rows; for many, the dot products of [`super::tiles`] and [`super::strips`].

use half::{bf16, f16};

use super::dots::{Dots, Outputs, Panels};
use super::isa::{Isa, dispatch};
use super::packing::Form;
use super::simd::{Floats, LANES};
#[cfg(target_arch = "x86_64")]
use super::strips;
use super::tiles::{At, Dense, I8, Next, Operands, Plain, Super, Tile, U6Super};
use super::weight::CpuWeight;

/// Rows of a dense product computed together: as many as keep weights and accumulators in 16 registers.
const DENSE_TILE: usize = 8;

/// Stores a tile's columns from `column` on, without the padding of the last panel.
#[inline(always)]
unsafe fn store_tile<S: Dots, const T: usize>(acc: [Outputs<S>; T], x: &Operands, row: usize, columns: Columns) {
    // SAFETY: these columns of output rows `row..row + T` belong to these panels alone; a bias has all columns.
    unsafe {
        for (t, acc) in acc.into_iter().enumerate() {
            let out = x.out.add((row + t) * columns.all + columns.first);
            if columns.count == S::Outputs::COUNT {
                let sum = match x.bias {
                    Some(bias) => S::Outputs::add(acc, S::Outputs::load(bias.add(columns.first))),
                    None => acc,
                };
                S::Outputs::store(out, sum);
                continue;
            }
            let mut lanes = [0.0f32; 2 * LANES];
            S::Outputs::store(lanes.as_mut_ptr(), acc);
            for (i, lane) in lanes[..columns.count].iter().enumerate() {
                *out.add(i) = x.bias.map_or(*lane, |bias| *lane + *bias.add(columns.first + i));
            }
        }
    }
}

/// Columns of the output that a tile makes.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    count: usize,
    /// Of the whole output.
    all: usize,
}

/// Most panels that are taken side by side.
pub const SIDE_BY_SIDE: usize = 4;
/// Bytes of panels that are taken together when rows are few: they stay in the second-level cache.
const TOGETHER: usize = 128 << 10;
/// Most rows that count as few.
const FEW: usize = 64;

/// Panels `first..last` times all rows. With few rows a tile goes over several panels before the next one does: output rows can be a
/// multiple of a cache's size apart, and more of them written in turn than a cache has ways would push each other out.
#[inline(always)]
unsafe fn panel_rows<S: Dots, K: Tile<S>>(w: &CpuWeight, x: &Operands, first: usize, last: usize, tile: usize) {
    let bytes = w.panel_bytes();
    let together = if x.rows <= FEW { (TOGETHER / bytes.max(1)).max(1) } else { 1 }.next_multiple_of(S::PANELS);
    for start in (first..last).step_by(together) {
        let end = last.min(start + together);
        let mut row = 0;
        while row < x.rows {
            macro_rules! tile {
                ($t:literal) => {{
                    for p in (start..end).step_by(S::PANELS) {
                        let side_by_side = S::PANELS.min(end - p);
                        let column = p * LANES;
                        let count = (side_by_side * LANES).min(w.rows - column);
                        // SAFETY: the caller's promise; the panels are inside the weight, the rows inside the operands.
                        unsafe {
                            let panel = w.data.as_ptr().add(p * bytes);
                            let panels = Panels { first: panel, apart: (side_by_side - 1) * bytes };
                            // Rows that come later find the panels in the cache.
                            let after = w.data.as_ptr().wrapping_add((p + S::PANELS) * bytes);
                            let next = if row == 0 { Next::at(after) } else { Next::NONE };
                            let acc = K::tile::<$t>(panels, x, At { row, cols: w.cols }, next);
                            store_tile::<S, $t>(acc, x, row, Columns { first: column, count, all: w.rows });
                        }
                    }
                    row += $t;
                }};
            }
            match (x.rows - row).min(tile) {
                8.. => tile!(8),
                4..8 => tile!(4),
                2..4 => tile!(2),
                _ => tile!(1),
            }
        }
    }
}

#[inline(always)]
unsafe fn panels_kernel<S: Dots>(_: S, w: &CpuWeight, x: &Operands, first: usize, last: usize) {
    // Rows taken together: sums of integers and of floats fill half the registers, weights and scales need the rest.
    let tile = S::REGISTERS / 4;
    // SAFETY: the caller's promise.
    unsafe {
        match w.form {
            Form::U4 => panel_rows::<S, Plain<4>>(w, x, first, last, tile),
            Form::U5 => panel_rows::<S, Plain<5>>(w, x, first, last, tile),
            Form::I8 => panel_rows::<S, I8>(w, x, first, last, tile),
            Form::U4Super => panel_rows::<S, Super<4>>(w, x, first, last, tile),
            Form::U5Super => panel_rows::<S, Super<5>>(w, x, first, last, tile),
            Form::U6Super => panel_rows::<S, U6Super>(w, x, first, last, tile),
            Form::F32 => panel_rows::<S, Dense<f32>>(w, x, first, last, DENSE_TILE),
            Form::F16 => panel_rows::<S, Dense<f16>>(w, x, first, last, DENSE_TILE),
            Form::Bf16 => panel_rows::<S, Dense<bf16>>(w, x, first, last, DENSE_TILE),
        }
    }
}

dispatch! {
    /// Panels `first..last` of the product, few rows at a time.
    ///
    /// # Safety
    /// As for [`panels`].
    unsafe fn tiled(w: &CpuWeight, x: &Operands, first: usize, last: usize) = panels_kernel
}

/// Panels `first..last` of the product.
///
/// # Safety
/// The operands hold `rows` rows of `w.cols` inputs (rounded ones for quantised weights) and room for
/// `rows · w.rows` outputs; no other thread touches these panels' columns.
pub unsafe fn panels(isa: Isa, w: &CpuWeight, x: &Operands, first: usize, last: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(with) = strips::With::of(isa, w.form, x.rows) {
        // SAFETY: the caller's promise; `With` says what the CPU has.
        return unsafe { strips::panels(with, w, x, first, last) };
    }
    // SAFETY: the caller's promise.
    unsafe { tiled(isa, w, x, first, last) }
}
