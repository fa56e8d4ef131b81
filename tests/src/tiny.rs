//! Tiny random models of every architecture, written as Hugging Face directories.
//!
//! Weights come from a formula over the tensor's name, the same to the bit as in `tests/references/transformers_tiny.py`,
//! so that nothing but configurations and reference outputs is committed. A directory has `config.json`, safetensors
//! (one file, or shards with an index) and a byte-level tokenizer: enough to serve it.

mod safetensors;
mod tokenizer;
mod weights;

use std::path::Path;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use weights::{TensorSpec, random_u64};

/// Element type of the weights in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileDtype {
    /// IEEE single precision.
    F32,
    /// bfloat16, rounded to nearest even.
    Bf16,
    /// IEEE half precision, rounded to nearest even.
    F16,
}

/// Everything that determines a tiny model. Make your own for shapes that are not among [`configs`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TinyModel {
    /// Short, unique.
    pub name: String,
    /// Another seed, other weights.
    pub seed: u64,
    /// Element type of the weights in the file.
    pub dtype: FileDtype,
    /// Number of safetensors files; more than one come with an index.
    pub shards: usize,
    /// The content of `config.json`. `architectures`, `vocab_size`, `hidden_size`, `intermediate_size`,
    /// `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `tie_word_embeddings` must be there.
    pub config: Value,
}

/// The models that have reference outputs, see [`crate::references::tiny`].
pub fn configs() -> anyhow::Result<Vec<TinyModel>> {
    crate::references::read("data/tiny_configs.json")
}

/// One of [`configs`] by name.
pub fn config(name: &str) -> anyhow::Result<TinyModel> {
    let all = configs()?;
    let names: Vec<_> = all.iter().map(|c| c.name.clone()).collect();
    all.into_iter().find(|c| c.name == name).with_context(|| format!("no tiny model {name}; there are {names:?}"))
}

impl TinyModel {
    /// Rows of the embedding and of the logits.
    pub fn vocab_size(&self) -> anyhow::Result<usize> {
        self.size("vocab_size")
    }

    /// Every tensor with its shape, sorted by name.
    pub fn tensors(&self) -> anyhow::Result<Vec<TensorSpec>> {
        weights::tensors(self)
    }

    /// Writes the model into `dir`, which is created. The same model gives the same bytes.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        write_json(&dir.join("config.json"), &self.config)?;
        write_json(&dir.join("tokenizer.json"), &tokenizer::tokenizer(self.vocab_size()?)?)?;
        write_json(&dir.join("tokenizer_config.json"), &tokenizer::tokenizer_config())?;
        safetensors::write(self, dir)
    }

    fn architecture(&self) -> anyhow::Result<&str> {
        self.config["architectures"][0].as_str().context("config.architectures[0] must be a string")
    }

    fn size(&self, field: &str) -> anyhow::Result<usize> {
        let value = &self.config[field];
        let size =
            value.as_u64().with_context(|| format!("config.{field} is {value}; it must be a positive number"))?;
        ensure!(size > 0, "config.{field} is 0; it must be positive");
        Ok(size as usize)
    }
}

fn write_json(path: &Path, value: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_bit_equal_to_the_ones_the_references_were_made_with() {
        let reference = crate::references::tiny().unwrap();
        for (model, want) in configs().unwrap().iter().zip(&reference.models) {
            let tensors = model.tensors().unwrap();
            let names: Vec<_> = tensors.iter().map(|t| (&t.name, &t.shape)).collect();
            let want_names: Vec<_> = want.tensors.iter().map(|t| (&t.name, &t.shape)).collect();
            assert_eq!(names, want_names, "{}", model.name);
            for (tensor, want) in tensors.iter().zip(&want.tensors) {
                let values = tensor.values(model.seed);
                let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&values[..2]), bits(&want.first), "{} {}", model.name, tensor.name);
                let sum = values
                    .iter()
                    .enumerate()
                    .fold(0u64, |sum, (i, v)| sum.wrapping_add(u64::from(v.to_bits()).wrapping_mul(2 * i as u64 + 1)));
                assert_eq!(format!("{sum:016x}"), want.checksum, "{} {}", model.name, tensor.name);
            }
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let mut model = config("llama-mha").unwrap();
        model.config["hidden_size"] = Value::Null;
        let error = model.tensors().unwrap_err().to_string();
        assert!(error.contains("hidden_size"), "{error}");
        assert!(config("nothing").unwrap_err().to_string().contains("llama-mha"));
    }

    #[test]
    fn a_directory_has_all_files_and_is_reproducible() {
        let dir = tempfile::tempdir().unwrap();
        let model = config("llama-bf16").unwrap();
        for name in ["a", "b"] {
            model.write(&dir.path().join(name)).unwrap();
        }
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path().join("a")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(
            names,
            [
                "config.json",
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        for name in names {
            let read = |d: &str| std::fs::read(dir.path().join(d).join(&name)).unwrap();
            assert_eq!(read("a"), read("b"));
        }
    }
}
