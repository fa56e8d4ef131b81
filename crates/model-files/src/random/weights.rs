//! Weights that are a function of seed, tensor and place, made a tensor at a time when they are loaded: the host never holds more.
//!
//! Uniform, with the variance that keeps a row's products as large as its inputs, so that values neither grow nor vanish over the
//! layers and logits spread by about one.

use std::collections::BTreeMap;

use baton_types::{hash_bytes, mix};

use crate::names::required;
use crate::{LayerTensor, ModelConfig, TensorInfo, TensorName, TensorRef, WeightDtype};

/// What weights are stored as.
const DTYPE: WeightDtype = WeightDtype::Bf16;
/// Elements that one number of the generator makes.
const LANES: usize = 4;
/// Bytes of a thread's share, at least: below it, starting one takes longer.
const SHARE: usize = 1 << 20;
/// How far norm weights are from 1, and biases from 0, at most.
const VECTOR_SPREAD: f32 = 0.125;

/// The weights of a shape.
#[derive(Debug)]
pub(crate) struct RandomWeights {
    shapes: BTreeMap<TensorName, Vec<usize>>,
    norm_middle: f32,
    seed: u64,
}

/// Where a tensor's values lie.
#[derive(Clone, Copy)]
struct Range {
    middle: f32,
    spread: f32,
}

impl RandomWeights {
    pub fn new(config: &ModelConfig, seed: u64) -> RandomWeights {
        let shapes = required(config).into_iter().collect();
        RandomWeights { shapes, norm_middle: 1.0 - config.norm_weight_offset, seed }
    }

    /// Every tensor, unmade.
    pub fn facts(&self) -> impl Iterator<Item = TensorInfo> {
        self.shapes.iter().map(|(name, shape)| TensorInfo { name: *name, dtype: DTYPE, shape: shape.clone() })
    }

    /// Makes a tensor; None if there is none of that name, or no memory for it.
    pub fn tensor(&self, name: TensorName) -> Option<TensorRef<'static>> {
        let shape = self.shapes.get(&name)?.clone();
        let mut data = Vec::new();
        let bytes = DTYPE.tensor_bytes(&shape)?;
        data.try_reserve_exact(bytes).ok()?;
        data.resize(bytes, 0);
        let key = hash_bytes(self.seed, format!("{name:?}").as_bytes());
        self.range(name, &shape).fill_all(key, &mut data);
        Some(TensorRef { dtype: DTYPE, shape, data: data.into() })
    }

    fn range(&self, name: TensorName, shape: &[usize]) -> Range {
        use LayerTensor::{KBias, QBias, VBias};
        match (shape, name) {
            // A uniform value within ± a has the variance a² / 3.
            ([_, inputs], _) => Range { middle: 0.0, spread: (3.0 / *inputs as f32).sqrt() },
            (_, TensorName::Layer(_, QBias | KBias | VBias)) => Range { middle: 0.0, spread: VECTOR_SPREAD },
            _ => Range { middle: self.norm_middle, spread: VECTOR_SPREAD },
        }
    }
}

impl Range {
    /// All elements of a tensor, by as many threads as pay.
    fn fill_all(self, key: u64, data: &mut [u8]) {
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (data.len() / SHARE).clamp(1, most);
        let group = LANES * DTYPE.block_bytes();
        let share = data.len().div_ceil(threads).next_multiple_of(group).max(group);
        std::thread::scope(|scope| {
            for (i, part) in data.chunks_mut(share).enumerate() {
                let mut run = move || self.fill(key, (i * share / group) as u64, part);
                if threads == 1 { run() } else { drop(scope.spawn(run)) }
            }
        });
    }

    /// Elements from the `first`-th group of [`LANES`] on.
    fn fill(self, key: u64, first: u64, data: &mut [u8]) {
        for (number, group) in (first..).zip(data.chunks_mut(LANES * DTYPE.block_bytes())) {
            // SplitMix64 at that place of its sequence.
            let bits = mix(key.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            for (lane, element) in group.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let fraction = f32::from((bits >> (16 * lane)) as i16) / 32768.0;
                *element = bf16(self.middle + self.spread * fraction).to_le_bytes();
            }
        }
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

    const RANGE: Range = Range { middle: 0.0, spread: 0.5 };

    fn values(data: &[u8]) -> Vec<f64> {
        let value = |bytes: &[u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
        data.as_chunks::<2>().0.iter().map(value).collect()
    }

    #[test]
    fn an_element_depends_on_its_place_and_on_nothing_else() {
        // Long enough for several threads, not a whole number of groups.
        let mut whole = vec![0; 3 * SHARE + 6];
        RANGE.fill_all(7, &mut whole);
        let mut alone = vec![0; whole.len()];
        RANGE.fill(7, 0, &mut alone);
        assert!(whole == alone, "however many threads");
        let mut tail = vec![0; whole.len() - 8 * 1000];
        RANGE.fill(7, 1000, &mut tail);
        assert!(whole[8 * 1000..] == tail[..], "from any place on");
        RANGE.fill(8, 0, &mut alone);
        assert!(whole != alone, "another key, other values");
    }

    #[test]
    fn values_have_the_mean_and_the_variance_they_are_to_have() {
        let mut data = vec![0; 1 << 17];
        RANGE.fill_all(1, &mut data);
        let values = values(&data);
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
