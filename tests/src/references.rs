//! Outputs of llama.cpp and of Hugging Face transformers, committed under `tests/references/data`.
//!
//! Made by the scripts in `tests/references`, so that parity tests need none of those packages.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// `tests/references`, where scripts, prompts and data lie.
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("references")
}

/// A prompt every model is asked.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Prompt {
    /// Short, unique.
    pub name: String,
    /// As it goes to the tokenizer, special tokens written out.
    pub text: String,
}

/// The 20 prompts, 5 to about 1,500 tokens.
pub fn prompts() -> anyhow::Result<Vec<Prompt>> {
    read("prompts.json")
}

/// What llama.cpp says of one GGUF file.
#[derive(Clone, Debug, Deserialize)]
pub struct LlamaReference {
    /// `smollm2`, `gemma` or `qwen`.
    pub model: String,
    /// Name of the GGUF file.
    pub file: String,
    /// Its SHA-256, hexadecimal.
    pub sha256: String,
    /// Who made this, with version.
    pub engine: String,
    /// How it was run.
    pub settings: String,
    /// Rows of the logits.
    pub vocab_size: u32,
    /// In the order of [`prompts`].
    pub prompts: Vec<LlamaPrompt>,
    /// For the tokenizer alone; special tokens in the text are recognised, BOS is added where the file says so.
    pub texts: Vec<TokenizedText>,
}

/// One prompt's greedy continuation. Goes on past end tokens.
#[derive(Clone, Debug, Deserialize)]
pub struct LlamaPrompt {
    /// As in [`Prompt`].
    pub name: String,
    /// Every token the model saw, BOS included where the file asks for it.
    pub prompt_ids: Vec<u32>,
    /// The most likely token at each step.
    pub output_ids: Vec<u32>,
    /// `output_ids` as text, invalid UTF-8 replaced by U+FFFD.
    pub output_text: String,
    /// Index of the first end token in `output_ids`.
    pub first_end: Option<usize>,
    /// For each step the five most likely tokens and their log probabilities (natural), most likely first.
    pub top: Vec<Vec<(u32, f32)>>,
    /// For each step the natural log of the sum of exponentials: logit = log probability + this.
    pub lse: Vec<f32>,
}

impl LlamaPrompt {
    /// How far the best token leads at a step, in logits.
    pub fn gap(&self, step: usize) -> f32 {
        self.top[step][0].1 - self.top[step][1].1
    }
}

/// A text and its token ids.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct TokenizedText {
    /// Any text.
    pub text: String,
    /// Its ids.
    pub ids: Vec<u32>,
}

/// The reference of one GGUF file: `smollm2`, `gemma` or `qwen`.
pub fn llama(model: &str) -> anyhow::Result<LlamaReference> {
    read(&format!("data/{model}.json"))
}

/// What f32 arithmetic on the same, dequantised weights gives: a measure free of the noise of 8-bit activations.
#[derive(Clone, Debug, Deserialize)]
pub struct ExactReference {
    /// As in [`LlamaReference`].
    pub model: String,
    /// Of the GGUF file, hexadecimal.
    pub sha256: String,
    /// Who made this, with version.
    pub engine: String,
    /// How far llama.cpp's logits in [`LlamaPrompt::top`] are from these.
    pub llama_cpp_difference: Difference,
    /// In the order of [`prompts`].
    pub prompts: Vec<ExactPrompt>,
}

/// Absolute differences of logits.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub struct Difference {
    /// The largest.
    pub max: f32,
    /// Their mean.
    pub mean: f32,
}

/// One prompt, continued with llama.cpp's output.
#[derive(Clone, Debug, Deserialize)]
pub struct ExactPrompt {
    /// As in [`Prompt`].
    pub name: String,
    /// For each step the logits of the tokens in [`LlamaPrompt::top`], in that order.
    pub logits: Vec<Vec<f32>>,
}

/// The f32 logits of one GGUF file: `smollm2`, `gemma` or `qwen`.
pub fn exact(model: &str) -> anyhow::Result<ExactReference> {
    read(&format!("data/{model}.exact.json"))
}

/// What transformers says of every tiny model of [`crate::tiny`], in f32.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyReference {
    /// Who made this, with version.
    pub engine: String,
    /// In the order of [`crate::tiny::configs`].
    pub models: Vec<TinyModelReference>,
}

/// One tiny model's weights and outputs.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyModelReference {
    /// As in [`crate::tiny::TinyModel`].
    pub name: String,
    /// Its tensors, sorted by name.
    pub tensors: Vec<TensorReference>,
    /// Prompts of random ids.
    pub prompts: Vec<TinyPrompt>,
}

/// What a tensor holds before it is rounded to the file's dtype.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct TensorReference {
    /// Name in the file.
    pub name: String,
    /// Row-major; `[out, in]` for a matrix.
    pub shape: Vec<usize>,
    /// Sum of bits\[i\] · (2i + 1) modulo 2⁶⁴ over the f32 elements, hexadecimal.
    pub checksum: String,
    /// The first two elements.
    pub first: Vec<f32>,
}

/// One prompt's greedy continuation and logits. No step is a near tie: ids must agree exactly.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyPrompt {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// Greedy continuation, past end tokens.
    pub output_ids: Vec<u32>,
    /// Smallest lead of the best token over all steps, in logits.
    pub smallest_gap: f32,
    /// Logits at some positions: the prompt's last, the last step's, for long prompts some inside.
    pub logits: Vec<LogitsRow>,
}

/// Logits of the whole vocabulary at one position.
#[derive(Clone, Debug, Deserialize)]
pub struct LogitsRow {
    /// In prompt and output together, from 0; these logits predict the token after it.
    pub position: usize,
    /// `[vocab_size]`.
    pub values: Vec<f32>,
}

/// The reference of all tiny models.
pub fn tiny() -> anyhow::Result<TinyReference> {
    read("data/tiny.json")
}

pub(crate) fn read<T: DeserializeOwned>(relative: &str) -> anyhow::Result<T> {
    let path = directory().join(relative);
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("parsing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_references_fit_the_prompts() {
        let prompts = prompts().unwrap();
        assert_eq!(prompts.len(), 20);
        for model in ["smollm2", "gemma", "qwen"] {
            let reference = llama(model).unwrap();
            assert_eq!(reference.model, model);
            assert_eq!(reference.prompts.len(), prompts.len());
            for (prompt, result) in prompts.iter().zip(&reference.prompts) {
                assert_eq!(prompt.name, result.name);
                let steps = result.output_ids.len();
                assert!(steps >= 16);
                assert_eq!((result.top.len(), result.lse.len()), (steps, steps));
                for (step, top) in result.top.iter().enumerate() {
                    assert_eq!(top[0].0, result.output_ids[step], "greedy takes the first");
                    assert!(top.iter().all(|(id, logprob)| *id < reference.vocab_size && *logprob <= 0.0));
                    assert!(result.gap(step) >= 0.0);
                }
            }
            assert!(reference.texts.len() > 100);
        }
    }

    #[test]
    fn exact_references_agree_with_llama_cpp_within_its_noise() {
        for model in ["smollm2", "gemma", "qwen"] {
            let (llama, exact) = (llama(model).unwrap(), exact(model).unwrap());
            assert_eq!(exact.sha256, llama.sha256);
            let mut differences = Vec::new();
            for (prompt, exact) in llama.prompts.iter().zip(&exact.prompts) {
                assert_eq!((&prompt.name, prompt.top.len()), (&exact.name, exact.logits.len()));
                for ((top, lse), logits) in prompt.top.iter().zip(&prompt.lse).zip(&exact.logits) {
                    differences.extend(top.iter().zip(logits).map(|((_, logprob), x)| (logprob + lse - x).abs()));
                }
            }
            let mean = differences.iter().sum::<f32>() / differences.len() as f32;
            let max = differences.into_iter().fold(0.0, f32::max);
            let noted = exact.llama_cpp_difference;
            assert!((mean - noted.mean).abs() < 0.001 && (max - noted.max).abs() < 0.001, "{model}: {mean} {max}");
            assert!(mean < 0.5, "{model}: two engines that do not compute the same model");
        }
    }

    #[test]
    fn tiny_references_fit_the_configs() {
        let reference = tiny().unwrap();
        let configs = crate::tiny::configs().unwrap();
        assert_eq!(reference.models.len(), configs.len());
        for (model, config) in reference.models.iter().zip(&configs) {
            assert_eq!(model.name, config.name);
            let vocab = config.vocab_size().unwrap();
            for prompt in &model.prompts {
                assert!(prompt.smallest_gap > 0.002);
                for row in &prompt.logits {
                    assert_eq!(row.values.len(), vocab);
                    let best = (0..vocab).max_by(|&a, &b| row.values[a].total_cmp(&row.values[b])).unwrap();
                    let last = prompt.prompt_ids.len() - 1;
                    if row.position >= last {
                        assert_eq!(best as u32, prompt.output_ids[row.position - last]);
                    }
                }
            }
        }
    }
}
