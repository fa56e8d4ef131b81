//! Real models, fetched by name into the user's cache: what their files say, and that text survives tokenising.

use anyhow::{Context, Result, ensure};
use baton_model_files::{Architecture, LayerTensor, Model, TensorName, WeightDtype, fetch, inspect};
use baton_model_text::{ChatMessage, FunctionCall, TokenCache, ToolCall, ToolSyntax};
use serde_json::json;

fn open(name: &str) -> Result<Model> {
    let path = fetch::resolve(name, &fetch::default_cache()?, &fetch::NoProgress)?;
    Model::open(&path).with_context(|| format!("model {name}"))
}

const TEXTS: [&str; 9] = [
    "The quick brown fox jumps over the lazy dog, 1234567 times — isn't that odd?",
    "  leading, trailing and   inner spaces  ",
    "今天天气很好，我们去公园散步吧。日本語カタカナ 한국어",
    "fn main() {\n\tprintln!(\"{:>8.3}\", x[0] as f64 / 2.0); // ok\r\n}\n\n\n",
    "👩‍🚀🎉 emoji 🇫🇷, combining a\u{301} e\u{308}, and Ünïcödé עברית العربية हिन्दी ไทย",
    "========\n--------\n| a | b |\n\u{a0}\u{3000}\u{2003}x",
    "\u{0}\u{1}\u{7f} control, \u{fffd} replacement, 𝒳𝓎𝓏 𠀀",
    "",
    "\n",
];

/// Text must come back from its tokens, both as a whole and as a stream.
fn round_trips(model: &Model) -> Result<()> {
    let tokenizer = model.tokenizer();
    for text in TEXTS {
        let ids = tokenizer.encode(text, false)?;
        ensure!(tokenizer.decode(&ids, false)? == text, "{text:?} comes back as {:?}", tokenizer.decode(&ids, false)?);
        let mut stream = tokenizer.stream(true);
        let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).into()).collect();
        ensure!(pieces.concat() + &stream.finish() == text, "{text:?} streams as {pieces:?}");
        let bytes = ids.iter().map(|&id| tokenizer.token_bytes(id)).collect::<Result<Vec<_>, _>>()?.concat();
        ensure!(bytes == text.as_bytes(), "{text:?} has the bytes {bytes:?}");
    }
    Ok(())
}

/// Parts of texts that are made to go wrong when they are cut: around every cut stands something else.
const PARTS: [&str; 36] = [
    " ",
    " ",
    " ",
    "a",
    "b c",
    "word",
    " the",
    "The quick brown fox",
    "isn't",
    " 's",
    "'ll go",
    "12",
    " 345",
    "7 days",
    "  ",
    "   x",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n ",
    ".",
    " (",
    "—",
    "é",
    "e\u{301} f",
    " \u{301}x",
    "漢字",
    " か な ",
    "👩‍🚀",
    "\u{a0}",
    "▁",
    "▁a",
    "<|im_end|>",
    "<|im_start|>user",
    "<end_of_turn>",
];

/// Tokens must be the same whether a text is tokenised whole or in chunks, some of which were seen before.
fn same_in_chunks(model: &Model) -> Result<()> {
    let tokenizer = model.tokenizer();
    ensure!(tokenizer.has_chunks());
    let cache = TokenCache::new(1 << 20);
    let tokens = |text: &str, special: bool| -> Result<(usize, Vec<u32>)> {
        let lookup = cache.look_up(tokenizer, text.to_owned(), special, "salt");
        Ok((lookup.found(), cache.complete(tokenizer, lookup)?))
    };
    // A linear congruential generator (Knuth's MMIX constants).
    let mut state = 1u64;
    let mut part = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        PARTS[(state >> 33) as usize % PARTS.len()]
    };
    for round in 0..200 {
        let text: String = (0..800).map(|_| part()).collect();
        let special = round % 2 == 0;
        let whole = tokenizer.encode(&text, special)?;
        for before in [false, true] {
            let (found, ids) = tokens(&text, special)?;
            let differs = ids.iter().zip(&whole).position(|(a, b)| a != b);
            ensure!(ids == whole, "round {round}, seen before: {before}, from token {differs:?}: {text:?}");
            ensure!(!before || found > text.len() / 2, "{found} bytes found of {}", text.len());
        }
    }
    let text = "It was a bright cold day in April, and the clocks were striking thirteen. ".repeat(60);
    let other = format!("{text}Winston");
    tokens(&text, true)?;
    let (found, ids) = tokens(&other, true)?;
    ensure!(found > other.len() * 9 / 10 && ids == tokenizer.encode(&other, true)?, "{found} of {}", other.len());
    let foreign = cache.look_up(tokenizer, other, true, "another salt");
    ensure!(foreign.found() == 0, "found with another salt");
    Ok(())
}

fn user(content: &str) -> ChatMessage {
    ChatMessage::new("user", content)
}

#[test]
fn smollm2() -> Result<()> {
    let model = open("smollm2")?;
    let config = model.config();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.layers, config.hidden_size, config.intermediate_size), (30, 576, 1536));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab_size, config.context_length, config.rope.theta), (49_152, 8192, 1e5));
    assert!(config.tied_embeddings && config.interleaved_qk);
    assert_eq!(model.tensor(TensorName::Embedding)?.dtype, WeightDtype::Q8_0);
    assert_eq!(model.tensor(TensorName::Layer(29, LayerTensor::Down))?.shape, [576, 1536]);
    // Two hosts must agree on it, so it is pinned.
    assert_eq!(format!("{:016x}", model.fingerprint()), "36e8eb366fd7946a");

    let tokenizer = model.tokenizer();
    assert_eq!(tokenizer.eos_ids(), [2, 0]);
    let chat = model.chat_template().context("an instruct model has a chat template")?;
    let text = chat.render(&[user("Hi <b>")], None, true)?;
    let want = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
        <|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, want);
    let ids = tokenizer.encode_chat(&text)?;
    assert_eq!((ids[0], ids.iter().filter(|&&id| id == 1).count()), (1, 3), "special tokens are recognised");
    assert_eq!(tokenizer.decode(&ids, false)?, want);

    let summary = inspect(&model);
    assert_eq!(summary.parameters, 134_515_008);
    assert_eq!(summary.kv_bytes_per_token, 2 * 2 * 192 * 30);
    round_trips(&model)?;
    same_in_chunks(&model)
}

#[test]
fn gemma() -> Result<()> {
    let model = open("gemma")?;
    let config = model.config();
    assert_eq!(config.architecture, Architecture::Gemma3);
    assert_eq!((config.layers, config.hidden_size, config.intermediate_size), (18, 640, 2048));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.vocab_size), (4, 1, 256, 262_144));
    let global: Vec<usize> = (0..18).filter(|&layer| config.layer_windows[layer].is_none()).collect();
    assert_eq!(global, [5, 11, 17]);
    assert_eq!(config.layer_windows[0], Some(512));
    assert_eq!((config.rope.theta, config.local_rope.as_ref().map(|rope| rope.theta)), (1e6, Some(1e4)));
    assert_eq!((config.attention_scale, config.norm_weight_offset), (0.0625, 0.0));
    assert_eq!(format!("{:016x}", model.fingerprint()), "983c72d8b7939f8a");
    assert!(model.chat_template().is_none(), "a base model");
    let tokenizer = model.tokenizer();
    assert_eq!(tokenizer.encode("", true)?, [2], "bos");
    assert_eq!(tokenizer.eos_ids(), [1, 106]);
    round_trips(&model)?;
    same_in_chunks(&model)
}

#[test]
fn qwen() -> Result<()> {
    let model = open("qwen")?;
    let config = model.config();
    assert_eq!(config.architecture, Architecture::Qwen2);
    assert_eq!((config.layers, config.heads, config.kv_heads, config.head_dim), (28, 12, 2, 128));
    assert!(config.qkv_bias && !config.tied_embeddings && !config.interleaved_qk);
    assert_eq!(model.tensor(TensorName::Output)?.dtype, WeightDtype::Q6K);
    assert_eq!(model.tensor(TensorName::Layer(0, LayerTensor::VBias))?.shape, [256]);
    assert_eq!(format!("{:016x}", model.fingerprint()), "962c02d9f1561a0b");
    assert_eq!(model.tokenizer().eos_ids(), [151_645, 151_643]);
    let text = model.chat_template().context("an instruct model")?.render(&[user("Hi")], None, true)?;
    assert!(text.ends_with("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), "{text}");
    tools(&model)?;
    round_trips(&model)?;
    same_in_chunks(&model)
}

/// A real template with a tool, a call of it and its result.
fn tools(model: &Model) -> Result<()> {
    let chat = model.chat_template().context("an instruct model")?;
    assert_eq!(chat.tools(), Some(ToolSyntax::Hermes));
    let clock = json!({"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}});
    let function = FunctionCall { name: "clock".to_owned(), arguments: json!({"zone": "UTC"}) };
    let call = ToolCall { id: Some("1".to_owned()), kind: "function".to_owned(), function };
    let messages = [
        user("Hi"),
        ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "") },
        ChatMessage { tool_call_id: Some("1".to_owned()), ..ChatMessage::new("tool", "12:30") },
    ];
    let text = chat.render(&messages, Some(&[clock]), true)?;
    for part in [
        "{\"type\": \"function\", \"function\": {\"name\": \"clock\", \"parameters\": {\"type\": \"object\"}}}\n</tools>",
        "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"UTC\"}}\n</tool_call>",
        "<tool_response>\n12:30\n</tool_response>",
    ] {
        ensure!(text.contains(part), "{part:?} is not in {text}");
    }
    // The markers are text: a client's parser must see them.
    let marker = model.tokenizer().encode("<tool_call>", false)?;
    ensure!(marker.iter().all(|&id| !model.tokenizer().is_special(id)), "{marker:?}");
    Ok(())
}
