//! Weights that a seed makes, each a function of its tensor's key and of its place there: any part of a tensor can be made by itself,
//! on a GPU, too, and is the same everywhere.

use crate::mix;

/// From one state of SplitMix64 to the next.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Elements that one number of the generator makes.
const LANES: u64 = 4;

/// A tensor's values, uniform in `[middle - spread, middle + spread)`, as bf16.
///
/// Element `i` is `middle + spread · n / 32768`, rounded to f32 after each operation and to bf16 at the end, to nearest, ties to even;
/// `n` is the `i % 4`-th 16 bits from below, as a signed integer, of number `i / 4` of the sequence that SplitMix64 (Steele et al.,
/// OOPSLA 2014) has from the state `key` on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Seeded {
    /// Where the sequence begins.
    pub key: u64,
    /// The values' mean.
    pub middle: f32,
    /// How far from it they are, at most.
    pub spread: f32,
}

/// A matrix of such values, or a part of one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SeededRows {
    /// Of the whole tensor.
    pub values: Seeded,
    /// Place there of its first element.
    pub first: u64,
    /// From a row's first element to the next row's.
    pub stride: usize,
}

/// SplitMix64 from the state `seed` on, at that place of its sequence.
pub fn split_mix(seed: u64, at: u64) -> u64 {
    mix(seed.wrapping_add((at + 1).wrapping_mul(STEP)))
}

impl Seeded {
    /// Writes the elements from place `first` on, little-endian.
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
    /// Writes the first elements of its row `row`, as many as there is room for.
    pub fn fill_row(&self, row: usize, out: &mut [u8]) {
        self.values.fill(self.first + row as u64 * self.stride as u64, out);
    }
}

/// Rounded to nearest, ties to even; finite values only.
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

    /// Whoever makes them elsewhere makes these.
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
