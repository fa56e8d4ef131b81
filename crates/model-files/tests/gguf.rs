//! GGUF files as users have them: whole, truncated, damaged, or of another kind.
#![allow(clippy::unwrap_used)] // A panic is how a test fails.

mod support;

use std::path::PathBuf;

use baton_model_files::{Architecture, LayerTensor, Model, RopeScaling, TensorName, TextModel, WeightDtype, inspect};
use baton_model_text::ChatMessage;
use baton_types::{BatonError, ErrorKind};
use support::gguf::{F32, Gguf, HIDDEN, Meta, Q2_K, Q4_1, Q8_0, VOCAB, llama};
use support::noise;
use tempfile::TempDir;

struct Case {
    dir: TempDir,
}

impl Case {
    fn new() -> Case {
        Case { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("tiny.gguf")
    }

    fn open_bytes(&self, bytes: &[u8]) -> Result<Model, String> {
        std::fs::write(self.path(), bytes).unwrap();
        Model::open(&self.path()).map_err(|error| {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            error.to_string()
        })
    }

    fn open(&self, file: &Gguf) -> Result<Model, String> {
        self.open_bytes(&file.bytes())
    }

    /// The error must name the file and contain each of `parts`.
    fn rejects(&self, file: &Gguf, parts: &[&str]) {
        let error = self.open(file).err().unwrap_or_else(|| panic!("accepted, expected {parts:?}"));
        for part in parts.iter().chain(&["tiny.gguf"]) {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_whole_file_gives_config_tensors_tokens_and_chat() {
    let case = Case::new();
    let model = case.open(&llama()).unwrap();
    let config = model.config();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.layers, config.heads, config.kv_heads, config.head_dim), (2, 4, 2, 8));
    assert_eq!((config.vocab_size, config.hidden_size, config.intermediate_size), (VOCAB as u32, 32, 64));
    assert!(config.tied_embeddings && config.interleaved_qk && !config.qkv_bias && !config.qk_norm);
    assert_eq!((config.rope.theta, config.rope.scaling), (1e5, RopeScaling::None));
    assert_eq!(config.layer_windows, [None, None]);
    assert_eq!(model.name(), "Tiny");

    let q = model.tensor(TensorName::Layer(1, LayerTensor::Q)).unwrap();
    assert_eq!((q.dtype, &q.shape[..]), (WeightDtype::Q4_1, &[32, HIDDEN][..]));
    assert_eq!(q.bytes(), noise("blk.1.attn_q.weight", 32 * 20));
    let embedding = model.tensor(TensorName::Embedding).unwrap();
    assert_eq!(embedding.bytes(), noise("token_embd.weight", VOCAB * 34));
    assert!(model.find(TensorName::Output).is_none());
    let error = model.tensor(TensorName::Layer(2, LayerTensor::Q)).unwrap_err().to_string();
    assert!(error.contains("Layer(2, Q)"), "{error}");

    let chat = [ChatMessage::new("user", "hello")];
    let text = model.chat_template().unwrap().render(&chat, None, true).unwrap();
    assert_eq!(text, "<|im_start|>user\nhello<|im_end|>\n");
    let ids = model.tokenizer().encode_chat(&text).unwrap();
    let (start, end, hello) = (VOCAB as u32 - 2, VOCAB as u32 - 1, 256 + 3);
    assert_eq!((ids[0], ids[ids.len() - 2], ids.contains(&hello)), (start, end, true));
    assert_eq!(model.tokenizer().eos_ids(), [end, VOCAB as u32 - 3], "the file's own first");
    assert_eq!(model.tokenizer().decode(&ids, true).unwrap(), "user\nhello\n");

    let summary = inspect(&model);
    assert_eq!(summary.kv_bytes_per_token, 2 * 2 * 16 * 2);
    assert_eq!(summary.quantisation.keys().collect::<Vec<_>>(), ["F32", "Q4_1", "Q8_0"]);
    assert_eq!(summary.bytes, llama().tensors.iter().map(|t| t.data.len() as u64).sum::<u64>());
}

#[test]
fn text_takes_the_header_alone() {
    let case = Case::new();
    let (file, whole) = (llama(), llama().bytes());
    let data: usize = file.tensors.iter().map(|tensor| tensor.data.len().next_multiple_of(32)).sum();
    // The text part opens even without tensor data.
    std::fs::write(case.path(), &whole[..whole.len() - data]).unwrap();
    let text = TextModel::open(&case.path()).unwrap();
    assert_eq!((text.name(), text.vocab_size(), text.context_length()), ("Tiny", VOCAB as u32, 128));
    assert!(text.chat_template().is_some());
    let model = case.open(&file).unwrap();
    assert_eq!(text.tokenizer().encode("hello", true).unwrap(), model.tokenizer().encode("hello", true).unwrap());
    for cut in [0, 3, 4, 100, 2000] {
        std::fs::write(case.path(), &whole[..cut]).unwrap();
        assert!(TextModel::open(&case.path()).is_err(), "cut at {cut}");
    }
}

#[test]
fn the_fingerprint_follows_content_not_place() {
    let fingerprint = |file: &Gguf| Case::new().open(file).unwrap().fingerprint();
    let base = fingerprint(&llama());
    assert_eq!(fingerprint(&llama()), base);
    let mut shuffled = llama();
    shuffled.tensors.reverse();
    assert_eq!(fingerprint(&shuffled), base, "the order of tensors in the file is no property of the model");
    let mut renamed = llama();
    renamed.set("general.name", Meta::Str("Other".to_owned()));
    assert_eq!(fingerprint(&renamed), base);
    let mut other_config = llama();
    other_config.set("llama.rope.freq_base", Meta::F32(1e4));
    assert_ne!(fingerprint(&other_config), base);
    for index in 0..llama().tensors.len() {
        let mut other_bytes = llama();
        *other_bytes.tensors[index].data.last_mut().unwrap() ^= 1;
        assert_ne!(fingerprint(&other_bytes), base, "{}", other_bytes.tensors[index].name);
    }
}

#[test]
fn a_file_cut_anywhere_says_that_it_is_truncated() {
    let case = Case::new();
    let whole = llama().bytes();
    for part in 0..50 {
        let cut = whole.len() * part / 50;
        let error = case.open_bytes(&whole[..cut]).err().unwrap_or_else(|| panic!("cut at {cut} of {}", whole.len()));
        assert!(error.contains("tiny.gguf is truncated") && error.contains("Fetch it again"), "{cut}: {error}");
    }
    let error = case.open_bytes(&whole[..whole.len() - 1]).unwrap_err();
    assert!(error.contains("tensor blk.1.ffn_down.weight ends at byte"), "{error}");
    assert!(case.open_bytes(&whole).is_ok());
}

#[test]
fn damaged_headers_never_panic() {
    let case = Case::new();
    let whole = llama().bytes();
    let header = whole.len() - llama().tensors.iter().map(|t| t.data.len()).sum::<usize>();
    let mut state = 1u64;
    let mut rejected = 0;
    for _ in 0..1500 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut damaged = whole.clone();
        let at = (state >> 33) as usize % header;
        damaged[at] ^= 1 << (state >> 29 & 7);
        rejected += u32::from(case.open_bytes(&damaged).is_err());
    }
    assert!(rejected > 100, "only {rejected} damaged files were noticed");
}

#[test]
fn missing_and_odd_keys_are_named() {
    let case = Case::new();
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ] {
        case.rejects(llama().remove(key), &[key, "missing"]);
    }
    let text = |v: &str| Meta::Str(v.to_owned());
    let odd: [(&str, Meta, &[&str]); 16] = [
        ("general.architecture", text("mamba"), &["mamba", "supported: llama"]),
        ("llama.rope.scaling.type", text("yarn"), &["llama.rope.scaling.type", "yarn", "linear"]),
        ("llama.rope.scaling.type", text("linear"), &["llama.rope.scaling.factor", "missing"]),
        ("llama.attention.head_count", text("four"), &["llama.attention.head_count"]),
        ("llama.attention.head_count", Meta::U32(0), &["llama.attention.head_count"]),
        ("llama.attention.head_count_kv", Meta::U32(3), &["kv_heads", "3 does not divide"]),
        ("llama.attention.key_length", Meta::U32(7), &["llama.rope.dimension_count", "7"]),
        ("llama.attention.value_length", Meta::U32(4), &["llama.attention.value_length", "4"]),
        ("llama.block_count", Meta::U32(u32::MAX), &["llama.block_count", "4294967295"]),
        ("llama.expert_count", Meta::U32(8), &["llama.expert_count", "mixture"]),
        ("llama.rope.freq_base", Meta::F32(-1.0), &["theta is -1"]),
        ("split.count", Meta::U32(3), &["split.count", "merge"]),
        ("tokenizer.ggml.model", text("bert"), &["tokenizer.ggml.model", "bert", "gpt2"]),
        ("tokenizer.ggml.pre", text("martian"), &["tokenizer.ggml.pre", "martian", "smollm"]),
        ("tokenizer.ggml.eos_token_id", Meta::U32(9999), &["tokenizer.ggml.eos_token_id", "9999"]),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![1]), &["tokenizer.ggml.token_type", "1 entries"]),
    ];
    for (key, value, parts) in odd {
        let mut file = llama();
        if key == "llama.attention.key_length" {
            file.set("llama.rope.dimension_count", Meta::U32(8));
        }
        case.rejects(file.set(key, value), parts);
    }
    case.rejects(llama().set("tokenizer.chat_template", text("{% if %}")), &["chat template"]);
    case.rejects(llama().set("tokenizer.ggml.merges", Meta::Strs(vec!["x".to_owned()])), &["merges", "entry 0"]);
    case.rejects(llama().set("general.alignment", Meta::U32(0)), &["general.alignment is 0"]);
    assert!(case.open_bytes(b"PK\x03\x04 not a model").unwrap_err().contains("letters GGUF"));
}

#[test]
fn tensors_of_wrong_shape_type_or_name_are_named() {
    let case = Case::new();
    let q = "blk.1.attn_q.weight";
    case.rejects(llama().tensor(q, &[32, 64], Q4_1), &[q, "[32, 64]", "[32, 32]"]);
    case.rejects(llama().tensor(q, &[1024], Q4_1), &[q, "[1024]"]);
    case.rejects(llama().tensor(q, &[4, 256], Q2_K), &[q, "[4, 256]"]);
    let mut missing = llama();
    missing.tensors.retain(|t| t.name != q);
    case.rejects(&missing, &[q, "missing"]);
    case.rejects(llama().tensor("blk.0.attn_sinks.weight", &[4], F32), &["blk.0.attn_sinks.weight", "no part"]);
    case.rejects(llama().tensor("blk.2.attn_norm.weight", &[32], F32), &["blk.2.attn_norm.weight", "no part"]);
    case.rejects(llama().tensor("output_norm.weight", &[HIDDEN], Q8_0), &["output_norm.weight", "Q8_0", "vectors"]);
    let mut ragged = llama();
    ragged.tensor("blk.0.ffn_norm.weight", &[3, 16], 8);
    case.rejects(&ragged, &["blk.0.ffn_norm.weight", "whole blocks"]);
    let mut unknown = llama();
    unknown.tensors[4].kind = 99;
    case.rejects(&unknown, &["99"]);
    let mut unsupported = llama();
    unsupported.tensor(q, &[32, HIDDEN], 9);
    case.rejects(&unsupported, &[q, "Q8_1", "supported: F32"]);
    let mut far = llama().bytes();
    let name = far.windows(q.len()).position(|w| w == q.as_bytes()).unwrap();
    let offset = name + q.len() + 4 + 16 + 4;
    far[offset..offset + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(case.open_bytes(&far).unwrap_err().contains("beyond any file"));
}

#[test]
fn an_own_output_head_and_rope_divisors_are_seen() {
    let case = Case::new();
    let mut file = llama();
    file.tensor("output.weight", &[VOCAB, HIDDEN], Q8_0).tensor("rope_freqs.weight", &[4], F32);
    let divisors = [1.0f32, 1.0, 2.5, 8.0];
    file.tensors.last_mut().unwrap().data = divisors.iter().flat_map(|d| d.to_le_bytes()).collect();
    let model = case.open(&file).unwrap();
    assert!(!model.config().tied_embeddings && model.find(TensorName::Output).is_some());
    assert_eq!(model.config().rope.rope_freq_factors.as_deref(), Some(&divisors[..]));
    file.tensor("rope_freqs.weight", &[3], F32);
    case.rejects(&file, &["rope_freqs.weight", "3 divisors", "needs 4"]);
}

#[test]
fn gemma3_gets_what_its_files_leave_out() {
    let mut file = llama();
    for (key, _) in llama().metadata {
        if let Some(rest) = key.strip_prefix("llama.") {
            let value = llama().metadata.into_iter().find(|(name, _)| *name == key).unwrap().1;
            file.remove(&key).set(&format!("gemma3.{rest}"), value);
        }
    }
    file.set("general.architecture", Meta::Str("gemma3".to_owned()))
        .set("gemma3.block_count", Meta::U32(7))
        .set("gemma3.attention.sliding_window", Meta::U32(16))
        .remove("gemma3.rope.freq_base")
        .set("gemma3.rope.freq_base", Meta::F32(1e6));
    file.tensors.retain(|t| !t.name.starts_with("blk."));
    for layer in 0..7 {
        for part in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            file.tensor(&format!("blk.{layer}.{part}.weight"), &[HIDDEN], F32);
        }
        for part in ["attn_q_norm", "attn_k_norm"] {
            file.tensor(&format!("blk.{layer}.{part}.weight"), &[8], F32);
        }
        let shapes = [("attn_q", 32, 32), ("attn_k", 16, 32), ("attn_v", 16, 32), ("attn_output", 32, 32)];
        let inner = [("ffn_gate", 64, 32), ("ffn_up", 64, 32), ("ffn_down", 32, 64)];
        for (part, out, input) in shapes.into_iter().chain(inner) {
            file.tensor(&format!("blk.{layer}.{part}.weight"), &[out, input], Q4_1);
        }
    }
    let case = Case::new();
    let model = case.open(&file).unwrap();
    let config = model.config();
    let w = Some(16);
    assert_eq!(config.layer_windows, [w, w, w, w, w, None, w]);
    assert_eq!((config.rope.theta, config.local_rope.as_ref().map(|r| r.theta)), (1e6, Some(1e4)));
    assert!(config.post_norms && config.qk_norm && !config.interleaved_qk);
    assert_eq!(config.norm_weight_offset, 0.0, "converters have added the one");
    assert_eq!(config.embedding_scale, 32f32.sqrt());
    case.rejects(file.remove("gemma3.attention.sliding_window"), &["gemma3.attention.sliding_window", "missing"]);
}
