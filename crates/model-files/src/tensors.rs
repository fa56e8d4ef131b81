//! Names, element types and views of tensors, the same for every file format.
//!
//! Bytes stay where the file's mapping has them; nothing here decodes or copies weights.

use std::borrow::Cow;

use baton_types::WeightData;
pub use baton_types::WeightDtype;

/// Which tensor of a model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum TensorName {
    /// `[vocab, hidden]`.
    Embedding,
    /// `[hidden]`.
    OutputNorm,
    /// `[vocab, hidden]`; absent where embeddings are tied.
    Output,
    /// `[head_dim / 2]`, divisors of rope frequencies; only some GGUF files.
    RopeFreqs,
    /// A tensor of a layer; layers are counted from 0.
    Layer(u32, LayerTensor),
}

/// Which tensor of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum LayerTensor {
    /// `[hidden]`, before attention.
    AttnNorm,
    /// `[heads · head_dim, hidden]`.
    Q,
    /// `[kv_heads · head_dim, hidden]`.
    K,
    /// `[kv_heads · head_dim, hidden]`.
    V,
    /// `[heads · head_dim]`.
    QBias,
    /// `[kv_heads · head_dim]`.
    KBias,
    /// `[kv_heads · head_dim]`.
    VBias,
    /// `[hidden, heads · head_dim]`.
    AttnOutput,
    /// `[head_dim]`.
    QNorm,
    /// `[head_dim]`.
    KNorm,
    /// `[hidden]`, after attention.
    PostAttnNorm,
    /// `[hidden]`, before the feed-forward block.
    FfnNorm,
    /// `[intermediate, hidden]`.
    Gate,
    /// `[intermediate, hidden]`.
    Up,
    /// `[hidden, intermediate]`.
    Down,
    /// `[hidden]`, after the feed-forward block.
    PostFfnNorm,
}

impl LayerTensor {
    /// Every kind, in the order of computation.
    pub const ALL: [LayerTensor; 16] = [
        LayerTensor::AttnNorm,
        LayerTensor::Q,
        LayerTensor::K,
        LayerTensor::V,
        LayerTensor::QBias,
        LayerTensor::KBias,
        LayerTensor::VBias,
        LayerTensor::AttnOutput,
        LayerTensor::QNorm,
        LayerTensor::KNorm,
        LayerTensor::PostAttnNorm,
        LayerTensor::FfnNorm,
        LayerTensor::Gate,
        LayerTensor::Up,
        LayerTensor::Down,
        LayerTensor::PostFfnNorm,
    ];
}

/// A tensor's name, element type and shape.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// Which one.
    pub name: TensorName,
    /// Element type.
    pub dtype: WeightDtype,
    /// Row-major.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Bytes it takes as stored.
    pub fn bytes(&self) -> u64 {
        self.dtype.tensor_bytes(&self.shape).unwrap_or(0) as u64
    }
}

/// A tensor as the file stores it, or the rule by which a random one is made.
#[derive(Clone, Debug)]
pub struct TensorRef<'a> {
    /// Element type.
    pub dtype: WeightDtype,
    /// Row-major: `[out, in]` of a projection, `[n]` of a vector.
    pub shape: Vec<usize>,
    /// Its elements; stored ones are `dtype.tensor_bytes(&shape)` bytes.
    pub data: WeightData<'a>,
}

impl TensorRef<'_> {
    /// All bytes in stored form. The elements of a random tensor are made by this call.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.data {
            WeightData::Stored(bytes) => Cow::Borrowed(bytes),
            WeightData::Seeded(rows) => {
                let mut bytes = vec![0; self.dtype.tensor_bytes(&self.shape).unwrap_or(0)];
                let row = self.dtype.block_bytes() * self.shape.last().copied().unwrap_or(0);
                bytes.chunks_mut(row.max(1)).enumerate().for_each(|(i, out)| rows.fill_row(i, out));
                Cow::Owned(bytes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_the_reader_of_the_format() {
        use candle_core::quantized::GgmlDType;
        let pairs = [
            (WeightDtype::F32, GgmlDType::F32),
            (WeightDtype::F16, GgmlDType::F16),
            (WeightDtype::Bf16, GgmlDType::BF16),
            (WeightDtype::Q4_0, GgmlDType::Q4_0),
            (WeightDtype::Q4_1, GgmlDType::Q4_1),
            (WeightDtype::Q5_0, GgmlDType::Q5_0),
            (WeightDtype::Q5_1, GgmlDType::Q5_1),
            (WeightDtype::Q8_0, GgmlDType::Q8_0),
            (WeightDtype::Q4K, GgmlDType::Q4K),
            (WeightDtype::Q5K, GgmlDType::Q5K),
            (WeightDtype::Q6K, GgmlDType::Q6K),
        ];
        for (ours, theirs) in pairs {
            assert_eq!(
                (ours.block_elements(), ours.block_bytes()),
                (theirs.block_size(), theirs.type_size()),
                "{ours}"
            );
        }
    }

    #[test]
    fn rows_are_whole_blocks_and_sizes_do_not_overflow() {
        assert_eq!(WeightDtype::Q4_1.tensor_bytes(&[3, 64]), Some(120));
        assert_eq!(WeightDtype::Q4_1.tensor_bytes(&[32, 3]), None, "elements divide, rows do not");
        assert_eq!(WeightDtype::F32.tensor_bytes(&[usize::MAX, 2]), None);
        assert_eq!(WeightDtype::Q8_0.tensor_bytes(&[0, usize::MAX - 31]), None, "found by fuzzing");
        assert_eq!(WeightDtype::F32.tensor_bytes(&[]), Some(4));
    }
}
