//! Weights that are a function of seed, tensor and place, made when they are loaded, where they are wanted.
//!
//! Uniform, with the variance that keeps a row's products as large as its inputs, so that values neither grow nor vanish over the
//! layers and logits spread by about one.

use std::collections::BTreeMap;

use baton_types::{Seeded, SeededRows, WeightData, hash_bytes};

use crate::names::required;
use crate::{LayerTensor, ModelConfig, TensorInfo, TensorName, TensorRef, WeightDtype};

/// What weights are stored as.
const DTYPE: WeightDtype = WeightDtype::Bf16;
/// How far norm weights are from 1, and biases from 0, at most.
const VECTOR_SPREAD: f32 = 0.125;

/// The weights of a shape.
#[derive(Debug)]
pub(crate) struct RandomWeights {
    shapes: BTreeMap<TensorName, Vec<usize>>,
    norm_middle: f32,
    seed: u64,
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

    /// A tensor, unmade; None if there is none of that name.
    pub fn tensor(&self, name: TensorName) -> Option<TensorRef<'static>> {
        let shape = self.shapes.get(&name)?.clone();
        let key = hash_bytes(self.seed, format!("{name:?}").as_bytes());
        let (middle, spread) = self.range(name, &shape);
        let (values, stride) = (Seeded { key, middle, spread }, shape.last().copied().unwrap_or(0));
        let data = WeightData::Seeded(SeededRows { values, first: 0, stride });
        Some(TensorRef { dtype: DTYPE, shape, data })
    }

    /// Where a tensor's values lie: their mean, and how far from it they are at most.
    fn range(&self, name: TensorName, shape: &[usize]) -> (f32, f32) {
        use LayerTensor::{KBias, QBias, VBias};
        match (shape, name) {
            // A uniform value within ± a has the variance a² / 3.
            ([_, inputs], _) => (0.0, (3.0 / *inputs as f32).sqrt()),
            (_, TensorName::Layer(_, QBias | KBias | VBias)) => (0.0, VECTOR_SPREAD),
            _ => (self.norm_middle, VECTOR_SPREAD),
        }
    }
}
