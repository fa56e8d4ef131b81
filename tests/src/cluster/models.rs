//! Models to serve.

use std::path::Path;

use baton_model::kv_layout;
use baton_model_files::Model;
use baton_types::{KvDtype, KvLayout, PoolGeometry};
use serde_json::json;
use tempfile::TempDir;

use crate::tiny::{self, FileDtype, TinyModel};

/// A model that answers in milliseconds; 512 tokens of context.
pub fn tiny() -> anyhow::Result<TempDir> {
    let dir = tempfile::tempdir()?;
    tiny::config("llama-gqa-odd-vocab")?.write(dir.path())?;
    Ok(dir)
}

/// Bytes of a block of 16 tokens of a model's KV pool, in f16.
pub fn block_bytes(model: &Path) -> anyhow::Result<u64> {
    Ok(layout(model)?.block_bytes_all_groups())
}

/// Where blocks lie in a pool of so many.
pub fn pool_geometry(model: &Path, blocks: u32) -> anyhow::Result<PoolGeometry> {
    Ok(PoolGeometry::uniform(layout(model)?, blocks))
}

/// As workers have it that are told nothing else.
fn layout(model: &Path) -> anyhow::Result<KvLayout> {
    let model = Model::open(model)?;
    Ok(kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16))
}

/// A model slow enough to be caught in the middle of a prompt or of an answer; 8,192 tokens of context.
pub fn slow() -> anyhow::Result<TempDir> {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 256,
        "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": true, "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "float32",
    });
    let dir = tempfile::tempdir()?;
    TinyModel { name: "slow".to_owned(), seed: 1, dtype: FileDtype::F32, shards: 1, config }.write(dir.path())?;
    Ok(dir)
}
