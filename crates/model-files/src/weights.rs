//! Random weights: a function of seed, tensor and position. They are made when they are loaded, in the memory that needs them.
//!
//! Values are uniform. Their variance keeps a row's products as large as its inputs, so that values neither grow nor vanish over the
//! layers and logits spread by about one.

use std::collections::BTreeMap;

use baton_types::{Seeded, SeededRows, WeightData, hash_bytes};

use crate::names::required;
use crate::{LayerTensor, ModelConfig, TensorInfo, TensorName, TensorRef, WeightDtype};

/// Element type of random weights.
const DTYPE: WeightDtype = WeightDtype::Bf16;
/// Largest distance of norm weights from 1, and of biases from 0.
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

    /// Every tensor, without its elements.
    pub fn facts(&self) -> impl Iterator<Item = TensorInfo> {
        self.shapes.iter().map(|(name, shape)| TensorInfo { name: *name, dtype: DTYPE, shape: shape.clone() })
    }

    /// A tensor, whose elements are made later; None if there is none of that name.
    pub fn tensor(&self, name: TensorName) -> Option<TensorRef<'static>> {
        let shape = self.shapes.get(&name)?.clone();
        let key = hash_bytes(self.seed, format!("{name:?}").as_bytes());
        let (middle, spread) = self.range(name, &shape);
        let (values, stride) = (Seeded { key, middle, spread }, shape.last().copied().unwrap_or(0));
        let data = WeightData::Seeded(SeededRows { values, first: 0, stride });
        Some(TensorRef { dtype: DTYPE, shape, data })
    }

    /// The range of a tensor's values: their mean, and their largest distance from it.
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
