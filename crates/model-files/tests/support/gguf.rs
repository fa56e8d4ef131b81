//! A GGUF writer, and a tiny Llama to write with it.

use std::path::Path;

use super::{byte_level_vocab, noise};

#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Row-major, as the reader gives it; the file has it the other way round.
    pub shape: Vec<usize>,
    /// The format's number of the element type.
    pub kind: u32,
    pub data: Vec<u8>,
}

#[derive(Clone, Default)]
pub struct Gguf {
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

pub const F32: u32 = 0;
pub const Q4_1: u32 = 3;
pub const Q8_0: u32 = 8;
pub const Q2_K: u32 = 10;

impl Gguf {
    pub fn set(&mut self, key: &str, value: Meta) -> &mut Gguf {
        self.remove(key);
        self.metadata.push((key.to_owned(), value));
        self
    }

    pub fn remove(&mut self, key: &str) -> &mut Gguf {
        self.metadata.retain(|(name, _)| name != key);
        self
    }

    pub fn tensor(&mut self, name: &str, shape: &[usize], kind: u32) -> &mut Gguf {
        let elements: usize = shape.iter().product();
        let bytes = match kind {
            F32 => elements * 4,
            Q4_1 => elements / 32 * 20,
            Q8_0 => elements / 32 * 34,
            Q2_K => elements / 256 * 84,
            _ => elements,
        };
        self.tensors.retain(|t| t.name != name);
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, data: noise(name, bytes) });
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            meta(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.data);
        }
        out
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn meta(out: &mut Vec<u8>, value: &Meta) {
    let mut array = |kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Meta::U32(v) => out.extend([4u32.to_le_bytes(), v.to_le_bytes()].concat()),
        Meta::F32(v) => out.extend([6u32.to_le_bytes(), v.to_le_bytes()].concat()),
        Meta::Bool(v) => out.extend([7, 0, 0, 0, u8::from(*v)]),
        Meta::Str(v) => {
            out.extend(8u32.to_le_bytes());
            string(out, v);
        }
        Meta::Strs(all) => {
            array(8, all.len());
            all.iter().for_each(|v| string(out, v));
        }
        Meta::I32s(all) => {
            array(5, all.len());
            all.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Meta::F32s(all) => {
            array(6, all.len());
            all.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
    }
}

pub const MERGES: [(&str, &str); 4] = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")];
pub const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
pub const VOCAB: usize = 256 + MERGES.len() + SPECIAL.len();
pub const HIDDEN: usize = 32;

/// Metadata of the byte-level tokenizer of the tiny models.
pub fn byte_level_tokenizer(file: &mut Gguf) {
    let tokens = byte_level_vocab(&MERGES, &SPECIAL);
    let kind = |i: usize| if i < VOCAB - SPECIAL.len() { 1 } else { 3 };
    file.set("tokenizer.ggml.model", Meta::Str("gpt2".to_owned()))
        .set("tokenizer.ggml.pre", Meta::Str("gpt-2".to_owned()))
        .set("tokenizer.ggml.token_type", Meta::I32s((0..VOCAB).map(kind).collect()))
        .set("tokenizer.ggml.merges", Meta::Strs(MERGES.iter().map(|(a, b)| format!("{a} {b}")).collect()))
        .set("tokenizer.ggml.tokens", Meta::Strs(tokens))
        .set("tokenizer.ggml.bos_token_id", Meta::U32(VOCAB as u32 - 2))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(VOCAB as u32 - 1));
}

/// A Llama with two layers, tied embeddings, quantised projections.
pub fn llama() -> Gguf {
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::Str("llama".to_owned()))
        .set("general.name", Meta::Str("Tiny".to_owned()))
        .set("llama.block_count", Meta::U32(2))
        .set("llama.context_length", Meta::U32(128))
        .set("llama.embedding_length", Meta::U32(HIDDEN as u32))
        .set("llama.feed_forward_length", Meta::U32(64))
        .set("llama.attention.head_count", Meta::U32(4))
        .set("llama.attention.head_count_kv", Meta::U32(2))
        .set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
        .set("llama.rope.freq_base", Meta::F32(1e5))
        .set(
            "tokenizer.chat_template",
            Meta::Str(
                "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}".to_owned(),
            ),
        );
    byte_level_tokenizer(&mut file);
    file.tensor("token_embd.weight", &[VOCAB, HIDDEN], Q8_0).tensor("output_norm.weight", &[HIDDEN], F32);
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        file.tensor(&name("attn_norm"), &[HIDDEN], F32)
            .tensor(&name("attn_q"), &[32, HIDDEN], Q4_1)
            .tensor(&name("attn_k"), &[16, HIDDEN], Q4_1)
            .tensor(&name("attn_v"), &[16, HIDDEN], Q4_1)
            .tensor(&name("attn_output"), &[HIDDEN, 32], Q4_1)
            .tensor(&name("ffn_norm"), &[HIDDEN], F32)
            .tensor(&name("ffn_gate"), &[64, HIDDEN], Q4_1)
            .tensor(&name("ffn_up"), &[64, HIDDEN], Q4_1)
            .tensor(&name("ffn_down"), &[HIDDEN, 64], Q4_1);
    }
    file
}
