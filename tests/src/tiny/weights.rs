//! Names, shapes and values of a tiny model's tensors. The mirror of `transformers_tiny.py`; change both or neither.

use anyhow::bail;
use baton_types::testing::Random;

use super::TinyModel;

/// One tensor: what it is called, how large it is, and from which range its values come.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Row-major; `[out, in]` for a matrix.
    pub shape: Vec<usize>,
    /// Values are uniform in [centre - spread, centre + spread).
    centre: f32,
    spread: f32,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements in f32, before rounding to the file's dtype: 24 random bits as an exact number in [-1, 1), times the
    /// spread, plus the centre, each rounded to f32.
    pub fn values(&self, seed: u64) -> Vec<f32> {
        let unit = |bits: u64| (bits >> 40) as f32 * (1.0 / (1 << 23) as f32) - 1.0;
        random_u64(seed, &self.name).take(self.elements()).map(|bits| unit(bits) * self.spread + self.centre).collect()
    }
}

/// SplitMix64 started at the 64-bit FNV-1a hash of `name` xor `seed`. Endless.
pub fn random_u64(seed: u64, name: &str) -> impl Iterator<Item = u64> + use<> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mut random = Random(hash ^ seed);
    std::iter::repeat_with(move || random.bits())
}

/// Every tensor of a model, sorted by name.
pub(super) fn tensors(model: &TinyModel) -> anyhow::Result<Vec<TensorSpec>> {
    let family = Family::of(model.architecture()?)?;
    let (hidden, vocab) = (model.size("hidden_size")?, model.size("vocab_size")?);
    let mut all = vec![family.tensor("model.embed_tokens.weight", &[vocab, hidden])];
    for layer in 0..model.size("num_hidden_layers")? {
        for (name, shape) in layer_tensors(model, family)? {
            all.push(family.tensor(&format!("model.layers.{layer}.{name}"), &shape));
        }
    }
    all.push(family.tensor("model.norm.weight", &[hidden]));
    match model.config["tie_word_embeddings"].as_bool() {
        Some(true) => {}
        Some(false) => all.push(family.tensor("lm_head.weight", &[vocab, hidden])),
        None => bail!("config.tie_word_embeddings must be true or false"),
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Architectures that differ in their tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Llama and Mistral.
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
}

impl Family {
    fn of(architecture: &str) -> anyhow::Result<Family> {
        Ok(match architecture {
            "LlamaForCausalLM" | "MistralForCausalLM" => Family::Llama,
            "Qwen2ForCausalLM" => Family::Qwen2,
            "Qwen3ForCausalLM" => Family::Qwen3,
            "Gemma3ForCausalLM" => Family::Gemma3,
            other => bail!("config.architectures[0] is {other}, which has no tiny model"),
        })
    }

    /// Layers outweigh the embedding in the residual stream, so that a defect in a layer shows in the logits. Gemma adds 1
    /// to its norms' weights and scales its embedding by the root of the hidden size.
    fn tensor(self, name: &str, shape: &[usize]) -> TensorSpec {
        let ends = |suffixes: &[&str]| suffixes.iter().any(|s| name.ends_with(s));
        let (centre, spread) = if ends(&["norm.weight"]) {
            (1.0, 0.25)
        } else if ends(&[".bias"]) {
            (0.0, 0.5)
        } else if ends(&["embed_tokens.weight", "lm_head.weight"]) {
            (0.0, if self == Family::Gemma3 { 0.25 } else { 0.5 })
        } else {
            let gain = if ends(&["q_proj.weight", "k_proj.weight"]) { 1.5 } else { 1.0 };
            (0.0, gain * (3.0 / shape[1] as f64).sqrt())
        };
        TensorSpec { name: name.to_owned(), shape: shape.to_vec(), centre, spread: spread as f32 }
    }
}

/// Names below `model.layers.N.` and shapes of one layer.
fn layer_tensors(model: &TinyModel, family: Family) -> anyhow::Result<Vec<(&'static str, Vec<usize>)>> {
    let (hidden, inner) = (model.size("hidden_size")?, model.size("intermediate_size")?);
    let heads = model.size("num_attention_heads")?;
    let head_dim = match model.config.get("head_dim") {
        Some(value) if !value.is_null() => model.size("head_dim")?,
        _ => hidden / heads,
    };
    let (q, kv) = (heads * head_dim, model.size("num_key_value_heads")? * head_dim);
    let mut layer = vec![
        ("input_layernorm.weight", vec![hidden]),
        ("post_attention_layernorm.weight", vec![hidden]),
        ("self_attn.q_proj.weight", vec![q, hidden]),
        ("self_attn.k_proj.weight", vec![kv, hidden]),
        ("self_attn.v_proj.weight", vec![kv, hidden]),
        ("self_attn.o_proj.weight", vec![hidden, q]),
        ("mlp.gate_proj.weight", vec![inner, hidden]),
        ("mlp.up_proj.weight", vec![inner, hidden]),
        ("mlp.down_proj.weight", vec![hidden, inner]),
    ];
    if family == Family::Qwen2 {
        layer.push(("self_attn.q_proj.bias", vec![q]));
        layer.push(("self_attn.k_proj.bias", vec![kv]));
        layer.push(("self_attn.v_proj.bias", vec![kv]));
    }
    if matches!(family, Family::Qwen3 | Family::Gemma3) {
        layer.push(("self_attn.q_norm.weight", vec![head_dim]));
        layer.push(("self_attn.k_norm.weight", vec![head_dim]));
    }
    if family == Family::Gemma3 {
        layer.push(("pre_feedforward_layernorm.weight", vec![hidden]));
        layer.push(("post_feedforward_layernorm.weight", vec![hidden]));
    }
    Ok(layer)
}
