//! Weights: their elements, and the element types that files store.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::SeededRows;

/// The elements of a tensor or of a part of one.
#[derive(Clone, PartialEq, Debug)]
pub enum WeightData<'a> {
    /// Bytes as in a file: row-major, little-endian, with no guaranteed alignment.
    Stored(Cow<'a, [u8]>),
    /// Bf16 values that are made where they are needed.
    Seeded(SeededRows),
}

impl<'a> From<&'a [u8]> for WeightData<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        WeightData::Stored(bytes.into())
    }
}

/// Element type of stored weights. Quantised types pack a block of elements of one row into a run of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum WeightDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 × 4 bits, f16 scale.
    Q4_0,
    /// 32 × 4 bits, f16 scale and minimum.
    Q4_1,
    /// 32 × 5 bits, f16 scale.
    Q5_0,
    /// 32 × 5 bits, f16 scale and minimum.
    Q5_1,
    /// 32 × 8 bits, f16 scale.
    Q8_0,
    /// 256 × 4 bits, 6-bit scales and minima of 8 groups.
    Q4K,
    /// 256 × 5 bits, 6-bit scales and minima of 8 groups.
    Q5K,
    /// 256 × 6 bits, 8-bit scales of 16 groups.
    Q6K,
}

impl WeightDtype {
    /// Elements of one block; 1 for plain types.
    pub fn block_elements(self) -> usize {
        use WeightDtype::*;
        match self {
            F32 | F16 | Bf16 => 1,
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 => 32,
            Q4K | Q5K | Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        use WeightDtype::*;
        match self {
            F32 => 4,
            F16 | Bf16 => 2,
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q4K => 144,
            Q5K => 176,
            Q6K => 210,
        }
    }

    /// Bytes of a row of `elements`; None when the row is not a whole number of blocks, or on overflow.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        let block = self.block_elements();
        if elements.is_multiple_of(block) { (elements / block).checked_mul(self.block_bytes()) } else { None }
    }

    /// Bytes of a tensor of this shape; None when a row is not a whole number of blocks, or on overflow.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<usize> {
        let row = shape.last().copied().unwrap_or(1);
        self.row_bytes(row)?;
        let elements = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightDtype::Bf16 => f.write_str("BF16"),
            WeightDtype::Q4K => f.write_str("Q4_K"),
            WeightDtype::Q5K => f.write_str("Q5_K"),
            WeightDtype::Q6K => f.write_str("Q6_K"),
            plain => write!(f, "{plain:?}"),
        }
    }
}
