//! A GGUF file: its metadata as keys, its tensors as a table. candle-core parses the header; bytes stay in the mapping.

use std::collections::HashMap;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use serde_json::{Map, Number};

use crate::config::Keys;
use crate::config::gguf::TensorFacts;
use crate::names::Naming;
use crate::store::{MappedFile, StoredDtype, TensorStore};
use crate::{LayerTensor, ModelFileError, TensorName, TensorRef, WeightDtype};

/// Arrays up to this long become keys; longer ones belong to the tokenizer.
const KEY_ARRAY: usize = 4096;

/// An open GGUF file.
pub(crate) struct GgufFile {
    pub keys: Keys,
    /// Everything, the tokenizer's arrays included.
    pub metadata: HashMap<String, Value>,
    pub tensors: TensorStore,
}

pub(crate) fn open(path: &Path) -> Result<GgufFile, ModelFileError> {
    let mapped = MappedFile::open(path)?;
    let content = parse_header(&mapped)?;
    let keys = Keys::new(path, scalar_keys(&content.metadata));
    if keys.or("split.count", 1u32)? > 1 {
        return Err(keys.error("split.count", "the model is split over several GGUF files; merge them into one first"));
    }
    let mut tensors = TensorStore::default();
    let file = tensors.add_file(mapped);
    for (name, info) in &content.tensor_infos {
        let shape = info.shape.dims().to_vec();
        let start = usize::try_from(info.offset)
            .ok()
            .and_then(|offset| offset.checked_add(usize::try_from(content.tensor_data_offset).ok()?));
        let (dtype, bytes) = match supported(info.ggml_dtype) {
            Some(dtype) => (StoredDtype::Supported(dtype), dtype.tensor_bytes(&shape)),
            // Of no use to the decoder, so its extent does not matter.
            None => (StoredDtype::Unsupported(format!("{:?}", info.ggml_dtype)), Some(0)),
        };
        tensors.insert(file, name, dtype, shape, start, bytes)?;
    }
    Ok(GgufFile { keys, metadata: content.metadata, tensors })
}

fn parse_header(mapped: &MappedFile) -> Result<Content, ModelFileError> {
    let malformed = |reason: &str| ModelFileError::malformed(&mapped.path, "GGUF", reason);
    if !mapped.bytes().starts_with(b"GGUF") {
        return Err(malformed("it does not begin with the letters GGUF"));
    }
    // The parser checks lengths but divides by the file's own alignment: a hostile file must be an error here (I8).
    let parsed = catch_unwind(AssertUnwindSafe(|| Content::read(&mut Cursor::new(mapped.bytes()))));
    match parsed {
        Ok(Ok(content)) => Ok(content),
        Ok(Err(e)) => {
            let reason = e.to_string();
            // The parser reports an early end of the file in these two ways, both as text.
            if reason.contains("fill whole buffer") || reason.contains("remaining") {
                Err(mapped.truncated(format!("the header is cut off ({})", first_line(&reason))))
            } else {
                Err(malformed(first_line(&reason)))
            }
        }
        Err(_) => Err(malformed("general.alignment is 0")),
    }
}

/// Without the backtrace that candle's errors may carry.
fn first_line(reason: &str) -> &str {
    reason.lines().next().unwrap_or(reason)
}

fn supported(dtype: GgmlDType) -> Option<WeightDtype> {
    Some(match dtype {
        GgmlDType::F32 => WeightDtype::F32,
        GgmlDType::F16 => WeightDtype::F16,
        GgmlDType::BF16 => WeightDtype::Bf16,
        GgmlDType::Q4_0 => WeightDtype::Q4_0,
        GgmlDType::Q4_1 => WeightDtype::Q4_1,
        GgmlDType::Q5_0 => WeightDtype::Q5_0,
        GgmlDType::Q5_1 => WeightDtype::Q5_1,
        GgmlDType::Q8_0 => WeightDtype::Q8_0,
        GgmlDType::Q4K => WeightDtype::Q4K,
        GgmlDType::Q5K => WeightDtype::Q5K,
        GgmlDType::Q6K => WeightDtype::Q6K,
        GgmlDType::Q8_1 | GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q8K => return None,
    })
}

fn scalar_keys(metadata: &HashMap<String, Value>) -> Map<String, serde_json::Value> {
    metadata.iter().filter_map(|(key, value)| Some((key.clone(), to_json(value)?))).collect()
}

/// A value as JSON; None for long or nested arrays and for numbers JSON lacks (NaN, infinities).
fn to_json(value: &Value) -> Option<serde_json::Value> {
    Some(match value {
        Value::U8(v) => (*v).into(),
        Value::I8(v) => (*v).into(),
        Value::U16(v) => (*v).into(),
        Value::I16(v) => (*v).into(),
        Value::U32(v) => (*v).into(),
        Value::I32(v) => (*v).into(),
        Value::U64(v) => (*v).into(),
        Value::I64(v) => (*v).into(),
        Value::F32(v) => serde_json::Value::Number(Number::from_f64(f64::from(*v))?),
        Value::F64(v) => serde_json::Value::Number(Number::from_f64(*v)?),
        Value::Bool(v) => (*v).into(),
        Value::String(v) => v.clone().into(),
        Value::Array(items) if items.len() <= KEY_ARRAY && !matches!(items.first(), Some(Value::Array(_))) => {
            serde_json::Value::Array(items.iter().map(to_json).collect::<Option<_>>()?)
        }
        Value::Array(_) => return None,
    })
}

/// What the configuration needs to know about the tensors.
pub(crate) fn tensor_facts(path: &Path, store: &TensorStore) -> Result<TensorFacts, ModelFileError> {
    let text = |name| Naming::Gguf.text(name);
    let embedding = text(TensorName::Embedding);
    let rows = store.get(&embedding).map(|entry| entry.shape.first().copied().unwrap_or(0));
    let rows = rows.ok_or_else(|| ModelFileError::tensor(path, &embedding, "is missing"))?;
    let vocab_size = u32::try_from(rows)
        .map_err(|_| ModelFileError::tensor(path, &embedding, format!("has {rows} rows, more than any vocabulary")))?;
    Ok(TensorFacts {
        vocab_size,
        has_output: store.get(&text(TensorName::Output)).is_some(),
        has_qkv_bias: store.get(&text(TensorName::Layer(0, LayerTensor::QBias))).is_some(),
        rope_freqs: rope_freqs(path, store)?,
    })
}

fn rope_freqs(path: &Path, store: &TensorStore) -> Result<Option<Vec<f32>>, ModelFileError> {
    let name = Naming::Gguf.text(TensorName::RopeFreqs);
    let Some(entry) = store.get(&name) else { return Ok(None) };
    match store.view(entry) {
        Some(tensor @ TensorRef { dtype: WeightDtype::F32, .. }) => {
            let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
            Ok(Some(tensor.bytes().as_chunks::<4>().0.iter().map(number).collect()))
        }
        _ => Err(ModelFileError::tensor(path, &name, "must be of element type F32")),
    }
}
