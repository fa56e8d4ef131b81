//! Sampling parameters with every default filled in, and the results of sampling.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::constraint::Constraint;
use crate::error::{BatonError, ErrorKind};

/// How to choose tokens and when to stop. The router handles stop strings.
#[derive(Clone, PartialEq, Debug)]
pub struct SamplingParams {
    /// Most tokens to generate, at least 1. Counts all tokens of the answer, including those of an earlier attempt.
    pub max_tokens: u32,
    /// Tokens before which no stop token is chosen. At most `max_tokens`.
    pub min_tokens: u32,
    /// 0 is greedy; otherwise logits are divided by it. Range [0, 100].
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this. Range (0, 1].
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Drop tokens whose probability is below this times that of the most likely token. Range [0, 1].
    pub min_p: f32,
    /// Seed. Randomness is a function of (seed, token index) only (I1).
    pub seed: u64,
    /// Subtracted once from logits of tokens already generated. Range [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted per occurrence from logits of tokens already generated. Range [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer. Above 0; 1 turns it off.
    pub repetition_penalty: f32,
    /// Added to the logits of single tokens, sorted by token id.
    pub logit_bias: Vec<(u32, f32)>,
    /// None: no log probabilities. Some(n): those of the chosen token and of the n most likely ones, n ≤ 20.
    pub top_logprobs: Option<u32>,
    /// None: no log probabilities of the prompt. Some(n): those of each prompt token after the first and of the n most likely ones in its
    /// place, n ≤ 20.
    pub prompt_logprobs: Option<u32>,
    /// Tokens that end the sequence. Includes the model's end tokens unless the client ignores them.
    pub stop_token_ids: Vec<u32>,
    /// The constraint on the answer. Tokens that violate it are never chosen. Stop tokens are chosen only where the answer is complete;
    /// there must be at least one stop token.
    pub constraint: Option<Arc<Constraint>>,
}

impl SamplingParams {
    /// Whether the token of this index may not be a stop token.
    pub fn goes_on(&self, index: u32) -> bool {
        index < self.min_tokens && !self.stop_token_ids.is_empty()
    }

    /// Whether the choice of the next token depends on the answer's tokens in other ways than through the model's logits: by a constraint
    /// or a penalty.
    pub fn looks_back(&self) -> bool {
        let penalties = [self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0];
        self.constraint.is_some() || penalties.iter().any(|penalty| *penalty != 0.0)
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            max_tokens: 16,
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            top_logprobs: None,
            prompt_logprobs: None,
            stop_token_ids: Vec::new(),
            constraint: None,
        }
    }
}

/// A sampling field out of its range.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{field} is {value}; it must be {range}")]
pub struct SamplingError {
    /// The field, as clients name it.
    pub field: &'static str,
    /// What was sent.
    pub value: String,
    /// What is allowed.
    pub range: &'static str,
}

impl BatonError for SamplingError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}

impl SamplingParams {
    /// Checks every range. The error names the first field outside its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |ok: bool, field: &'static str, value: &dyn ToString, range: &'static str| {
            if ok { Ok(()) } else { Err(SamplingError { field, value: value.to_string(), range }) }
        };
        let between = |v: f32, low: f32, high: f32| v >= low && v <= high;
        check(self.max_tokens >= 1, "max_tokens", &self.max_tokens, "at least 1")?;
        check(self.min_tokens <= self.max_tokens, "min_tokens", &self.min_tokens, "at most max_tokens")?;
        let free = self.min_tokens == 0 || self.constraint.is_none();
        check(free, "min_tokens", &self.min_tokens, "0 with a constraint, which says itself where an answer ends")?;
        check(between(self.temperature, 0.0, 100.0), "temperature", &self.temperature, "between 0 and 100")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", &self.top_p, "above 0 and at most 1")?;
        check(between(self.min_p, 0.0, 1.0), "min_p", &self.min_p, "between 0 and 1")?;
        check(
            between(self.presence_penalty, -2.0, 2.0),
            "presence_penalty",
            &self.presence_penalty,
            "between -2 and 2",
        )?;
        check(
            between(self.frequency_penalty, -2.0, 2.0),
            "frequency_penalty",
            &self.frequency_penalty,
            "between -2 and 2",
        )?;
        check(
            self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            "repetition_penalty",
            &self.repetition_penalty,
            "a finite number above 0",
        )?;
        for (id, bias) in &self.logit_bias {
            check(
                between(*bias, -100.0, 100.0),
                "logit_bias",
                &format!("{bias} for token {id}"),
                "between -100 and 100",
            )?;
        }
        if let Some(constraint) = &self.constraint {
            let bytes = constraint.text().len();
            let bounded = (1..=Constraint::MAX_BYTES).contains(&bytes);
            check(bounded, "constraint", &format!("{bytes} bytes"), "1 to 131072 bytes")?;
            check(
                !self.stop_token_ids.is_empty(),
                "stop_token_ids",
                &"empty",
                "at least one token that ends the answer",
            )?;
        }
        let top = self.top_logprobs.unwrap_or(0);
        check(top <= 20, "top_logprobs", &top, "at most 20")?;
        let top = self.prompt_logprobs.unwrap_or(0);
        check(top <= 20, "prompt_logprobs", &top, "at most 20")
    }

    /// Whether the most likely token is always chosen.
    pub fn greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// One sampled token, or one token of a prompt with its log probability.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TokenOut {
    /// Its number in the answer, from 0 (I4); of a token of a prompt: its position there.
    pub index: u32,
    /// Vocabulary id.
    pub id: u32,
    /// Natural logarithm of its probability under the unmodified model, when asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens and their log probabilities, most likely first, when asked for.
    pub top: Vec<(u32, f32)>,
    /// [`crate::digest_f32`] of the whole row of logits it was chosen from, before penalties; set when log probabilities were asked for.
    /// Equal digests of two routes on the same kind of backend mean that both computed the same logits, bit by bit (I1).
    pub logits_digest: Option<u64>,
    /// Why no token could be chosen: the sequence fails and `id` has no meaning. Never leaves the worker.
    pub failed: Option<String>,
}

impl TokenOut {
    /// Whether nothing is known of it but its id and its number.
    pub fn has_only_an_id(&self) -> bool {
        let TokenOut { index: _, id: _, logprob, top, logits_digest, failed } = self;
        logprob.is_none() && top.is_empty() && logits_digest.is_none() && failed.is_none()
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` was reached, or the end of the context.
    Length,
    /// The client went away or the request was aborted.
    Cancelled,
}

/// The size of a request, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was reused instead of computed.
    pub cached_tokens: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_range_is_checked_and_named() {
        let ok = SamplingParams::default();
        assert_eq!(ok.validate(), Ok(()));
        let cases: [(&str, SamplingParams); 11] = [
            ("max_tokens", SamplingParams { max_tokens: 0, ..ok.clone() }),
            ("temperature", SamplingParams { temperature: f32::NAN, ..ok.clone() }),
            ("top_p", SamplingParams { top_p: 0.0, ..ok.clone() }),
            ("min_p", SamplingParams { min_p: 1.5, ..ok.clone() }),
            ("presence_penalty", SamplingParams { presence_penalty: -3.0, ..ok.clone() }),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..ok.clone() }),
            ("logit_bias", SamplingParams { logit_bias: vec![(1, f32::INFINITY)], ..ok.clone() }),
            ("top_logprobs", SamplingParams { top_logprobs: Some(21), ..ok.clone() }),
            ("prompt_logprobs", SamplingParams { prompt_logprobs: Some(21), ..ok.clone() }),
            ("constraint", SamplingParams { constraint: Some(Constraint::Regex(String::new()).into()), ..ok.clone() }),
            ("stop_token_ids", SamplingParams { constraint: Some(Constraint::Regex("a".into()).into()), ..ok.clone() }),
        ];
        for (field, params) in cases {
            assert_eq!(params.validate().map_err(|e| e.field), Err(field));
        }
    }
    #[test]
    fn the_text_of_a_constraint_is_bounded() {
        let of = |bytes: usize| {
            let constraint = Some(Constraint::Regex("a".repeat(bytes)).into());
            SamplingParams { constraint, stop_token_ids: vec![1], ..SamplingParams::default() }.validate()
        };
        assert_eq!((of(1), of(Constraint::MAX_BYTES)), (Ok(()), Ok(())));
        let told = |bytes| of(bytes).map_err(|e| e.to_string());
        assert_eq!(told(0), Err("constraint is 0 bytes; it must be 1 to 131072 bytes".to_owned()));
        assert!(of(Constraint::MAX_BYTES + 1).is_err());
    }
}
