//! The table of a GGUF file's tensors, built from its header. Bytes stay in the mapping.

use std::io::Cursor;
use std::path::Path;

use baton_model_text::TensorFacts;
use baton_model_text::gguf::Header;
use candle_core::quantized::GgmlDType;

use crate::names::Naming;
use crate::store::{MappedFile, StoredDtype, TensorStore};
use crate::{ModelFileError, TensorName, TensorRef, WeightDtype};

/// Maps a file; returns its header and its tensors.
pub(crate) fn open(path: &Path) -> Result<(Header, TensorStore), ModelFileError> {
    let mapped = MappedFile::open(path)?;
    let header = Header::read(path, &mut Cursor::new(mapped.bytes()), mapped.bytes().len() as u64)?;
    let data_start = usize::try_from(header.data_start).ok();
    let mut store = TensorStore::default();
    let file = store.add_file(mapped);
    for (name, info) in &header.tensors {
        let shape = info.shape.dims().to_vec();
        let start = usize::try_from(info.offset).ok().and_then(|offset| offset.checked_add(data_start?));
        let (dtype, bytes) = match supported(info.ggml_dtype) {
            Some(dtype) => (StoredDtype::Supported(dtype), dtype.tensor_bytes(&shape)),
            // Of no use to the decoder, so its extent does not matter.
            None => (StoredDtype::Unsupported(format!("{:?}", info.ggml_dtype)), Some(0)),
        };
        store.insert(file, name, dtype, shape, start, bytes)?;
    }
    Ok((header, store))
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

/// What the configuration needs to know about the tensors.
pub(crate) fn tensor_facts(path: &Path, header: &Header, store: &TensorStore) -> Result<TensorFacts, ModelFileError> {
    Ok(TensorFacts { rope_freqs: rope_freqs(path, store)?, ..TensorFacts::of(header) })
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
