//! Element types of weights as files store them.

use serde::{Deserialize, Serialize};

/// How a weight matrix is stored: row by row, each row in blocks of [`WeightDtype::block_elements`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum WeightDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits, one scale per 32.
    Q4_0,
    /// 4 bits, scale and minimum per 32.
    Q4_1,
    /// 5 bits, one scale per 32.
    Q5_0,
    /// 5 bits, scale and minimum per 32.
    Q5_1,
    /// 8 bits, one scale per 32.
    Q8_0,
    /// 4 bits, super-blocks of 256.
    Q4K,
    /// 5 bits, super-blocks of 256.
    Q5K,
    /// 6 bits, super-blocks of 256.
    Q6K,
}

impl WeightDtype {
    /// Elements of one block.
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

    /// Bytes of a row of `elements`; None when the row is not a whole number of blocks.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        let block = self.block_elements();
        elements.is_multiple_of(block).then(|| elements / block * self.block_bytes())
    }
}
