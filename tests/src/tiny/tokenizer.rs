//! A byte-level tokenizer: id b stands for byte b, then BOS, EOS and padding. Higher ids of a vocabulary have no text.

use anyhow::ensure;
use serde_json::{Map, Value, json};

const SPECIAL: [&str; 3] = ["<s>", "</s>", "<pad>"];
const FIRST_SPECIAL: usize = 256;

/// `tokenizer.json` for a model of `vocab_size` ids.
pub(super) fn tokenizer(vocab_size: usize) -> anyhow::Result<Value> {
    let needed = FIRST_SPECIAL + SPECIAL.len();
    ensure!(vocab_size >= needed, "config.vocab_size is {vocab_size}; the byte-level tokenizer needs {needed}");
    let vocab: Map<_, _> = (0..=255u8).map(|b| (byte_char(b).to_string(), b.into())).collect();
    let added: Vec<_> = SPECIAL
        .iter()
        .zip(FIRST_SPECIAL..)
        .map(|(content, id)| {
            json!({ "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false })
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    }))
}

/// `tokenizer_config.json`, with a chat template of one line a message.
pub(super) fn tokenizer_config() -> Value {
    let template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}\
        {% if add_generation_prompt %}assistant: {% endif %}";
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "add_bos_token": false,
        "clean_up_tokenization_spaces": false,
        "chat_template": template,
    })
}

/// The visible character byte-level tokenizers write for a byte: itself where it is printable Latin-1, otherwise the
/// next unused one from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(&byte) {
        return char::from(byte);
    }
    let earlier = (0..byte).filter(|b| !printable(b)).count() as u32;
    char::from_u32(0x100 + earlier).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_usual_characters() {
        assert_eq!([b' ', b'\n', 0, b'a', 0xad, 0xff].map(byte_char), ['Ġ', 'Ċ', 'Ā', 'a', 'Ń', 'ÿ']);
        let tokenizer = tokenizer(259).unwrap();
        assert_eq!(tokenizer["model"]["vocab"].as_object().unwrap().len(), 256);
    }

    #[test]
    fn a_vocabulary_without_room_is_refused() {
        assert!(tokenizer(258).unwrap_err().to_string().contains("vocab_size is 258"));
    }
}
