//! Seeds: whole model files, as small as the readers accept, so that a few changed bytes make a difference.

use serde_json::{Value, json};

/// Width of the models and of their one head: the block size of the quantised types.
const WIDTH: usize = 32;
const TOKENS: [&str; 6] = ["<unk>", "<s>", "</s>", "a", "b", "ab"];

/// The parts of a layer and their shapes, `[out, in]`; all are `WIDTH` wide.
const PARTS: [(&str, &str, bool); 9] = [
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", true),
    ("attn_output", "self_attn.o_proj", true),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", true),
    ("ffn_up", "mlp.up_proj", true),
    ("ffn_down", "mlp.down_proj", true),
];

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value of a GGUF file's metadata.
#[derive(Clone, Copy)]
enum Meta<'a> {
    U32(u32),
    F32(f32),
    Text(&'a str),
    Texts(&'a [&'a str]),
    I32s(&'a [i32]),
    F32s(&'a [f32]),
}

fn meta(out: &mut Vec<u8>, value: &Meta<'_>) {
    let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Meta::U32(v) => out.extend([4u32.to_le_bytes(), v.to_le_bytes()].concat()),
        Meta::F32(v) => out.extend([6u32.to_le_bytes(), v.to_le_bytes()].concat()),
        Meta::Text(v) => {
            out.extend(8u32.to_le_bytes());
            string(out, v);
        }
        Meta::Texts(all) => {
            array(out, 8, all.len());
            all.iter().for_each(|v| string(out, v));
        }
        Meta::I32s(all) => {
            array(out, 5, all.len());
            all.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Meta::F32s(all) => {
            array(out, 6, all.len());
            all.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
    }
}

/// The header of a GGUF file: one layer, with norms of type F32 (0) and matrices of type Q8_0 (8).
fn gguf(architecture: &str, tokenizer: &[(&str, Meta<'_>)]) -> Vec<u8> {
    let width = WIDTH as u32;
    let key = |name: &str| format!("{architecture}.{name}");
    let mut pairs = vec![
        ("general.architecture".to_owned(), Meta::Text(architecture)),
        (key("block_count"), Meta::U32(1)),
        (key("context_length"), Meta::U32(64)),
        (key("embedding_length"), Meta::U32(width)),
        (key("feed_forward_length"), Meta::U32(width)),
        (key("attention.head_count"), Meta::U32(1)),
        (key("attention.layer_norm_rms_epsilon"), Meta::F32(1e-5)),
        ("tokenizer.ggml.tokens".to_owned(), Meta::Texts(&TOKENS)),
        ("tokenizer.ggml.token_type".to_owned(), Meta::I32s(&[2, 3, 3, 1, 1, 1])),
        ("tokenizer.ggml.eos_token_id".to_owned(), Meta::U32(2)),
        ("tokenizer.chat_template".to_owned(), Meta::Text("{% for m in messages %}{{ m.content }}{% endfor %}")),
    ];
    pairs.extend(tokenizer.iter().map(|(name, value)| (format!("tokenizer.ggml.{name}"), *value)));
    let square = |is: bool| if is { vec![WIDTH, WIDTH] } else { vec![WIDTH] };
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), vec![TOKENS.len(), WIDTH], true),
        ("output_norm.weight".to_owned(), vec![WIDTH], false),
    ];
    tensors.extend(PARTS.map(|(name, _, matrix)| (format!("blk.0.{name}.weight"), square(matrix), matrix)));
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    for (name, value) in &pairs {
        string(&mut out, name);
        meta(&mut out, value);
    }
    let mut offset = 0u64;
    for (name, shape, matrix) in &tensors {
        string(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&n| out.extend((n as u64).to_le_bytes()));
        out.extend((if *matrix { 8u32 } else { 0 }).to_le_bytes());
        out.extend(offset.to_le_bytes());
        let elements = shape.iter().product::<usize>() as u64;
        offset += (if *matrix { elements / 32 * 34 } else { elements * 4 }).next_multiple_of(32);
    }
    out
}

pub(crate) fn gguf_seeds() -> Vec<Vec<u8>> {
    let pieces = [("model", Meta::Text("llama")), ("scores", Meta::F32s(&[0.0, 0.0, 0.0, -1.0, -2.0, -3.0]))];
    let bytes = [("model", Meta::Text("gpt2")), ("pre", Meta::Text("gpt-2")), ("merges", Meta::Texts(&["a b"]))];
    let files = [gguf("llama", &pieces), gguf("mistral", &bytes)];
    let wanting = [gguf("qwen3", &pieces), gguf("gemma3", &pieces), gguf("none", &pieces)];
    let whole = files.iter().chain(&wanting).map(|file| [&[0], &file[..]].concat());
    let cut = files.iter().map(|file| [&[1], &file[..file.len() / 2]].concat());
    whole.chain(cut).collect()
}

/// A safetensors header of the same model.
fn header(dtype: &str, bytes: usize, layers: usize) -> String {
    let mut entries = serde_json::Map::new();
    let mut end = 0;
    let mut add = |name: String, shape: Vec<usize>| {
        let start = end;
        end += shape.iter().product::<usize>() * bytes;
        entries.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    };
    add("model.embed_tokens.weight".to_owned(), vec![TOKENS.len(), WIDTH]);
    add("model.norm.weight".to_owned(), vec![WIDTH]);
    for (_, name, matrix) in PARTS.iter().take(PARTS.len() * layers) {
        let shape = if *matrix { vec![WIDTH, WIDTH] } else { vec![WIDTH] };
        add(format!("model.layers.0.{name}.weight"), shape);
    }
    Value::Object(entries).to_string()
}

pub(crate) fn safetensors_seeds() -> Vec<Vec<u8>> {
    let whole = [header("F32", 4, 1), header("BF16", 2, 1), header("F16", 2, 0), header("I64", 8, 0)];
    let sealed = whole.iter().map(|header| [&[0], header.as_bytes()].concat());
    let length = (whole[2].len() as u64).to_le_bytes();
    let raw = [&[1], &length[..], whole[2].as_bytes()].concat();
    sealed.chain([raw]).collect()
}

/// The files of a directory except its weights.
pub(super) fn beside_weights() -> [(&'static str, String); 2] {
    let config = json!({
        "model_type": "llama", "vocab_size": TOKENS.len(), "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true, "eos_token_id": 2,
    });
    let vocab: serde_json::Map<String, Value> =
        TOKENS.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": ["a b"],
        },
    });
    [("config.json", config.to_string()), ("tokenizer.json", tokenizer.to_string())]
}

/// Templates like published ones: turns, namespaces, macros, tools, dates, errors.
pub(crate) fn chat_seeds() -> Vec<Vec<u8>> {
    let templates = [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "{{ bos_token }}{%- set ns = namespace(system='', n=0) -%}{%- for m in messages -%}{%- if m['role'] == 'system' -%}{%- set ns.system = m['content'] -%}{%- continue -%}{%- endif -%}{%- set ns.n = ns.n + 1 -%}[{{ ns.n }}] {{ ns.system ~ m.content.split(' ')[0].upper() }}{{ eos_token }}{%- endfor -%}",
        "{%- if tools %}# Tools\n<tools>{% for t in tools %}\n{{ t | tojson(indent=2) }}{% endfor %}</tools>{% endif -%}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endif %}{% endfor %}",
        "{% macro turn(m, last=false) %}{{ m.role }}: {{ m.content[1:-1] | default('-', true) }}{% if last %}.{% endif %}{% endmacro %}{% for m in messages[::-1] %}{{ turn(m, loop.last) }}{% endfor %}",
        "Today: {{ strftime_now('%d %b %Y') }}{% if messages[0].role != 'system' %}{{ raise_exception('roles') }}{% endif %}{% generation %}{{ messages | length }}{% endgeneration %}",
        "{% for a in range(9) %}{% for b in range(a * 3) %}{{ 'x' * b ~ (a // 2) ** b }}{% endfor %}{% endfor %}{{ messages | map(attribute='role') | join(',') | replace('u', 'v') }}",
    ];
    templates.iter().map(|template| template.as_bytes().to_vec()).collect()
}
