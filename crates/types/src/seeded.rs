//! Weights made by a seed. Each value is a function of its tensor's key and its index in the tensor. So any part of a tensor can be made by
//! itself, also on a GPU, and has the same values everywhere.

use crate::mix;

/// Difference between two successive states of SplitMix64.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Elements made from one 64-bit number of the generator.
const LANES: u64 = 4;

/// A tensor's values, uniform in `[middle - spread, middle + spread)`, as bf16.
///
/// Element `i` is `middle + spread · n / 32768`. Each operation rounds to f32, and the result rounds to bf16, to nearest, ties to even.
/// Let `s` be number `i / 4` of the sequence that SplitMix64 (Steele et al., OOPSLA 2014) yields from the state `key`. Then `n` is bits
/// `16 (i % 4)` to `16 (i % 4) + 15` of `s`, as a signed integer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Seeded {
    /// Initial state of the generator.
    pub key: u64,
    /// The values' mean.
    pub middle: f32,
    /// Largest distance of a value from the mean.
    pub spread: f32,
}

/// A matrix of [`Seeded`] values, or a part of one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SeededRows {
    /// The values of the whole tensor.
    pub values: Seeded,
    /// Index in the whole tensor of this matrix's first element.
    pub first: u64,
    /// Elements from the first element of a row to the first of the next row.
    pub stride: usize,
}

/// Number `at` (from 0) of the SplitMix64 sequence that begins at the state `seed`.
pub fn split_mix(seed: u64, at: u64) -> u64 {
    mix(seed.wrapping_add((at + 1).wrapping_mul(STEP)))
}

impl Seeded {
    /// Writes the elements beginning with index `first` to `out`, two bytes each, little-endian.
    pub fn fill(&self, first: u64, out: &mut [u8]) {
        let (mut place, mut rest) = (first, out.as_chunks_mut::<2>().0);
        while !rest.is_empty() {
            let lane = place % LANES;
            let (group, later) = rest.split_at_mut(((LANES - lane) as usize).min(rest.len()));
            let bits = split_mix(self.key, place / LANES) >> (16 * lane);
            place += group.len() as u64;
            for (i, element) in group.iter_mut().enumerate() {
                let fraction = f32::from((bits >> (16 * i)) as i16) / 32768.0;
                *element = bf16(self.middle + self.spread * fraction).to_le_bytes();
            }
            rest = later;
        }
    }
}

impl SeededRows {
    /// Writes the first elements of row `row` to `out`, as many as fit.
    pub fn fill_row(&self, row: usize, out: &mut [u8]) {
        self.values.fill(self.first + row as u64 * self.stride as u64, out);
    }
}

/// The bits of `value` as bf16, rounded to nearest, ties to even. Finite values only.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: Seeded = Seeded { key: 7, middle: 0.0, spread: 0.5 };

    #[test]
    fn an_element_depends_on_its_place_and_on_nothing_else() {
        let mut whole = vec![0; 2 * 1003];
        VALUES.fill(0, &mut whole);
        for (first, count) in [(0, 1), (1, 1), (3, 6), (4, 8), (998, 5), (501, 0)] {
            let mut part = vec![0; 2 * count];
            VALUES.fill(first as u64, &mut part);
            assert!(part == whole[2 * first..][..2 * count], "{count} from {first} on");
        }
        let mut row = vec![0; 2 * 9];
        SeededRows { values: VALUES, first: 5, stride: 21 }.fill_row(3, &mut row);
        assert_eq!(row, whole[2 * (5 + 3 * 21)..][..18]);
        let mut other = vec![0; whole.len()];
        Seeded { key: 8, ..VALUES }.fill(0, &mut other);
        assert!(whole != other, "another key, other values");
    }

    /// Other implementations (on GPUs) must make the same values.
    #[test]
    fn the_values_are_those_they_have_always_been() {
        let mut bytes = [0; 12];
        Seeded { key: 1, middle: 1.0, spread: 0.125 }.fill(3, &mut bytes);
        let values: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        assert_eq!(values, [0x3f64, 0x3f7b, 0x3f8d, 0x3f63, 0x3f70, 0x3f8b]);
    }

    #[test]
    fn values_have_the_mean_and_the_variance_they_are_to_have() {
        let mut data = vec![0; 1 << 17];
        VALUES.fill(0, &mut data);
        let value = |bytes: &[u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
        let values: Vec<f64> = data.as_chunks::<2>().0.iter().map(value).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.005, "{mean}");
        assert!((variance / (0.25 / 3.0) - 1.0).abs() < 0.02, "{variance}");
        assert!(values.iter().all(|x| x.abs() <= 0.5));
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        for (value, bits) in
            [(1.0, 0x3f80), (f32::from_bits(0x3f80_8000), 0x3f80), (f32::from_bits(0x3f81_8000), 0x3f82)]
        {
            assert_eq!(bf16(value), bits);
        }
        assert_eq!(bf16(f32::from_bits(0xbf80_8001)), 0xbf81);
        assert_eq!(bf16(0.0), 0);
    }
}
