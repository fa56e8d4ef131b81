//! Checked conversion between the wire and `baton-types`.

use std::sync::Arc;

use baton_types::{BatonError, Constraint, ErrorKind, FinishReason, SamplingError, SamplingParams, TokenOut};

use crate::v1;

/// A message whose field cannot be converted.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ConvertError {
    /// A required message is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An enum number this version does not know.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        /// Which field.
        field: &'static str,
        /// The number.
        value: i32,
    },
    /// A sampling field out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// `prompt_tokens` does not fit `tokens`.
    #[error("sequence.prompt_tokens is {prompt}; it must be between 1 and the {tokens} tokens given")]
    PromptTokens {
        /// The value of `prompt_tokens`.
        prompt: u32,
        /// Number of tokens in `tokens`.
        tokens: usize,
    },
}

impl BatonError for ConvertError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}

/// Metadata key in a status by which a worker says that it drains and did not accept the request.
const DRAINING: &str = "baton-draining";

/// The status of a worker that drains. A router that does not know the metadata key reads it as "unavailable".
pub fn draining_status(message: impl Into<String>) -> tonic::Status {
    let mut status = tonic::Status::unavailable(message);
    status.metadata_mut().insert(DRAINING, tonic::metadata::MetadataValue::from_static("1"));
    status
}

/// True for a status made by [`draining_status`].
pub fn says_draining(status: &tonic::Status) -> bool {
    status.metadata().contains_key(DRAINING)
}

/// The gRPC status of an error.
pub fn status_of(error: &dyn BatonError) -> tonic::Status {
    tonic::Status::new(tonic::Code::from_i32(error.kind().grpc_code()), error.to_string())
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => v1::FinishReason::Stop,
            FinishReason::Length => v1::FinishReason::Length,
            FinishReason::Cancelled => v1::FinishReason::Cancelled,
        }
    }
}

impl TryFrom<v1::FinishReason> for FinishReason {
    type Error = ConvertError;
    fn try_from(reason: v1::FinishReason) -> Result<Self, ConvertError> {
        match reason {
            v1::FinishReason::Stop => Ok(FinishReason::Stop),
            v1::FinishReason::Length => Ok(FinishReason::Length),
            v1::FinishReason::Cancelled => Ok(FinishReason::Cancelled),
            v1::FinishReason::Unspecified => Err(ConvertError::Unknown { field: "finish reason", value: 0 }),
        }
    }
}

impl From<TokenOut> for v1::Token {
    fn from(t: TokenOut) -> Self {
        let top = t.top.into_iter().map(|(id, logprob)| v1::TopLogprob { id, logprob }).collect();
        v1::Token { index: t.index, id: t.id, logprob: t.logprob, top, logits_digest: t.logits_digest }
    }
}

impl From<v1::Token> for TokenOut {
    fn from(t: v1::Token) -> Self {
        let top = t.top.into_iter().map(|p| (p.id, p.logprob)).collect();
        TokenOut { index: t.index, id: t.id, logprob: t.logprob, top, logits_digest: t.logits_digest, failed: None }
    }
}

impl From<Constraint> for v1::Constraint {
    fn from(constraint: Constraint) -> Self {
        let kind = match constraint {
            Constraint::JsonSchema(text) => v1::constraint::Kind::JsonSchema(text),
            Constraint::Regex(text) => v1::constraint::Kind::Regex(text),
            Constraint::Lark(text) => v1::constraint::Kind::Lark(text),
        };
        v1::Constraint { kind: Some(kind) }
    }
}

impl TryFrom<v1::Constraint> for Constraint {
    type Error = ConvertError;
    fn try_from(constraint: v1::Constraint) -> Result<Self, ConvertError> {
        match constraint.kind {
            Some(v1::constraint::Kind::JsonSchema(text)) => Ok(Constraint::JsonSchema(text)),
            Some(v1::constraint::Kind::Regex(text)) => Ok(Constraint::Regex(text)),
            Some(v1::constraint::Kind::Lark(text)) => Ok(Constraint::Lark(text)),
            None => Err(ConvertError::Missing("sampling.constraint.kind")),
        }
    }
}

impl From<SamplingParams> for v1::WorkerSampling {
    fn from(p: SamplingParams) -> Self {
        v1::WorkerSampling {
            max_tokens: p.max_tokens,
            min_tokens: p.min_tokens,
            prompt_logprobs: p.prompt_logprobs,
            temperature: p.temperature,
            top_p: p.top_p,
            top_k: p.top_k,
            min_p: p.min_p,
            seed: p.seed,
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            repetition_penalty: p.repetition_penalty,
            logit_bias: p.logit_bias.into_iter().collect(),
            top_logprobs: p.top_logprobs,
            stop_token_ids: p.stop_token_ids,
            constraint: p.constraint.map(|c| Arc::unwrap_or_clone(c).into()),
        }
    }
}

impl TryFrom<v1::WorkerSampling> for SamplingParams {
    type Error = ConvertError;
    fn try_from(p: v1::WorkerSampling) -> Result<Self, ConvertError> {
        let mut logit_bias: Vec<(u32, f32)> = p.logit_bias.into_iter().collect();
        logit_bias.sort_by_key(|(id, _)| *id);
        let params = SamplingParams {
            max_tokens: p.max_tokens,
            min_tokens: p.min_tokens,
            prompt_logprobs: p.prompt_logprobs,
            temperature: p.temperature,
            top_p: p.top_p,
            top_k: p.top_k,
            min_p: p.min_p,
            seed: p.seed,
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            repetition_penalty: p.repetition_penalty,
            logit_bias,
            top_logprobs: p.top_logprobs,
            stop_token_ids: p.stop_token_ids,
            constraint: p.constraint.map(Constraint::try_from).transpose()?.map(Arc::new),
        };
        params.validate()?;
        Ok(params)
    }
}

impl v1::Sequence {
    /// Checks the properties that every worker relies on and returns the sampling parameters.
    pub fn checked_sampling(&self) -> Result<SamplingParams, ConvertError> {
        let (prompt, tokens) = (self.prompt_tokens, self.tokens.len());
        if prompt == 0 || prompt as usize > tokens {
            return Err(ConvertError::PromptTokens { prompt, tokens });
        }
        let sampling = self.sampling.clone().ok_or(ConvertError::Missing("sequence.sampling"))?;
        sampling.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_survives_the_wire() {
        let params = SamplingParams {
            min_tokens: 3,
            prompt_logprobs: Some(4),
            logit_bias: vec![(3, 1.5), (9, -2.0)],
            stop_token_ids: vec![2],
            top_logprobs: Some(5),
            seed: u64::MAX,
            ..SamplingParams::default()
        };
        for constraint in [
            None,
            Some(Constraint::JsonSchema("{}".to_owned())),
            Some(Constraint::Regex("a*".to_owned())),
            Some(Constraint::Lark("start: \"a\"".to_owned())),
        ] {
            let min_tokens = if constraint.is_none() { 3 } else { 0 };
            let params = SamplingParams { constraint: constraint.map(Arc::new), min_tokens, ..params.clone() };
            assert_eq!(SamplingParams::try_from(v1::WorkerSampling::from(params.clone())), Ok(params));
        }
    }

    #[test]
    fn a_constraint_of_no_kind_is_refused() {
        let unknown =
            v1::WorkerSampling { constraint: Some(v1::Constraint { kind: None }), ..SamplingParams::default().into() };
        assert_eq!(SamplingParams::try_from(unknown), Err(ConvertError::Missing("sampling.constraint.kind")));
    }

    #[test]
    fn a_token_survives_the_wire() {
        let top = vec![(4, -0.5), (9, -1.5)];
        let logits_digest = Some(u64::MAX - 1);
        let token = TokenOut { index: 3, id: 9, logprob: Some(-1.5), top, logits_digest, failed: None };
        assert_eq!(TokenOut::from(v1::Token::from(token.clone())), token);
        let bare = TokenOut { index: 3, id: 9, ..TokenOut::default() };
        assert_eq!(TokenOut::from(v1::Token::from(bare.clone())), bare);
    }

    #[test]
    fn a_bad_sequence_names_its_field() {
        let bad = v1::Sequence { tokens: vec![1, 2], prompt_tokens: 3, ..Default::default() };
        assert_eq!(bad.checked_sampling(), Err(ConvertError::PromptTokens { prompt: 3, tokens: 2 }));
        let bare = v1::Sequence { tokens: vec![1, 2], prompt_tokens: 1, ..Default::default() };
        assert!(bare.checked_sampling().unwrap_err().to_string().contains("sequence.sampling"));
    }
}
