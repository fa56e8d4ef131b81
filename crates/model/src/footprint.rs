//! How much of a GPU's memory a model takes, before any of it is taken: what is left can be KV.
//!
//! Arithmetic over shapes. A test of the whole model on a recording device holds it against what is really allocated.

use baton_model_files::{Model, ModelConfig};
use baton_types::KvLayout;

use crate::Limits;

/// What beside the tensors of a model grows with nothing here: copies of batches, sums of split attention, graphs, what the driver's own
/// code takes. More than was ever seen, little beside any GPU's memory.
const OTHERS: u64 = 512 << 20;

/// Bytes on a GPU, by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Matrices as bf16, vectors as f32, the tables of rotations.
    pub weights: u64,
    /// Activations, for the largest step.
    pub activations: u64,
    /// Operands of products, and what else kernels need while they run.
    pub workspace: u64,
}

impl Footprint {
    /// Of a model whose pool has this layout, within limits; table entries do not count.
    pub fn of(model: &Model, layout: &KvLayout, limits: Limits) -> Footprint {
        let config = model.config();
        let weight = |shape: &[usize]| if shape.len() > 1 { 2 } else { 4 };
        let tensors: u64 = model.tensors().iter().map(|tensor| tensor.elements() * weight(&tensor.shape)).sum();
        let tables = if config.local_rope.is_some() { 2 } else { 1 };
        // A cosine and a sine for each half of a head.
        let rotations = tables * limits.context as u64 * u64::from(config.head_dim) * 4;
        Footprint {
            weights: tensors + rotations,
            activations: activations(config, layout, limits),
            workspace: operands(config, limits) + OTHERS,
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.activations + self.workspace
    }
}

/// f32 rows, as the decoder's buffers have them.
fn activations(config: &ModelConfig, layout: &KvLayout, limits: Limits) -> u64 {
    let queries = if layout.groups.iter().any(|group| group.sinks > 0) { 3 } else { 2 };
    let wide = |n: u32| u64::from(n);
    let row = 2 * wide(config.hidden_size)
        + queries * wide(config.q_size())
        + 2 * wide(config.kv_size())
        + 2 * wide(config.intermediate_size);
    // Logits, and what they were before penalties.
    let sample = wide(config.hidden_size) + 2 * wide(config.vocab_size);
    4 * (limits.tokens as u64 * row + limits.samples as u64 * sample)
}

/// A product's input as bf16.
fn operands(config: &ModelConfig, limits: Limits) -> u64 {
    let widest = config.hidden_size.max(config.intermediate_size).max(config.q_size());
    limits.tokens as u64 * u64::from(widest) * 2
}

#[cfg(test)]
mod tests {
    use baton_model_files::RandomModel;
    use baton_types::KvDtype;

    use super::*;
    use crate::kv_layout;

    #[test]
    fn an_eight_billion_model_takes_what_it_is_known_to_take() {
        let model = RandomModel::parse("random:llama-3.1-8b").unwrap().unwrap().open().unwrap();
        let layout = kv_layout(model.config(), 0, KvDtype::Bf16, 16);
        let limits = Limits { tokens: 2048, samples: 16, context: 8192, table_entries: 0 };
        let footprint = Footprint::of(&model, &layout, limits);
        // 8.03e9 weights, the norms' among them at twice the bytes, and 8,192 rotations of 64 pairs.
        assert_eq!(footprint.weights, 8_030_261_248 * 2 + 65 * 4096 * 2 + 8192 * 128 * 4);
        // x, out, q, attended: 4,096 wide; k, v: 1,024; gate, up: 14,336.
        assert_eq!(footprint.activations, 4 * (2048 * (4 * 4096 + 2 * 1024 + 2 * 14_336) + 16 * (4096 + 2 * 128_256)));
        assert_eq!(footprint.workspace, 2048 * 14_336 * 2 + OTHERS);
    }
}
