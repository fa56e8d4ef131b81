//! [`Gemm`]: the description of a matrix product that a device is asked for.

use super::handles::Piece;

/// How a device multiplies matrices of E4M3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fp8 {
    /// Not at all.
    #[default]
    None,
    /// Without scales; a kernel of ours applies the scales afterwards.
    Plain,
    /// With scales for the rows of both operands.
    Scaled,
}

/// Which products give equal bits for equal rows: all products with the same weight and the same value of this type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alike {
    /// Products of any number of rows (I1).
    Always,
    /// Products of few rows: more than the next smaller bound, up to this many.
    UpTo(u32),
    /// Products of more rows than the largest bound.
    Many,
}

/// Bounds of few rows. In these ranges the time goes to different things: a weight's bytes, tiles of outputs, the arithmetic itself.
const FEW: [u32; 3] = [16, 64, 256];

impl Alike {
    /// The value for a product of `rows` rows that need not agree with products of other numbers of rows.
    pub fn by_rows(rows: usize) -> Self {
        let few = FEW.into_iter().find(|&few| rows <= few as usize);
        few.map_or(Alike::Many, Alike::UpTo)
    }

    /// Number of rows that the algorithm is optimised for.
    pub fn typical(self) -> u64 {
        match self {
            Alike::Always => 64,
            Alike::UpTo(rows) => u64::from(rows),
            Alike::Many => 4096,
        }
    }

    /// Numbers of rows that an algorithm is tried with: if it takes these, it is assumed to take all. They are small and odd ones, the
    /// bounds, and large ones; ascending.
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

/// Type of both operands of a product.
#[derive(Clone, Copy, Debug)]
pub enum Operands<'a> {
    /// bf16.
    Bf16,
    /// E4M3, on a device that supports it ([`Fp8`]), with scales if the device applies them. The numbers of outputs and inputs are
    /// multiples of 16, and there is no bias.
    E4m3(Option<RowScales<'a>>),
}

/// Scales of the operands' rows. An output is multiplied with its weight row's scale and its input row's scale.
#[derive(Clone, Copy, Debug)]
pub struct RowScales<'a> {
    /// `[outs]` f32.
    pub weight: Piece<'a>,
    /// `[rows]` f32.
    pub x: Piece<'a>,
}

/// The numbers of outputs and inputs of a product of E4M3 are multiples of this.
pub const FP8_MULTIPLE: usize = 16;

/// `out[r] = weight · x[r] (+ bias)`, summed in f32.
#[derive(Clone, Copy)]
pub struct Gemm<'a> {
    /// Type of the operands, and their scales.
    pub operands: Operands<'a>,
    /// The weight, `[outs, cols]`.
    pub weight: Piece<'a>,
    /// The input rows, `[rows, cols]`.
    pub x: Piece<'a>,
    /// The bias, `[outs]` f32.
    pub bias: Option<Piece<'a>>,
    /// The results, `[rows, outs]` f32. Each row begins `stride` f32 after the one before.
    pub out: Piece<'a>,
    /// f32 from the start of one row of `out` to the next, at least `outs`.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of outputs.
    pub outs: usize,
    /// Number of inputs.
    pub cols: usize,
    /// Which other products give the same bits for the same row.
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
