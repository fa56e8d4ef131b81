//! A safetensors writer, and tiny Hugging Face directories to write with it.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::{byte_level_vocab, noise};

/// Name, dtype and shape of each tensor.
pub type Tensors = BTreeMap<String, (&'static str, Vec<usize>)>;

pub fn bytes(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, (dtype, shape)) in tensors {
        let size = match *dtype {
            "F32" => 4,
            "F16" | "BF16" => 2,
            "I64" => 8,
            other => panic!("{other}"),
        };
        let start = data.len();
        data.extend(noise(name, shape.iter().product::<usize>() * size));
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    [(header.len() as u64).to_le_bytes().to_vec(), header, data].concat()
}

pub const MERGES: [(&str, &str); 2] = [("h", "i"), ("Ġ", "hi")];
pub const SPECIAL: [&str; 3] = ["<s>", "</s>", "<|eot_id|>"];
pub const VOCAB: usize = 256 + MERGES.len() + SPECIAL.len();

pub fn tokenizer_json() -> Value {
    let tokens = byte_level_vocab(&MERGES, &SPECIAL);
    let vocab: BTreeMap<&String, usize> = tokens.iter().take(VOCAB - SPECIAL.len()).zip(0..).collect();
    let added = |(i, content): (usize, &&str)| {
        let id = VOCAB - SPECIAL.len() + i;
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
    };
    json!({
        "version": "1.0",
        "added_tokens": SPECIAL.iter().enumerate().map(added).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [VOCAB - 3], "tokens": ["<s>"]}}
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": MERGES.iter().map(|(a, b)| format!("{a} {b}")).collect::<Vec<_>>()
        }
    })
}

/// What every family's `config.json` has.
pub fn base_config(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "eos_token_id": VOCAB - 2, "head_dim": 8
    })
}

/// The tensors of `base_config` for a family.
pub fn tensors(model_type: &str, dtype: &'static str) -> Tensors {
    let gemma = model_type.starts_with("gemma3");
    let mut all = Tensors::new();
    let mut add = |name: String, shape: &[usize]| {
        all.insert(name, (dtype, shape.to_vec()));
    };
    add("model.embed_tokens.weight".to_owned(), &[VOCAB, 32]);
    add("model.norm.weight".to_owned(), &[32]);
    if !gemma {
        add("lm_head.weight".to_owned(), &[VOCAB, 32]);
    }
    for layer in 0..2 {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for (part, out, input) in [
            ("self_attn.q_proj", 32, 32),
            ("self_attn.k_proj", 16, 32),
            ("self_attn.v_proj", 16, 32),
            ("self_attn.o_proj", 32, 32),
            ("mlp.gate_proj", 48, 32),
            ("mlp.up_proj", 48, 32),
            ("mlp.down_proj", 32, 48),
        ] {
            add(name(&format!("{part}.weight")), &[out, input]);
            if model_type == "qwen2" && matches!(part, "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj") {
                add(name(&format!("{part}.bias")), &[out]);
            }
        }
        add(name("input_layernorm.weight"), &[32]);
        add(name("post_attention_layernorm.weight"), &[32]);
        if gemma {
            add(name("pre_feedforward_layernorm.weight"), &[32]);
            add(name("post_feedforward_layernorm.weight"), &[32]);
        }
        if gemma || model_type == "qwen3" {
            add(name("self_attn.q_norm.weight"), &[8]);
            add(name("self_attn.k_norm.weight"), &[8]);
        }
    }
    all
}

/// Writes a complete directory.
pub fn write_directory(dir: &Path, config: &Value, tensors: &Tensors) {
    let write = |name: &str, value: &Value| std::fs::write(dir.join(name), value.to_string()).unwrap();
    write("config.json", config);
    write("tokenizer.json", &tokenizer_json());
    write(
        "tokenizer_config.json",
        &json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>"},
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        }),
    );
    write("generation_config.json", &json!({"eos_token_id": [VOCAB - 2, VOCAB - 1]}));
    std::fs::write(dir.join("model.safetensors"), bytes(tensors)).unwrap();
}
