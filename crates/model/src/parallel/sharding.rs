//! Computes which part of every weight a rank holds, and cuts out that part: of stored bytes, or of values that a seed makes.
//!
//! Pure: a function of (configuration, ranks, rank). A stored matrix can be cut between any rows, because each row is stored by itself. A
//! row of a quantised type can be cut only between its blocks. This module knows nothing of backends or of how ranks exchange.

use std::borrow::Cow;
use std::ops::Range;

use baton_model_files::{LayerTensor, Model, ModelConfig, TensorName, TensorRef};
use baton_types::{SeededRows, WeightData, heads_of_rank};

use crate::ModelError;

/// Widths on a backend are multiples of this.
const LANES: u32 = 8;

/// The part of a model that one rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sharding {
    ranks: u32,
    rank: u32,
    head_dim: u32,
    heads: Range<u32>,
    kv_heads: Range<u32>,
    ffn: Range<u32>,
    vocab: Range<u32>,
    /// Where each rank's part of the vocabulary begins, and the end.
    vocab_splits: Vec<usize>,
}

/// The part of one tensor that a rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    /// All of it.
    Whole,
    /// These outputs.
    Rows(Range<usize>),
    /// These inputs of every output.
    Columns(Range<usize>),
}

/// A part of a matrix: stored as in a file, or made by a seed.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored<'a> {
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub cols: usize,
    /// Row by row; borrowed if the part is contiguous in the file.
    pub data: WeightData<'a>,
}

impl Sharding {
    /// The whole model on one rank.
    pub fn whole(config: &ModelConfig) -> Sharding {
        Sharding {
            ranks: 1,
            rank: 0,
            head_dim: config.head_dim,
            heads: 0..config.heads,
            kv_heads: 0..config.kv_heads,
            ffn: 0..config.intermediate_size,
            vocab: 0..config.vocab_size,
            vocab_splits: vec![0, config.vocab_size as usize],
        }
    }

    /// The part of rank `rank` of `ranks`, for a model whose feed-forward width can be cut at multiples of `ffn_unit`.
    ///
    /// Query and KV heads are split evenly. With more ranks than KV heads, several ranks hold the same KV head. The feed-forward width
    /// and the vocabulary are split as evenly as their units allow.
    ///
    /// # Errors
    /// [`ModelError::Ranks`] with the field that cannot be split and the degrees that fit.
    pub fn new(config: &ModelConfig, ffn_unit: u32, ranks: u32, rank: u32) -> Result<Sharding, ModelError> {
        let refused = |(field, value)| {
            let degrees = (1..=config.heads).filter(|&ranks| obstacle(config, ffn_unit, ranks).is_none()).collect();
            ModelError::Ranks { field, value, ranks, degrees }
        };
        if let Some(field) = obstacle(config, ffn_unit, ranks) {
            return Err(refused(field));
        }
        if rank >= ranks {
            return Err(refused(("rank", rank)));
        }
        let heads = config.heads / ranks;
        let vocab = |rank| spread(config.vocab_size, LANES, ranks, rank);
        Ok(Sharding {
            ranks,
            rank,
            head_dim: config.head_dim,
            heads: rank * heads..(rank + 1) * heads,
            kv_heads: heads_of_rank(config.kv_heads, ranks, rank),
            ffn: spread(config.intermediate_size, ffn_unit, ranks, rank),
            vocab: vocab(rank),
            vocab_splits: (0..ranks)
                .map(|rank| vocab(rank).start as usize)
                .chain([config.vocab_size as usize])
                .collect(),
        })
    }

    /// The same as [`Sharding::new`] for an open model. The stored types determine where its feed-forward width can be cut.
    pub fn of(model: &Model, ranks: u32, rank: u32) -> Result<Sharding, ModelError> {
        let down = |name| matches!(name, TensorName::Layer(_, LayerTensor::Down));
        let blocks = model.tensors().into_iter().filter(|tensor| down(tensor.name));
        // Block sizes are powers of two, so the largest is a multiple of all.
        let unit = blocks.map(|tensor| tensor.dtype.block_elements() as u32).fold(LANES, u32::max);
        Sharding::new(model.config(), unit, ranks, rank)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// KV heads of the whole model that this rank holds.
    pub fn kv_heads(&self) -> Range<u32> {
        self.kv_heads.clone()
    }

    /// Rows of the output head that this rank has.
    pub fn vocab(&self) -> Range<u32> {
        self.vocab.clone()
    }

    /// Where each rank's logits begin in the vocabulary, and the end of the last.
    pub fn vocab_splits(&self) -> &[usize] {
        &self.vocab_splits
    }

    /// The configuration with this rank's numbers of heads and its feed-forward width.
    pub fn config(&self, whole: &ModelConfig) -> ModelConfig {
        let (heads, kv_heads) = (self.heads.len() as u32, self.kv_heads.len() as u32);
        ModelConfig { heads, kv_heads, intermediate_size: self.ffn.len() as u32, ..whole.clone() }
    }

    /// The part of a tensor that this rank holds.
    pub fn part(&self, name: TensorName) -> Part {
        use LayerTensor as T;
        if self.ranks == 1 {
            return Part::Whole;
        }
        let range = |units: &Range<u32>, size: u32| (units.start * size) as usize..(units.end * size) as usize;
        let (q, kv) = (range(&self.heads, self.head_dim), range(&self.kv_heads, self.head_dim));
        match name {
            TensorName::Embedding | TensorName::OutputNorm | TensorName::RopeFreqs => Part::Whole,
            TensorName::Output => Part::Rows(range(&self.vocab, 1)),
            TensorName::Layer(_, tensor) => match tensor {
                T::Q | T::QBias => Part::Rows(q),
                T::K | T::V | T::KBias | T::VBias => Part::Rows(kv),
                T::AttnOutput => Part::Columns(q),
                T::Gate | T::Up => Part::Rows(range(&self.ffn, 1)),
                T::Down => Part::Columns(range(&self.ffn, 1)),
                T::AttnNorm | T::QNorm | T::KNorm | T::PostAttnNorm | T::FfnNorm | T::PostFfnNorm => Part::Whole,
            },
        }
    }
}

/// Why a model cannot be split over `ranks` ranks: the first field that does not fit, and its value.
fn obstacle(config: &ModelConfig, ffn_unit: u32, ranks: u32) -> Option<(&'static str, u32)> {
    let units = |size: u32, unit: u32| size.div_ceil(unit.max(1));
    let (heads, kv_heads) = (config.heads, config.kv_heads);
    let kv_fits = ranks > 0 && (kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads));
    [
        (ranks > 0 && heads.is_multiple_of(ranks), "heads", heads),
        (kv_fits, "kv_heads", kv_heads),
        (units(config.intermediate_size, ffn_unit) >= ranks, "intermediate_size", config.intermediate_size),
        (units(config.vocab_size, LANES) >= ranks, "vocab_size", config.vocab_size),
    ]
    .into_iter()
    .find_map(|(fits, field, value)| (!fits).then_some((field, value)))
}

/// A rank's share of `total` in whole units. The last unit may be shorter.
fn spread(total: u32, unit: u32, ranks: u32, rank: u32) -> Range<u32> {
    let units = u64::from(total.div_ceil(unit));
    let begin = |rank: u32| (units * u64::from(rank) / u64::from(ranks) * u64::from(unit)).min(total.into()) as u32;
    begin(rank)..begin(rank + 1)
}

impl Part {
    /// The range of outputs in this part, of a tensor with `len` outputs.
    pub fn outputs(&self, len: usize) -> Range<usize> {
        match self {
            Part::Rows(rows) => rows.clone(),
            Part::Whole | Part::Columns(_) => 0..len,
        }
    }

    /// The range of inputs in this part, of a matrix with `len` inputs.
    pub fn inputs(&self, len: usize) -> Range<usize> {
        match self {
            Part::Columns(columns) => columns.clone(),
            Part::Whole | Part::Rows(_) => 0..len,
        }
    }

    /// This part of a matrix `[rows, cols]`.
    ///
    /// # Errors
    /// [`ModelError::Split`] when a row would be cut inside a block of its type.
    pub fn of<'a>(&self, name: TensorName, tensor: &'a TensorRef<'_>) -> Result<Stored<'a>, ModelError> {
        let (rows, cols) = match tensor.shape[..] {
            [rows, cols] => (rows, cols),
            _ => return Err(self.split_inside(name, tensor)),
        };
        let (outputs, inputs) = (self.outputs(rows), self.inputs(cols));
        let data = match &tensor.data {
            WeightData::Stored(data) => WeightData::Stored(self.cut(name, tensor, data, cols)?),
            WeightData::Seeded(all) => {
                let first = all.first + (outputs.start * all.stride + inputs.start) as u64;
                WeightData::Seeded(SeededRows { first, ..*all })
            }
        };
        Ok(Stored { rows: outputs.len(), cols: inputs.len(), data })
    }

    /// This part of stored rows with `cols` elements each.
    fn cut<'a>(
        &self,
        name: TensorName,
        tensor: &TensorRef<'_>,
        data: &'a [u8],
        cols: usize,
    ) -> Result<Cow<'a, [u8]>, ModelError> {
        let bytes = |elements| tensor.dtype.row_bytes(elements).ok_or_else(|| self.split_inside(name, tensor));
        Ok(match self {
            Part::Whole => data.into(),
            Part::Rows(range) => {
                let row = bytes(cols)?;
                data.get(range.start * row..range.end * row).unwrap_or_default().into()
            }
            Part::Columns(range) => {
                let (row, cut) = (bytes(cols)?, bytes(range.start)?..bytes(range.end)?);
                data.chunks_exact(row.max(1)).flat_map(|row| &row[cut.clone()]).copied().collect()
            }
        })
    }

    fn split_inside(&self, name: TensorName, tensor: &TensorRef<'_>) -> ModelError {
        let at = match self {
            Part::Columns(range) => range.clone(),
            Part::Whole | Part::Rows(_) => 0..tensor.shape.last().copied().unwrap_or(0),
        };
        ModelError::Split { tensor: format!("{name:?}"), dtype: tensor.dtype, at }
    }
}

#[cfg(test)]
mod tests {
    use baton_model_files::RandomModel;
    use baton_types::{Seeded, WeightDtype};

    use super::*;

    fn config(heads: u32, kv_heads: u32, intermediate_size: u32, vocab_size: u32) -> ModelConfig {
        let json = serde_json::json!({
            "architecture": "llama", "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": intermediate_size,
            "layers": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": 16, "context_length": 128, "norm_eps": 1e-5,
            "norm_weight_offset": 0.0, "qkv_bias": true, "qk_norm": false, "post_norms": false, "activation": "silu",
            "embedding_scale": 1.0, "attention_scale": 0.25,
            "rope": {"theta": 1e4, "scaling": "none", "rope_freq_factors": null}, "local_rope": null,
            "layer_windows": [null], "tied_embeddings": false, "interleaved_qk": false
        });
        serde_json::from_value(json).unwrap()
    }

    fn rows(sharding: &Sharding, name: TensorName) -> Range<usize> {
        match sharding.part(name) {
            Part::Rows(range) | Part::Columns(range) => range,
            Part::Whole => panic!("{name:?} is whole"),
        }
    }

    /// Every row, or every column of a tensor split by columns, is on one rank. Only KV heads may be on several.
    #[test]
    fn parts_tile_every_tensor() {
        use LayerTensor as T;
        let splits = [(8, 8, 160, 320), (8, 2, 136, 299), (12, 4, 104, 1000), (8, 1, 8960, 151_936)];
        for ((heads, kv, ffn, vocab), ranks) in splits.into_iter().flat_map(|s| [2, 4].map(|ranks| (s, ranks))) {
            let config = config(heads, kv, ffn, vocab);
            let all: Vec<_> = (0..ranks).map(|rank| Sharding::new(&config, 8, ranks, rank).unwrap()).collect();
            for (tensor, size) in [(T::Q, heads * 16), (T::AttnOutput, heads * 16), (T::Gate, ffn), (T::Down, ffn)] {
                let mut next = 0;
                for sharding in &all {
                    let range = rows(sharding, TensorName::Layer(0, tensor));
                    assert_eq!(range.start, next, "{tensor:?} of {ranks}");
                    assert!(range.len().is_multiple_of(8) && !range.is_empty());
                    next = range.end;
                }
                assert_eq!(next, size as usize);
            }
            let outputs: Vec<_> = all.iter().map(|sharding| rows(sharding, TensorName::Output)).collect();
            let ends: Vec<_> = [0].into_iter().chain(outputs.iter().map(|range| range.end)).collect();
            assert_eq!(all[0].vocab_splits(), ends);
            assert_eq!(*ends.last().unwrap(), vocab as usize);
            for sharding in &all {
                // A rank's query heads are those of its KV heads.
                let (q, kv_rows) =
                    (rows(sharding, TensorName::Layer(0, T::Q)), rows(sharding, TensorName::Layer(0, T::K)));
                let group = (heads / kv) as usize;
                assert!(q.start / group >= kv_rows.start && q.end.div_ceil(group) <= kv_rows.end);
                let local = sharding.config(&config);
                assert_eq!((local.q_size() as usize, local.kv_size() as usize), (q.len(), kv_rows.len()));
                assert!(local.heads.is_multiple_of(local.kv_heads));
            }
        }
    }

    #[test]
    fn one_rank_has_everything() {
        let config = config(6, 3, 100, 299);
        let sharding = Sharding::new(&config, 8, 1, 0).unwrap();
        assert_eq!(sharding, Sharding::whole(&config));
        assert_eq!(sharding.config(&config), config);
        assert_eq!(sharding.part(TensorName::Output), Part::Whole);
    }

    #[test]
    fn what_cannot_be_split_is_named_with_what_can() {
        let refused =
            |config: &ModelConfig, unit, ranks| Sharding::new(config, unit, ranks, 0).unwrap_err().to_string();
        let odd = config(9, 3, 1536, 49_152);
        assert_eq!(
            refused(&odd, 32, 2),
            "heads is 9, which 2 ranks cannot share; tensor-parallel degrees that fit this model: 1, 3, 9"
        );
        assert!(refused(&config(12, 3, 1536, 320), 32, 2).starts_with("kv_heads is 3, which 2 ranks"));
        assert!(refused(&config(8, 8, 512, 320), 256, 4).starts_with("intermediate_size is 512, which 4 ranks"));
        assert!(refused(&config(8, 8, 512, 10), 8, 4).starts_with("vocab_size is 10, which 4 ranks"));
        assert!(refused(&odd, 32, 0).starts_with("heads is 9, which 0 ranks"));
        assert!(Sharding::new(&odd, 32, 3, 3).unwrap_err().to_string().starts_with("rank is 3, which 3 ranks"));
    }

    /// Numbers the blocks of a matrix, so that a part shows where it came from.
    #[test]
    fn rows_are_cut_anywhere_and_columns_between_blocks() {
        let dtype = WeightDtype::Q4_1;
        let (rows, blocks) = (4usize, 3usize);
        let data: Vec<u8> = (0..rows * blocks).flat_map(|n| vec![n as u8; dtype.block_bytes()]).collect();
        let tensor = TensorRef { dtype, shape: vec![rows, blocks * 32], data: data[..].into() };
        let numbers = |part: &Part| {
            let stored = part.of(TensorName::Output, &tensor).map_err(|error| error.to_string())?;
            let WeightData::Stored(data) = &stored.data else { panic!("{stored:?}") };
            let numbers: Vec<u8> = data.chunks(dtype.block_bytes()).map(|block| block[0]).collect();
            Ok((stored.rows, stored.cols, numbers))
        };
        assert_eq!(numbers(&Part::Whole), Ok((4, 96, (0..12).collect())));
        assert_eq!(numbers(&Part::Rows(1..3)), Ok((2, 96, (3..9).collect())));
        assert_eq!(numbers(&Part::Columns(32..96)), Ok((4, 64, vec![1, 2, 4, 5, 7, 8, 10, 11])));
        let inside: Result<(usize, usize, Vec<u8>), String> = numbers(&Part::Columns(48..96));
        assert_eq!(
            inside,
            Err("tensor Output would be split at inputs 48..96, inside its Q4_1 blocks of 32; \
                 choose another tensor-parallel degree, or a file of another type"
                .to_owned())
        );
    }

    /// The bytes of rows; seeded rows are made first.
    fn rows_of(Stored { rows, cols, data }: Stored<'_>) -> (usize, usize, Vec<u8>) {
        let made = |all: SeededRows| {
            let mut bytes = vec![0; 2 * rows * cols];
            bytes.chunks_mut(2 * cols).enumerate().for_each(|(i, out)| all.fill_row(i, out));
            bytes
        };
        let bytes = match data {
            WeightData::Stored(bytes) => bytes.into_owned(),
            WeightData::Seeded(all) => made(all),
        };
        (rows, cols, bytes)
    }

    #[test]
    fn what_a_rank_makes_is_what_it_would_hold_of_a_file() {
        let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
        for (ranks, rank) in [(1, 0), (2, 0), (2, 1)] {
            let sharding = Sharding::of(&model, ranks, rank).unwrap();
            for name in model.tensors().into_iter().filter(|t| t.shape.len() == 2).map(|t| t.name) {
                let (tensor, part) = (model.tensor(name).unwrap(), sharding.part(name));
                let stored = TensorRef { data: WeightData::Stored(tensor.bytes()), ..tensor.clone() };
                let [made, stored] = [&tensor, &stored].map(|tensor| rows_of(part.of(name, tensor).unwrap()));
                assert!(made == stored, "{name:?} of rank {rank} of {ranks}");
            }
        }
    }

    #[test]
    fn a_part_of_a_part_is_made_as_all_of_it_is() {
        let values = Seeded { key: 3, middle: 0.0, spread: 1.0 };
        let data = WeightData::Seeded(SeededRows { values, first: 11, stride: 31 });
        let tensor = TensorRef { dtype: WeightDtype::Bf16, shape: vec![6, 24], data };
        let stored = TensorRef { data: WeightData::Stored(tensor.bytes()), ..tensor.clone() };
        for part in [Part::Whole, Part::Rows(2..5), Part::Columns(8..24)] {
            let [made, stored] = [&tensor, &stored].map(|t| rows_of(part.of(TensorName::Output, t).unwrap()));
            assert!(made == stored, "{part:?}");
        }
        let mut element = [0; 2];
        values.fill(11 + 5 * 31 + 23, &mut element);
        assert_eq!(tensor.bytes()[2 * (5 * 24 + 23)..], element, "the last of all");
    }
}
