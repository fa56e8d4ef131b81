//! Writes safetensors files: an 8-byte little-endian header length, a JSON header, the tensors' bytes one after another.

use std::path::Path;

use anyhow::{Context, ensure};
use half::{bf16, f16};
use serde_json::{Map, Value, json};

use super::{FileDtype, TensorSpec, TinyModel, write_json};

/// Writes all tensors of a model into `dir`: `model.safetensors`, or shards and their index.
pub(super) fn write(model: &TinyModel, dir: &Path) -> anyhow::Result<()> {
    let tensors = model.tensors()?;
    ensure!(
        (1..=tensors.len()).contains(&model.shards),
        "shards is {}; it must be between 1 and the {} tensors",
        model.shards,
        tensors.len()
    );
    if model.shards == 1 {
        return write_file(model, &tensors, &dir.join("model.safetensors"));
    }
    let (mut map, mut total) = (Map::new(), 0);
    // Dealt like cards, so that every shard has some tensors of every layer.
    for shard in 0..model.shards {
        let name = format!("model-{:05}-of-{:05}.safetensors", shard + 1, model.shards);
        let mine: Vec<_> = tensors.iter().skip(shard).step_by(model.shards).cloned().collect();
        write_file(model, &mine, &dir.join(&name))?;
        total += mine.iter().map(|t| t.elements() * model.dtype.bytes()).sum::<usize>();
        map.extend(mine.into_iter().map(|t| (t.name, Value::from(name.as_str()))));
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    write_json(&dir.join("model.safetensors.index.json"), &index)
}

fn write_file(model: &TinyModel, tensors: &[TensorSpec], path: &Path) -> anyhow::Result<()> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    for tensor in tensors {
        let start = data.len();
        model.dtype.encode(&tensor.values(model.seed), &mut data);
        let entry = json!({ "dtype": model.dtype.name(), "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = serde_json::to_vec(&header)?;
    // Spaces at the end keep the data aligned to 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.append(&mut header);
    file.append(&mut data);
    std::fs::write(path, file).with_context(|| format!("writing {}", path.display()))
}

impl FileDtype {
    fn name(self) -> &'static str {
        match self {
            FileDtype::F32 => "F32",
            FileDtype::Bf16 => "BF16",
            FileDtype::F16 => "F16",
        }
    }

    fn bytes(self) -> usize {
        match self {
            FileDtype::F32 => 4,
            FileDtype::Bf16 | FileDtype::F16 => 2,
        }
    }

    fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        for &value in values {
            match self {
                FileDtype::F32 => out.extend(value.to_le_bytes()),
                FileDtype::Bf16 => out.extend(bf16::from_f32(value).to_le_bytes()),
                FileDtype::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (dtype, shape, bytes) of a tensor in a file, read by the format's definition.
    fn read(path: &Path, name: &str) -> (String, Vec<usize>, Vec<u8>) {
        let bytes = std::fs::read(path).unwrap();
        let header_length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(header_length % 8, 0);
        let header: Value = serde_json::from_slice(&bytes[8..8 + header_length]).unwrap();
        let entry = &header[name];
        let range = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        let data = bytes[8 + header_length..][range(0)..range(1)].to_vec();
        (entry["dtype"].as_str().unwrap().to_owned(), serde_json::from_value(entry["shape"].clone()).unwrap(), data)
    }

    #[test]
    fn what_is_written_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["llama-mha", "qwen2-tied-f16", "llama-bf16"] {
            let model = crate::tiny::config(name).unwrap();
            write(&model, dir.path()).unwrap();
            let index = std::fs::read(dir.path().join("model.safetensors.index.json"));
            let map = index.map(|bytes| serde_json::from_slice::<Value>(&bytes).unwrap()).unwrap_or_default();
            for tensor in model.tensors().unwrap() {
                let file = map["weight_map"][&tensor.name].as_str().unwrap_or("model.safetensors").to_owned();
                let (dtype, shape, data) = read(&dir.path().join(file), &tensor.name);
                assert_eq!((dtype.as_str(), shape), (model.dtype.name(), tensor.shape.clone()));
                let mut want = Vec::new();
                model.dtype.encode(&tensor.values(model.seed), &mut want);
                assert!(data == want, "{name} {}", tensor.name);
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        let mut out = Vec::new();
        FileDtype::Bf16.encode(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0], &mut out);
        assert_eq!(out, [0x80, 0x3f, 0x82, 0x3f], "both lie half way between two neighbours");
    }
}
