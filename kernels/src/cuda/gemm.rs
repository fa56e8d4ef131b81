//! A matrix product as a device is asked for it.

use super::handles::Piece;

/// How a device multiplies matrices of E4M3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fp8 {
    /// Not at all.
    #[default]
    None,
    /// As they are; scales are a kernel's work afterwards.
    Plain,
    /// With the scales of their rows.
    Scaled,
}

/// Products with one weight, of all that lies together in a call, whose rows have the same bits: all those of the same value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alike {
    /// Whatever the number of their rows (I1).
    Always,
    /// Those of few rows: up to so many.
    UpTo(u32),
    /// Those of more.
    Many,
}

/// Bounds of few rows: a weight's bytes, tiles of outputs or the work itself are what takes time.
const FEW: [u32; 3] = [16, 64, 256];

impl Alike {
    /// The value of a product of so many rows that need not have the bits of one of any number.
    pub fn by_rows(rows: usize) -> Self {
        let few = FEW.into_iter().find(|&few| rows <= few as usize);
        few.map_or(Alike::Many, Alike::UpTo)
    }

    /// Rows for which they are done best.
    pub fn typical(self) -> u64 {
        match self {
            Alike::Always => 64,
            Alike::UpTo(rows) => u64::from(rows),
            Alike::Many => 4096,
        }
    }

    /// Rows by which an algorithm shows that it takes them all: small and odd ones, the bounds, and large ones; ascending.
    pub fn samples(self) -> &'static [u64] {
        match self {
            Alike::Always => &[1, 7, 16, 64, 255, 2048, 8192, 16_384],
            Alike::UpTo(16) => &[1, 7, 16],
            Alike::UpTo(64) => &[17, 40, 64],
            Alike::UpTo(_) => &[65, 96, 255, 256],
            Alike::Many => &[257, 1021, 4096, 8192, 16_384],
        }
    }
}

/// Of what type both operands of a product are.
#[derive(Clone, Copy, Debug)]
pub enum Operands<'a> {
    /// bf16.
    Bf16,
    /// E4M3, on a device that can ([`Fp8`]), with scales if it is one that applies them. Outputs and inputs are multiples of
    /// 16, and there is no bias.
    E4m3(Option<RowScales<'a>>),
}

/// What an output is multiplied with: its weight row's scale and its input row's.
#[derive(Clone, Copy, Debug)]
pub struct RowScales<'a> {
    /// `[outs]` f32.
    pub weight: Piece<'a>,
    /// `[rows]` f32.
    pub x: Piece<'a>,
}

/// Outputs and inputs of a product of E4M3 are multiples of this.
pub const FP8_MULTIPLE: usize = 16;

/// `out[r] = weight · x[r] (+ bias)`, summed in f32.
#[derive(Clone, Copy)]
pub struct Gemm<'a> {
    /// What the operands are.
    pub operands: Operands<'a>,
    /// `[outs, cols]`.
    pub weight: Piece<'a>,
    /// `[rows, cols]`.
    pub x: Piece<'a>,
    /// `[outs]` f32.
    pub bias: Option<Piece<'a>>,
    /// `[rows, outs]` f32, of which each row begins `stride` behind the one before.
    pub out: Piece<'a>,
    /// f32 from one row of `out` to the next, at least `outs`.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Outputs.
    pub outs: usize,
    /// Inputs.
    pub cols: usize,
    /// Whose bits its rows have.
    pub alike: Alike,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_alike_are_those_between_two_bounds_and_are_tried_there() {
        let kinds = [1, 16, 17, 64, 65, 256, 257, 1 << 20].map(Alike::by_rows);
        let few = |rows| [Alike::UpTo(rows); 2];
        assert_eq!(kinds, [few(16), few(64), few(256), [Alike::Many; 2]].as_flattened());
        for kind in kinds {
            assert_eq!(Alike::by_rows(kind.typical() as usize), kind);
            assert!(kind.samples().iter().all(|&rows| Alike::by_rows(rows as usize) == kind), "{kind:?}");
        }
        assert!(
            kinds.iter().all(|kind| Alike::Always.samples().iter().any(|&rows| Alike::by_rows(rows as usize) == *kind))
        );
    }
}
