//! Reads the weight blocks of GGUF files: one group of 32 weights as small integers with their scales.
//!
//! Used once, at load. Block layouts are those of the GGUF format's ggml types.

use baton_types::WeightDtype;
use half::{bf16, f16};

/// Weights of a group.
pub const GROUP: usize = 32;

/// 32 weights: weight k is `d * scale[k / 16] * q[k] - dmin * min`. `q` is unsigned but for Q6_K and Q8_0.
pub struct Group {
    pub q: [i8; GROUP],
    pub d: f32,
    pub scale: [i8; 2],
    pub dmin: f32,
    pub min: u8,
}

impl Group {
    /// Weight `k`.
    pub fn weight(&self, k: usize) -> f32 {
        // Halves times small integers: exact, so that only the last operation rounds.
        let (scale, min) = (self.d * self.scale[k / 16] as f32, self.dmin * self.min as f32);
        scale.mul_add(self.q[k] as f32, -min)
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Low nibbles are elements 0..16, high nibbles 16..32; `high_bits` adds a fifth bit per element.
fn nibbles(qs: &[u8], high_bits: u32) -> [i8; GROUP] {
    let mut q = [0i8; GROUP];
    for j in 0..16 {
        q[j] = (qs[j] & 15) as i8 | ((high_bits >> j & 1) as i8) << 4;
        q[j + 16] = (qs[j] >> 4) as i8 | ((high_bits >> (j + 16) & 1) as i8) << 4;
    }
    q
}

/// The 6-bit scale and minimum of sub-block `j` of a Q4_K or Q5_K super-block.
fn scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// Group `g` of a row stored as `dtype`, a quantised type.
pub fn quantised_group(dtype: WeightDtype, row: &[u8], g: usize) -> Group {
    let per_block = dtype.block_elements() / GROUP;
    let block = &row[g / per_block * dtype.block_bytes()..][..dtype.block_bytes()];
    let sub = g % per_block;
    let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let plain = |q, d, dmin| Group { q, d, scale: [1; 2], dmin, min: 1 };
    match dtype {
        // Kept unsigned, so that types of as many bits share one packed form.
        WeightDtype::Q4_0 => {
            let d = half_at(block, 0);
            plain(nibbles(&block[2..], 0), d, 8.0 * d)
        }
        WeightDtype::Q5_0 => {
            let d = half_at(block, 0);
            plain(nibbles(&block[6..], word(2)), d, 16.0 * d)
        }
        WeightDtype::Q4_1 => plain(nibbles(&block[4..], 0), half_at(block, 0), -half_at(block, 2)),
        WeightDtype::Q5_1 => plain(nibbles(&block[8..], word(4)), half_at(block, 0), -half_at(block, 2)),
        WeightDtype::Q8_0 => plain(std::array::from_fn(|i| block[2 + i] as i8), half_at(block, 0), 0.0),
        WeightDtype::Q4K | WeightDtype::Q5K => {
            let five = dtype == WeightDtype::Q5K;
            let (scale, min) = scale_min(&block[4..16], sub);
            let qs = &block[if five { 48 } else { 16 }..][sub / 2 * 32..][..32];
            let q = std::array::from_fn(|i| {
                let low = qs[i] >> (4 * (sub % 2)) & 15;
                let high = if five { block[16 + i] >> sub & 1 } else { 0 };
                (low | high << 4) as i8
            });
            Group { q, d: half_at(block, 0), scale: [scale as i8; 2], dmin: half_at(block, 2), min }
        }
        WeightDtype::Q6K => {
            let (part, quarter) = (sub / 4, sub % 4);
            let (low, high) = (&block[64 * part + quarter % 2 * 32..], &block[128 + 32 * part..]);
            let q = std::array::from_fn(|i| {
                let bits = low[i] >> (4 * (quarter / 2)) & 15 | (high[i] >> (2 * quarter) & 3) << 4;
                bits as i8 - 32
            });
            let scale = |h: usize| block[192 + 8 * part + 2 * quarter + h] as i8;
            Group { q, d: half_at(block, 208), scale: [scale(0), scale(1)], dmin: 0.0, min: 0 }
        }
        WeightDtype::F32 | WeightDtype::F16 | WeightDtype::Bf16 => unreachable!("dense rows have no groups"),
    }
}

/// Element `k` of a row, whatever its type. Slow; for vectors at load and as the reference in tests.
pub fn element(dtype: WeightDtype, row: &[u8], k: usize) -> f32 {
    match dtype {
        WeightDtype::F32 => f32::from_le_bytes([row[4 * k], row[4 * k + 1], row[4 * k + 2], row[4 * k + 3]]),
        WeightDtype::F16 => half_at(row, 2 * k),
        WeightDtype::Bf16 => bf16::from_le_bytes([row[2 * k], row[2 * k + 1]]).to_f32(),
        _ => quantised_group(dtype, row, k / GROUP).weight(k % GROUP),
    }
}
