//! Names of tensors in GGUF files and in Hugging Face directories, and the tensors that a configuration needs, with their shapes. No
//! other module knows these.

use std::collections::{BTreeMap, BTreeSet};

use baton_model_text::gguf::{EMBEDDING, OUTPUT};

use crate::store::{Entry, StoredDtype, TensorStore};
use crate::{LayerTensor, ModelConfig, ModelFileError, TensorName};

/// How a model's files spell tensor names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Naming {
    Gguf,
    HuggingFace {
        /// Prefix of `embed_tokens.weight`, with its dot.
        base: String,
        /// Prefix of `lm_head.weight`.
        head: String,
        /// The model has norms after attention and feed-forward, which changes the name of a layer's second norm.
        post_norms: bool,
    },
}

impl Naming {
    /// The naming of a Hugging Face directory; the text part of a larger model lies under a longer prefix.
    pub fn hugging_face(store: &TensorStore, post_norms: bool) -> Naming {
        let candidates = [("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", "")];
        let present = |(base, _): &&(&str, &str)| store.get(&format!("{base}embed_tokens.weight")).is_some();
        let (base, head) = candidates.iter().find(present).unwrap_or(&candidates[0]);
        Naming::HuggingFace { base: (*base).to_owned(), head: (*head).to_owned(), post_norms }
    }

    /// The name in the file.
    pub fn text(&self, name: TensorName) -> String {
        match self {
            Naming::Gguf => gguf_name(name),
            Naming::HuggingFace { base, head, post_norms } => match name {
                TensorName::Embedding => format!("{base}embed_tokens.weight"),
                TensorName::OutputNorm => format!("{base}norm.weight"),
                TensorName::Output => format!("{head}lm_head.weight"),
                TensorName::RopeFreqs => format!("{base}rope_freqs.weight"),
                TensorName::Layer(layer, tensor) => format!("{base}layers.{layer}.{}", hf_name(tensor, *post_norms)),
            },
        }
    }

    fn layer_prefix(&self) -> String {
        match self {
            Naming::Gguf => "blk.".to_owned(),
            Naming::HuggingFace { base, .. } => format!("{base}layers."),
        }
    }
}

fn gguf_name(name: TensorName) -> String {
    use LayerTensor::*;
    let (layer, tensor) = match name {
        TensorName::Embedding => return EMBEDDING.to_owned(),
        TensorName::OutputNorm => return "output_norm.weight".to_owned(),
        TensorName::Output => return OUTPUT.to_owned(),
        TensorName::RopeFreqs => return "rope_freqs.weight".to_owned(),
        TensorName::Layer(layer, tensor) => (layer, tensor),
    };
    let part = match tensor {
        AttnNorm => "attn_norm.weight",
        Q => "attn_q.weight",
        K => "attn_k.weight",
        V => "attn_v.weight",
        QBias => "attn_q.bias",
        KBias => "attn_k.bias",
        VBias => "attn_v.bias",
        AttnOutput => "attn_output.weight",
        QNorm => "attn_q_norm.weight",
        KNorm => "attn_k_norm.weight",
        PostAttnNorm => "post_attention_norm.weight",
        FfnNorm => "ffn_norm.weight",
        Gate => "ffn_gate.weight",
        Up => "ffn_up.weight",
        Down => "ffn_down.weight",
        PostFfnNorm => "post_ffw_norm.weight",
    };
    format!("blk.{layer}.{part}")
}

fn hf_name(tensor: LayerTensor, post_norms: bool) -> &'static str {
    use LayerTensor::*;
    match tensor {
        AttnNorm => "input_layernorm.weight",
        Q => "self_attn.q_proj.weight",
        K => "self_attn.k_proj.weight",
        V => "self_attn.v_proj.weight",
        QBias => "self_attn.q_proj.bias",
        KBias => "self_attn.k_proj.bias",
        VBias => "self_attn.v_proj.bias",
        AttnOutput => "self_attn.o_proj.weight",
        QNorm => "self_attn.q_norm.weight",
        KNorm => "self_attn.k_norm.weight",
        // Gemma's norm after attention bears the name that Llama gives the norm before the feed-forward block.
        PostAttnNorm => "post_attention_layernorm.weight",
        FfnNorm if post_norms => "pre_feedforward_layernorm.weight",
        FfnNorm => "post_attention_layernorm.weight",
        Gate => "mlp.gate_proj.weight",
        Up => "mlp.up_proj.weight",
        Down => "mlp.down_proj.weight",
        PostFfnNorm => "post_feedforward_layernorm.weight",
    }
}

/// The tensors a configuration needs, with their shapes.
pub(crate) fn required(config: &ModelConfig) -> Vec<(TensorName, Vec<usize>)> {
    let hidden = config.hidden_size as usize;
    let embedding = vec![config.vocab_size as usize, hidden];
    let mut all = vec![(TensorName::Embedding, embedding.clone()), (TensorName::OutputNorm, vec![hidden])];
    if !config.tied_embeddings {
        all.push((TensorName::Output, embedding));
    }
    for layer in 0..config.layers {
        let shapes = LayerTensor::ALL.into_iter().filter_map(|t| Some((t, layer_shape(config, t)?)));
        all.extend(shapes.map(|(tensor, shape)| (TensorName::Layer(layer, tensor), shape)));
    }
    all
}

/// The shape of a layer's tensor; None where the configuration has none.
fn layer_shape(config: &ModelConfig, tensor: LayerTensor) -> Option<Vec<usize>> {
    use LayerTensor::*;
    let (hidden, inner) = (config.hidden_size as usize, config.intermediate_size as usize);
    let (q, kv, head) = (config.q_size() as usize, config.kv_size() as usize, config.head_dim as usize);
    let present = match tensor {
        QBias | KBias | VBias => config.qkv_bias,
        QNorm | KNorm => config.qk_norm,
        PostAttnNorm | PostFfnNorm => config.post_norms,
        _ => true,
    };
    present.then(|| match tensor {
        AttnNorm | PostAttnNorm | FfnNorm | PostFfnNorm => vec![hidden],
        QNorm | KNorm => vec![head],
        QBias => vec![q],
        KBias | VBias => vec![kv],
        Q => vec![q, hidden],
        K | V => vec![kv, hidden],
        AttnOutput => vec![hidden, q],
        Gate | Up => vec![inner, hidden],
        Down => vec![hidden, inner],
    })
}

/// Finds every tensor that the configuration needs and checks it. A tensor inside a layer that the configuration does not
/// account for is an error, because ignoring it would compute another model.
pub(crate) fn bind(
    config: &ModelConfig,
    store: &TensorStore,
    naming: &Naming,
) -> Result<BTreeMap<TensorName, Entry>, ModelFileError> {
    let mut bound = BTreeMap::new();
    let mut texts = BTreeSet::new();
    for (name, shape) in required(config) {
        let text = naming.text(name);
        let entry = store.get(&text).ok_or_else(|| ModelFileError::tensor(store.main_path(), &text, "is missing"))?;
        check(store, &text, entry, &shape)?;
        bound.insert(name, entry.clone());
        texts.insert(text);
    }
    if let Some(entry) = store.get(&naming.text(TensorName::RopeFreqs)) {
        bound.insert(TensorName::RopeFreqs, entry.clone());
    }
    let layers = naming.layer_prefix();
    // Derived from the configuration; files of old converters have it nevertheless.
    let ignorable = |text: &str| text.ends_with("rotary_emb.inv_freq");
    match store.names().find(|text| text.starts_with(&layers) && !texts.contains(*text) && !ignorable(text)) {
        Some(text) => {
            let problem = format!("is no part of a {:?} layer as configured", config.architecture);
            Err(ModelFileError::tensor(store.main_path(), text, problem))
        }
        None => Ok(bound),
    }
}

fn check(store: &TensorStore, text: &str, entry: &Entry, shape: &[usize]) -> Result<(), ModelFileError> {
    let fail = |problem: String| Err(ModelFileError::tensor(store.path_of(entry), text, problem));
    if entry.shape != shape {
        return fail(format!("has shape {:?}, the configuration needs {shape:?}", entry.shape));
    }
    match &entry.dtype {
        StoredDtype::Unsupported(dtype) => fail(format!(
            "has element type {dtype}; supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"
        )),
        StoredDtype::Supported(dtype) if shape.len() == 1 && dtype.block_elements() > 1 => {
            fail(format!("is a vector of element type {dtype}; vectors must be F32, F16 or BF16"))
        }
        StoredDtype::Supported(_) => Ok(()),
    }
}
