//! Small conversions both roles need between the wire and the engine.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::Instant;

use baton_engine::{NewSequence, Prefix, Start, Time};
use baton_proto::v1;
use baton_types::{BatonError, ErrorKind, MAX_CACHE_SALT, RequestId, TokenOut};
use tonic::{Code, Status};

/// Engine time: nanoseconds since the worker started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts now.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// Now.
    pub fn now(&self) -> Time {
        Time(self.0.elapsed().as_nanos() as u64)
    }
}

/// Checks a sequence from the router: shape, sampling, and that every token is in the vocabulary.
pub(crate) fn new_sequence(
    sequence: v1::Sequence,
    vocab: u32,
    layout: u64,
    start: Start,
    clock: &Clock,
) -> Result<NewSequence, Status> {
    let params = sequence.checked_sampling().map_err(|e| baton_proto::status_of(&e))?;
    if let Some(id) = sequence.tokens.iter().find(|&&id| id >= vocab) {
        let text = format!("sequence.tokens holds {id}; the model's vocabulary has {vocab} tokens");
        return Err(Status::new(Code::InvalidArgument, text));
    }
    let salt = sequence.cache_salt.len();
    if salt > MAX_CACHE_SALT {
        let text = format!("sequence.cache_salt has {salt} bytes; at most {MAX_CACHE_SALT} are allowed");
        return Err(Status::new(Code::InvalidArgument, text));
    }
    let deadline = (sequence.deadline_ms > 0).then(|| clock.now().after_ms(sequence.deadline_ms));
    let prefix = Some(Prefix { seed: prefix_seed(layout, &sequence.cache_salt), ..Prefix::default() });
    let v1::Sequence { request_id, tokens, prompt_tokens, priority, .. } = sequence;
    let request = RequestId(request_id);
    Ok(NewSequence { request, tokens, prompt_tokens, params, start, deadline, prefix, priority })
}

/// What keeps tenants' prefixes apart, and those of models: with the layout's fingerprint comes the model's. The keys are this
/// process's own and random, so that nobody can choose a salt that has another's seed.
fn prefix_seed(layout: u64, salt: &str) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one((layout, salt))
}

/// The status that ends a stream.
pub fn stream_status(kind: ErrorKind, message: impl Into<String>) -> Status {
    Status::new(Code::from_i32(kind.grpc_code()), message)
}

/// The first token as it travels with the KV: index and id, little-endian. Its logprobs and the
/// digest of its logits go to the client directly.
pub fn write_first_token(token: &TokenOut) -> Vec<u8> {
    [token.index.to_le_bytes(), token.id.to_le_bytes()].concat()
}

/// What came with the KV is not a first token.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TailError {
    /// It has another length.
    #[error("the handoff's tail has {0} bytes; a first token has 8")]
    Length(usize),
    /// It is no token of the model: one such token would fail a whole batch (I8).
    #[error("the handoff's first token is {id}; the model's vocabulary has {vocab} tokens")]
    Token {
        /// The token's id.
        id: u32,
        /// Ids are below this.
        vocab: u32,
    },
}

impl BatonError for TailError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::DataLoss
    }
}

/// The inverse of [`write_first_token`], for a vocabulary of `vocab` tokens.
pub fn parse_first_token(tail: &[u8], vocab: u32) -> Result<TokenOut, TailError> {
    let bytes: [u8; 8] = tail.try_into().map_err(|_| TailError::Length(tail.len()))?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let id = word(4);
    if id >= vocab {
        return Err(TailError::Token { id, vocab });
    }
    Ok(TokenOut { index: word(0), id, ..TokenOut::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_survives_the_handoff() {
        let token = TokenOut { index: 7, id: 0x01020304, ..TokenOut::default() };
        let tail = write_first_token(&token);
        assert_eq!(parse_first_token(&tail, token.id + 1), Ok(token.clone()));
        assert_eq!(parse_first_token(&tail, token.id), Err(TailError::Token { id: token.id, vocab: token.id }));
        assert_eq!(parse_first_token(&[1, 2, 3], 9), Err(TailError::Length(3)));
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_by_name() {
        let sampling = Some(baton_types::SamplingParams::default().into());
        let sequence = v1::Sequence { tokens: vec![1, 9], prompt_tokens: 2, sampling, ..Default::default() };
        let status = new_sequence(sequence, 8, 1, Start::Compute, &Clock::start()).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("sequence.tokens holds 9"));
    }
}
