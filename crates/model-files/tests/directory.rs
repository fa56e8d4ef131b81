//! Hugging Face directories: every family, both spellings of rope, shards, and what may be wrong with them.
#![allow(clippy::unwrap_used)] // A panic is how a test fails.

mod support;

use std::path::Path;

use baton_model_files::{Activation, Architecture, LayerTensor, Model, RopeScaling, TensorName, WeightDtype};
use serde_json::{Value, json};
use support::noise;
use support::safetensors::{SPECIAL, Tensors, VOCAB, base_config, bytes, tensors, tokenizer_json, write_directory};
use tempfile::TempDir;

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn open(config: &Value, tensors: &Tensors) -> Result<(TempDir, Model), String> {
    let dir = tempfile::tempdir().unwrap();
    write_directory(dir.path(), config, tensors);
    Model::open(dir.path()).map(|model| (dir, model)).map_err(|e| e.to_string())
}

fn family(model_type: &str, changes: Value) -> Result<(TempDir, Model), String> {
    open(&with(base_config(model_type), changes), &tensors(model_type, "BF16"))
}

#[test]
fn every_family_opens_with_its_switches() {
    let (_dir, llama) = family("llama", json!({})).unwrap();
    assert_eq!(llama.config().architecture, Architecture::Llama);
    assert!(!llama.config().tied_embeddings && !llama.config().interleaved_qk);
    let down = llama.tensor(TensorName::Layer(1, LayerTensor::Down)).unwrap();
    assert_eq!((down.dtype, &down.shape[..]), (WeightDtype::Bf16, &[32, 48][..]));
    assert_eq!(down.bytes(), noise("model.layers.1.mlp.down_proj.weight", 32 * 48 * 2));
    let norm = llama.tensor(TensorName::Layer(0, LayerTensor::FfnNorm)).unwrap();
    assert_eq!(norm.bytes(), noise("model.layers.0.post_attention_layernorm.weight", 64));

    let (_dir, qwen2) = family("qwen2", json!({"sliding_window": 64, "use_sliding_window": false})).unwrap();
    assert!(qwen2.config().qkv_bias && qwen2.find(TensorName::Layer(0, LayerTensor::KBias)).is_some());
    assert_eq!(qwen2.config().layer_windows, [None, None], "off unless switched on");
    let (_dir, windowed) =
        family("qwen2", json!({"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1})).unwrap();
    assert_eq!(windowed.config().layer_windows, [None, Some(64)]);

    let (_dir, qwen3) = family("qwen3", json!({})).unwrap();
    assert!(qwen3.config().qk_norm && !qwen3.config().qkv_bias);

    let (_dir, mistral) = family("mistral", json!({"sliding_window": 32})).unwrap();
    assert_eq!(mistral.config().layer_windows, [Some(32), Some(32)]);
    let (_dir, mistral) = family("mistral", json!({"sliding_window": null})).unwrap();
    assert_eq!(mistral.config().layer_windows, [None, None]);

    let changes = json!({"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let (_dir, gemma) = family("gemma3_text", changes).unwrap();
    let config = gemma.config();
    assert_eq!(config.layer_windows, [Some(16), None]);
    assert_eq!((config.norm_weight_offset, config.attention_scale), (1.0, 0.125));
    assert_eq!((config.activation, config.post_norms, config.tied_embeddings), (Activation::GeluTanh, true, true));
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(config.local_rope.as_ref().map(|r| (r.theta, r.scaling)), Some((1e4, RopeScaling::None)));
    let norm = gemma.tensor(TensorName::Layer(0, LayerTensor::FfnNorm)).unwrap();
    assert_eq!(norm.bytes(), noise("model.layers.0.pre_feedforward_layernorm.weight", 64));
}

#[test]
fn both_spellings_of_rope_are_read() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let (_dir, older) = family("llama", json!({"rope_theta": 5e5, "rope_scaling": scaling})).unwrap();
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(5e5);
    let (_dir, newer) = family("llama", json!({"rope_parameters": parameters})).unwrap();
    assert_eq!(older.config(), newer.config());
    assert!(matches!(older.config().rope.scaling, RopeScaling::Llama3 { original_context: 64, .. }));

    let (_dir, gemma) = family(
        "gemma3_text",
        json!({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    )
    .unwrap();
    assert_eq!(gemma.config().layer_windows, [Some(16), None]);
    assert_eq!((gemma.config().rope.theta, gemma.config().local_rope.as_ref().unwrap().theta), (1e6, 1e4));
    for changes in [json!({}), json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})] {
        let (_dir, gemma) = family("gemma3_text", changes).unwrap();
        assert_eq!((gemma.config().rope.theta, gemma.config().local_rope.as_ref().unwrap().theta), (1e6, 1e4));
    }
}

#[test]
fn the_text_part_of_a_larger_model_is_found() {
    let text = with(base_config("gemma3_text"), json!({"sliding_window": 16}));
    let config = json!({"model_type": "gemma3", "text_config": text});
    for prefix in ["language_model.", "model.language_model."] {
        let rename = |name: &String| match prefix {
            "language_model." => format!("language_model.{name}"),
            _ => name.replacen("model.", "model.language_model.", 1),
        };
        let mut renamed: Tensors = tensors("gemma3_text", "F16").iter().map(|(n, t)| (rename(n), t.clone())).collect();
        renamed.insert("vision_tower.patch.weight".to_owned(), ("F32", vec![2, 2]));
        let (_dir, model) = open(&config, &renamed).unwrap();
        assert_eq!(model.tensor(TensorName::Embedding).unwrap().dtype, WeightDtype::F16);
    }
}

#[test]
fn tokens_follow_the_files() {
    let (_dir, model) = family("llama", json!({})).unwrap();
    let tokenizer = model.tokenizer();
    let (bos, eos, eot) = (VOCAB as u32 - 3, VOCAB as u32 - 2, VOCAB as u32 - 1);
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(bos), &[eos, eot][..]));
    assert_eq!(tokenizer.vocab_size(), VOCAB);
    assert_eq!(tokenizer.encode(" hi", true).unwrap(), [bos, 257], "the post-processor's bos");
    assert_eq!(tokenizer.encode(" hi", false).unwrap(), [257]);
    let chat = model.chat_template().unwrap();
    let message = baton_model_text::ChatMessage::new("user", " hi");
    let text = chat.render(&[message], None, true).unwrap();
    assert_eq!(tokenizer.encode_chat(&text).unwrap(), [bos, 257, eos], "one bos, though both would add it");
    assert_eq!(tokenizer.encode_chat(" hi").unwrap(), [bos, 257]);
    for text in ["héllo 漢字 👩‍🚀\n\t x", "", "  hi  hi", SPECIAL[2]] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), false).unwrap(), text);
    }
    assert_eq!(tokenizer.token_bytes(257).unwrap(), b" hi");
    assert!(tokenizer.token_text(VOCAB as u32).unwrap_err().to_string().contains("outside the vocabulary"));

    let dir = tempfile::tempdir().unwrap();
    write_directory(dir.path(), &base_config("llama"), &tensors("llama", "F32"));
    let settings = |add_bos: bool| json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos});
    let mut bare = tokenizer_json();
    bare["post_processor"] = Value::Null;
    for (json, add_bos) in [(&tokenizer_json(), false), (&tokenizer_json(), true), (&bare, true), (&bare, false)] {
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), settings(add_bos).to_string()).unwrap();
        let tokenizer = Model::open(dir.path()).unwrap().tokenizer().clone();
        let want: &[u32] = if add_bos { &[bos, 257] } else { &[257] };
        assert_eq!(tokenizer.encode(" hi", true).unwrap(), want, "add_bos_token {add_bos}");
    }
}

#[test]
fn a_chat_template_may_lie_in_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    write_directory(dir.path(), &base_config("llama"), &tensors("llama", "F32"));
    let render = || Model::open(dir.path()).unwrap().chat_template().unwrap().render(&[], None, true).unwrap();
    let named = json!({"bos_token": "<s>", "chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default"}]});
    std::fs::write(dir.path().join("tokenizer_config.json"), named.to_string()).unwrap();
    assert_eq!(render(), "<s>default");
    std::fs::write(dir.path().join("chat_template.jinja"), "own").unwrap();
    assert_eq!(render(), "own");
}

fn write_shards(dir: &Path, tensors: &Tensors) {
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    let (mut first, mut second) = (Tensors::new(), Tensors::new());
    let mut map = serde_json::Map::new();
    for (index, (name, tensor)) in tensors.iter().enumerate() {
        let (shard, file) = if index % 2 == 0 { (&mut first, "a.safetensors") } else { (&mut second, "b.safetensors") };
        shard.insert(name.clone(), tensor.clone());
        map.insert(name.clone(), json!(file));
    }
    std::fs::write(dir.join("a.safetensors"), bytes(&first)).unwrap();
    std::fs::write(dir.join("b.safetensors"), bytes(&second)).unwrap();
    std::fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
}

#[test]
fn shards_make_the_same_model_as_one_file() {
    let (dir, whole) = family("llama", json!({})).unwrap();
    let fingerprint = whole.fingerprint();
    drop(whole);
    write_shards(dir.path(), &tensors("llama", "BF16"));
    assert_eq!(Model::open(dir.path()).unwrap().fingerprint(), fingerprint);

    let cut = std::fs::read(dir.path().join("b.safetensors")).unwrap();
    std::fs::write(dir.path().join("b.safetensors"), &cut[..cut.len() - 1]).unwrap();
    let error = Model::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("b.safetensors is truncated"), "{error}");
    std::fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    assert!(Model::open(dir.path()).unwrap_err().to_string().contains("b.safetensors"));
    std::fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map": {"x": "../../etc/passwd"}}"#)
        .unwrap();
    let error = Model::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("weight_map") && error.contains("../../etc/passwd"), "{error}");
}

#[test]
fn weights_cut_anywhere_say_that_they_are_truncated() {
    let (dir, model) = family("llama", json!({})).unwrap();
    drop(model);
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for part in 0..50 {
        std::fs::write(&path, &whole[..whole.len() * part / 50]).unwrap();
        let error = Model::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("model.safetensors is truncated"), "{part}/50: {error}");
    }
    let mut state = 7u64;
    for _ in 0..600 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut damaged = whole.clone();
        damaged[(state >> 33) as usize % 4000] ^= 1 << (state >> 29 & 7);
        std::fs::write(&path, &damaged).unwrap();
        // It may open or fail, but must not panic.
        let _ = Model::open(dir.path());
    }
}

#[test]
fn what_is_wrong_with_a_directory_is_named() {
    let rejects = |model_type: &str, changes: Value, parts: &[&str]| {
        let error = family(model_type, changes).map(|_| ()).unwrap_err();
        parts.iter().for_each(|part| assert!(error.contains(part), "{error:?} lacks {part:?}"));
    };
    let rope = |kind: &str| json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
    rejects("llama", rope("yarn"), &["config.json", "rope_scaling.rope_type", "yarn", "llama3"]);
    rejects("llama", rope("llama3"), &["rope_scaling.low_freq_factor", "missing"]);
    rejects("llama", json!({"hidden_size": null}), &["config.json: hidden_size: is missing"]);
    rejects("llama", json!({"num_hidden_layers": "2"}), &["num_hidden_layers"]);
    rejects("llama", json!({"num_key_value_heads": 3}), &["kv_heads"]);
    rejects("llama", json!({"attention_bias": true}), &["attention_bias"]);
    rejects("llama", json!({"hidden_act": "relu"}), &["hidden_act", "relu"]);
    rejects("llama", json!({"head_dim": null, "num_attention_heads": 5}), &["num_attention_heads", "5"]);
    rejects("llama", json!({"vocab_size": VOCAB + 1}), &["model.embed_tokens.weight", "[262, 32]"]);
    rejects("llama", json!({"vocab_size": 100}), &["tokenizer", "261 tokens", "100 rows"]);
    rejects("gemma3_text", json!({"final_logit_softcapping": 30.0}), &["final_logit_softcapping"]);
    rejects(
        "gemma3_text",
        json!({"layer_types": ["full_attention"], "sliding_window": 4}),
        &["layer_types", "1 entries"],
    );
    rejects("llama", json!({"quantization_config": {"bits": 4}}), &["quantization_config"]);
    rejects("bloom", json!({}), &["config.json", "bloom", "supported"]);

    let mut extra = tensors("llama", "F32");
    extra.insert("model.layers.0.self_attn.o_proj.bias".to_owned(), ("F32", vec![32]));
    assert!(open(&base_config("llama"), &extra).unwrap_err().contains("o_proj.bias"));
    let mut old = tensors("llama", "F32");
    old.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), ("F32", vec![4]));
    assert!(open(&base_config("llama"), &old).is_ok(), "derived from the configuration");
    let mut integers = tensors("llama", "F32");
    integers.insert("model.norm.weight".to_owned(), ("I64", vec![32]));
    assert!(open(&base_config("llama"), &integers).unwrap_err().contains("element type I64"));

    let dir = tempfile::tempdir().unwrap();
    let error = Model::open(&dir.path().join("absent")).unwrap_err();
    assert!(error.to_string().contains("absent"));
    assert!(Model::open(dir.path()).unwrap_err().to_string().contains("config.json"));
    write_directory(dir.path(), &base_config("llama"), &tensors("llama", "F32"));
    for (file, content) in [("tokenizer.json", "{}"), ("config.json", "[1]"), ("tokenizer_config.json", "{")] {
        let good = std::fs::read(dir.path().join(file)).unwrap();
        std::fs::write(dir.path().join(file), content).unwrap();
        let error = Model::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(file), "{error}");
        std::fs::write(dir.path().join(file), good).unwrap();
    }
    assert!(Model::open(dir.path()).is_ok());
}
