//! Computes how much of a GPU's memory a model takes, before any is allocated. The rest can be KV.
//!
//! Arithmetic over shapes. A test runs the whole model on a recording device and compares this with what is really allocated.

use baton_kernels::cuda::product_weight_bytes;
use baton_model_files::{Model, SCRATCH_BYTES, TensorInfo, TensorName, activation_bytes, operand_bytes};
use baton_types::KvLayout;

use crate::parallel::Sharding;
use crate::{DecoderLimits, ModelError};

/// Bytes on a GPU, by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Matrices as bf16 (those of layers as E4M3 with scales if `fp8`), vectors as f32, and the rotary tables.
    pub weights: u64,
    /// Activations, for the largest step.
    pub activations: u64,
    /// Operands of products and other scratch memory of kernels.
    pub workspace: u64,
}

impl Footprint {
    /// The footprint of a model whose pool has this layout, within limits. `fp8` says whether layer weights are E4M3 instead of bf16.
    /// `limits.table_entries` is ignored.
    pub fn of(model: &Model, layout: &KvLayout, limits: DecoderLimits, fp8: bool) -> Footprint {
        Footprint::with(model, &Sharding::whole(model.config()), layout, limits, fp8)
    }

    /// The largest footprint of one of `ranks` tensor-parallel ranks.
    ///
    /// # Errors
    /// When the model cannot be split over `ranks` ranks.
    pub fn of_rank(
        model: &Model,
        ranks: u32,
        layout: &KvLayout,
        limits: DecoderLimits,
        fp8: bool,
    ) -> Result<Footprint, ModelError> {
        let shardings = (0..ranks).map(|rank| Sharding::of(model, ranks, rank)).collect::<Result<Vec<_>, _>>()?;
        let footprints = shardings.iter().map(|sharding| Footprint::with(model, sharding, layout, limits, fp8));
        let largest = footprints.max_by_key(Footprint::total);
        Ok(largest.unwrap_or_else(|| Footprint::of(model, layout, limits, fp8)))
    }

    fn with(model: &Model, sharding: &Sharding, layout: &KvLayout, limits: DecoderLimits, fp8: bool) -> Footprint {
        let config = sharding.config(model.config());
        let tensors: u64 = model.tensors().iter().map(|tensor| tensor_bytes(tensor, sharding, fp8)).sum();
        // With several ranks, each holds its rows of the output head beside the embedding, even when both are the same matrix.
        let head = match config.tied_embeddings && sharding.ranks() > 1 {
            true => product_weight_bytes(sharding.vocab().len(), config.hidden_size as usize, false),
            false => 0,
        };
        let tables = if config.local_rope.is_some() { 2 } else { 1 };
        // One cosine and one sine, 4 bytes each, for each of `head_dim / 2` pairs.
        let rotations = tables * limits.context as u64 * u64::from(config.head_dim) * 4;
        let sinks = layout.groups.iter().any(|group| group.sinks > 0);
        let (own_vocab, tokens) = (sharding.vocab().len() as u32, limits.tokens as u32);
        Footprint {
            weights: tensors + head + rotations,
            activations: activation_bytes(&config, sharding.ranks(), own_vocab, sinks, tokens, limits.samples as u32),
            workspace: operand_bytes(&config, tokens) + SCRATCH_BYTES,
        }
    }

    /// The sum of all parts.
    pub fn total(&self) -> u64 {
        self.weights + self.activations + self.workspace
    }
}

/// Bytes of the part of a tensor that a rank holds.
fn tensor_bytes(tensor: &TensorInfo, sharding: &Sharding, fp8: bool) -> u64 {
    let part = sharding.part(tensor.name);
    match (&tensor.shape[..], tensor.name) {
        (&[rows, cols], name) => {
            let (rows, cols) = (part.outputs(rows).len(), part.inputs(cols).len());
            product_weight_bytes(rows, cols, fp8 && matches!(name, TensorName::Layer(..)))
        }
        (&[len], _) => part.outputs(len).len() as u64 * 4,
        _ => tensor.elements() * 4,
    }
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
        let limits = DecoderLimits { tokens: 2048, samples: 16, context: 8192, table_entries: 0 };
        let footprint = Footprint::of(&model, &layout, limits, false);
        // 8.03e9 weights, the norms' among them at twice the bytes, and 8,192 rotations of 64 pairs.
        assert_eq!(footprint.weights, 8_030_261_248 * 2 + 65 * 4096 * 2 + 8192 * 128 * 4);
        // x, out, q, attended: 4,096 wide; k, v: 1,024; gate, up: 14,336.
        assert_eq!(footprint.activations, 4 * (2048 * (4 * 4096 + 2 * 1024 + 2 * 14_336) + 16 * (4096 + 2 * 128_256)));
        assert_eq!(footprint.workspace, 2048 * 14_336 * 2 + SCRATCH_BYTES);

        // One byte per weight of a layer, and 4 bytes per output for its scale; embedding and head as before.
        let outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096);
        let layers = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096;
        let fp8 = Footprint::of(&model, &layout, limits, true);
        assert_eq!(fp8, Footprint { weights: footprint.weights - layers + outputs * 4, ..footprint });
    }
}
