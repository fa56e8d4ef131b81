//! Conversions between the wire and the engine that both roles need.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use baton_engine::{Exchange, NameSecret, NewSequence, Prefix, Share, Start, Time};
use baton_proto::v1;
use baton_transfer::TransferStats;
use baton_types::{ErrorKind, MAX_CACHE_KEEP_SECONDS, MAX_CACHE_SALT, RequestId, TokenOut};
use tonic::{Code, Status};

/// Engine time: nanoseconds since the worker started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// The current engine time.
    pub fn now(&self) -> Time {
        Time(self.0.elapsed().as_nanos() as u64)
    }
}

/// A worker's limits that a sequence is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    /// Token ids are below this.
    pub vocab: u32,
    /// The layout's fingerprint.
    pub layout: u64,
    /// Tokens of a block.
    pub block_size: u32,
    /// From which the names of blocks follow.
    pub secret: NameSecret,
    /// Longest time for which the prefix cache keeps a request's blocks.
    pub max_keep: Duration,
}

/// Checks a sequence from the router: its shape, its sampling parameters, and that every token is in the vocabulary.
pub(crate) fn new_sequence(sequence: v1::Sequence, fit: Fit, start: Start, now: Time) -> Result<NewSequence, Status> {
    let vocab = fit.vocab;
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
    let keep = sequence.cache_keep_seconds;
    if keep > MAX_CACHE_KEEP_SECONDS {
        let text = format!("sequence.cache_keep_seconds is {keep}; at most {MAX_CACHE_KEEP_SECONDS} are allowed");
        return Err(Status::new(Code::InvalidArgument, text));
    }
    let deadline = (sequence.deadline_ms > 0).then(|| now.after_ms(sequence.deadline_ms));
    let seed = prefix_seed(fit.layout, &sequence.cache_salt);
    let wanted = Duration::from_secs(sequence.cache_keep_seconds.into());
    let root = fit.secret.root(&sequence.cache_salt, fit.block_size);
    let prefix = Prefix { seed, root, ..Prefix::default() };
    let prefix = Some(prefix.kept_for(wanted, fit.max_keep, sequence.priority, now));
    let v1::Sequence { request_id, tokens, prompt_tokens, priority, tenant, weight, .. } = sequence;
    let share = Share { tenant, weight };
    let request_id = RequestId(request_id);
    Ok(NewSequence {
        request_id,
        tokens,
        prompt_tokens,
        params,
        start,
        deadline,
        prefix,
        priority,
        share,
        parked: false,
    })
}

/// The seed that separates the prefixes of tenants (by salt) and of models (the layout's fingerprint includes the model's). The hash
/// keys are random and known to this process only, so nobody can choose a salt with another tenant's seed.
fn prefix_seed(layout: u64, salt: &str) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one((layout, salt))
}

/// Checks a prefix from the router. It has `left` to move.
pub(crate) fn exchange(prefix: v1::Prefix, fit: Fit, left: Duration, now: Time) -> Result<Exchange, Status> {
    let v1::Prefix { request_id, tokens, cache_salt, cache_keep_seconds, priority, .. } = prefix;
    let sampling = Some(baton_types::SamplingParams::default().into());
    let prompt_tokens = tokens.len() as u32;
    let sequence = v1::Sequence { request_id, tokens, prompt_tokens, sampling, cache_salt, ..Default::default() };
    let sequence = v1::Sequence { cache_keep_seconds, priority, ..sequence };
    let new = new_sequence(sequence, fit, Start::Receive, now)?;
    let deadline = now.after_ms(left.as_millis() as u64);
    Ok(Exchange { request_id: new.request_id, tokens: new.tokens, prefix: new.prefix.unwrap_or_default(), deadline })
}

/// The end of a handoff, as it travels.
pub fn transferred(stats: &TransferStats) -> v1::Transferred {
    let transport = stats.transport.as_str().to_owned();
    v1::Transferred { bytes: stats.bytes, seconds: stats.seconds, transport }
}

/// Tokens of a prompt, as they travel.
pub fn scored(tokens: Vec<TokenOut>) -> v1::Scored {
    v1::Scored { tokens: tokens.into_iter().map(Into::into).collect() }
}

/// The status that ends a stream.
pub fn stream_status(kind: ErrorKind, message: impl Into<String>) -> Status {
    Status::new(Code::from_i32(kind.grpc_code()), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_by_name() {
        let sampling = Some(baton_types::SamplingParams::default().into());
        let sequence = v1::Sequence { tokens: vec![1, 9], prompt_tokens: 2, sampling, ..Default::default() };
        let secret = NameSecret::default();
        let fit = Fit { vocab: 8, layout: 1, block_size: 16, secret, max_keep: Duration::ZERO };
        let status = new_sequence(sequence, fit, Start::Compute, Time(0)).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("sequence.tokens holds 9"));
    }

    #[test]
    fn kept_as_asked_but_no_longer_than_the_worker_allows() {
        let secret = NameSecret::default();
        let fit = Fit { vocab: 8, layout: 1, block_size: 16, secret, max_keep: Duration::from_secs(60) };
        let read = |cache_keep_seconds, priority| {
            let sampling = Some(baton_types::SamplingParams::default().into());
            let sequence = v1::Sequence { tokens: vec![1], prompt_tokens: 1, sampling, ..Default::default() };
            let sequence = v1::Sequence { cache_keep_seconds, priority, ..sequence };
            new_sequence(sequence, fit, Start::Compute, Time(7)).map(|new| new.prefix.unwrap())
        };
        let kept = |seconds, priority| {
            let prefix = read(seconds, priority).unwrap();
            (prefix.keep, prefix.keep_until)
        };
        let after = |seconds: u64| Some(Time(7).after_ms(seconds * 1000));
        assert_eq!(kept(0, -128), (0, None), "who does not ask is not kept");
        assert_eq!(kept(9, 0), (128, after(9)));
        assert_eq!(kept(61, 127), (1, after(60)));
        assert_eq!([kept(5, 1000).0, kept(5, 126).0, kept(5, -128).0, kept(5, -1000).0], [1, 2, 255, 255]);
        // I8
        let status = read(MAX_CACHE_KEEP_SECONDS + 1, 0).unwrap_err();
        assert!(status.message().contains("cache_keep_seconds is 86401; at most 86400"), "{status}");
    }
}
