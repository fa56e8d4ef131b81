//! The weights of a Hugging Face directory: one safetensors file, or shards named by an index. The `safetensors` crate parses the header;
//! bytes stay in the mapping.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use baton_model_text::Keys;
use baton_model_text::fetch::{INDEX, SINGLE};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::store::{MappedFile, StoredDtype, TensorStore};
use crate::{ModelFileError, WeightDtype};

/// Maps the directory's weights.
pub(crate) fn open(dir: &Path) -> Result<TensorStore, ModelFileError> {
    let mut store = TensorStore::default();
    for path in weight_files(dir)? {
        add_file(&mut store, &path)?;
    }
    Ok(store)
}

fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelFileError> {
    let index = dir.join(INDEX);
    if !index.exists() {
        return Ok(vec![dir.join(SINGLE)]);
    }
    shard_names(&index).map(|names| names.into_iter().map(|name| dir.join(name)).collect())
}

/// The files that an index names, each a plain file name.
pub(crate) fn shard_names(index: &Path) -> Result<BTreeSet<String>, ModelFileError> {
    let keys = Keys::read_json(index)?;
    let names: BTreeSet<String> = keys.need::<BTreeMap<String, String>>("weight_map")?.into_values().collect();
    match names.iter().find(|name| name.contains(['/', '\\']) || name.starts_with('.') || name.is_empty()) {
        Some(bad) => Err(keys.error("weight_map", format!("{bad:?} is not a file name in this directory"))),
        None if names.is_empty() => Err(keys.error("weight_map", "names no file")),
        None => Ok(names),
    }
}

fn add_file(store: &mut TensorStore, path: &Path) -> Result<(), ModelFileError> {
    let file = store.add_file(MappedFile::open(path)?);
    let mut found = Vec::new();
    {
        let mapped = store.file(file);
        check_extent(mapped)?;
        let parsed = SafeTensors::deserialize(mapped.bytes())
            .map_err(|error| ModelFileError::malformed(path, "safetensors", error))?;
        for (name, view) in parsed.iter() {
            let start = view.data().as_ptr() as usize - mapped.bytes().as_ptr() as usize;
            let dtype = match view.dtype() {
                Dtype::F32 => StoredDtype::Supported(WeightDtype::F32),
                Dtype::F16 => StoredDtype::Supported(WeightDtype::F16),
                Dtype::BF16 => StoredDtype::Supported(WeightDtype::Bf16),
                other => StoredDtype::Unsupported(other.to_string()),
            };
            found.push((name.to_owned(), dtype, view.shape().to_vec(), start, view.data().len()));
        }
    }
    for (name, dtype, shape, start, bytes) in found {
        store.insert(file, &name, dtype, shape, Some(start), Some(bytes))?;
    }
    Ok(())
}

#[derive(Deserialize)]
struct Extent {
    data_offsets: (u64, u64),
}

/// Tells a truncated file from a malformed one, which the parser's own error does not.
fn check_extent(mapped: &MappedFile) -> Result<(), ModelFileError> {
    let bytes = mapped.bytes();
    let Some(prefix) = bytes.first_chunk::<8>() else {
        return Err(mapped.truncated("the header's length is cut off".to_owned()));
    };
    let header_end = u64::from_le_bytes(*prefix).saturating_add(8);
    let Some(header) = usize::try_from(header_end).ok().and_then(|end| bytes.get(8..end)) else {
        return Err(mapped.truncated(format!("the header ends at byte {header_end}")));
    };
    // The parser rejects a header that is not JSON.
    let Ok(entries) = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(header) else { return Ok(()) };
    let ends = entries.values().filter_map(|entry| Extent::deserialize(entry).ok()).map(|entry| entry.data_offsets.1);
    let end = header_end.saturating_add(ends.max().unwrap_or(0));
    if end > bytes.len() as u64 {
        return Err(mapped.truncated(format!("tensor data ends at byte {end}")));
    }
    Ok(())
}
