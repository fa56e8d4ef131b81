//! A model whose tokens are bytes: id 65 is "A". It has no weights: the router never reads any.
#![allow(clippy::unwrap_used)] // Only tests are here.

use std::path::Path;

use baton_model_text::TextModel;
use serde_json::{Map, Value, json};

/// The id by which clients ask for the model.
pub const MODEL: &str = "bytes";
/// The name in the model's files.
pub const NAME: &str = "byte-model";
/// Longest sequence, tokens.
pub const CONTEXT: u32 = 512;
/// The token that ends an answer.
pub const END: u32 = 257;
/// The special token that announces calls in the Mistral syntax.
pub const CALLS: u32 = 258;
const VOCAB: u32 = 260;
const WIDTH: usize = 4;

/// A template that writes one message after the other and knows no tools.
pub const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The character that byte-level tokenizers write for a byte.
fn byte_char(byte: u8) -> char {
    let plain = |b: u8| (33..=126).contains(&b) || (161..=172).contains(&b) || b >= 174;
    match plain(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|b| !plain(*b)).count() as u32;
            char::from_u32(256 + before).unwrap()
        }
    }
}

fn tokenizer() -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (byte_char(b).to_string(), b.into())).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(256, "<|im_start|>"), special(END, "<|im_end|>"), special(CALLS, "[TOOL_CALLS]")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []},
    })
}

/// Writes the model with this chat template below `dir` and opens it.
///
/// # Panics
/// When the model cannot be written or opened.
pub fn write_and_open(dir: &Path, template: &str) -> TextModel {
    write_and_open_as(dir, NAME, template)
}

/// The same for a model whose files have another name.
///
/// # Panics
/// As above.
pub fn write_and_open_as(dir: &Path, name: &str, template: &str) -> TextModel {
    let dir = dir.join(name);
    std::fs::create_dir(&dir).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH,
        "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "eos_token_id": END, "hidden_act": "silu",
    });
    let settings = json!({"eos_token": "<|im_end|>", "chat_template": template});
    for (name, json) in [("config.json", config), ("tokenizer.json", tokenizer()), ("tokenizer_config.json", settings)]
    {
        std::fs::write(dir.join(name), json.to_string()).unwrap();
    }
    TextModel::open(&dir).unwrap()
}
