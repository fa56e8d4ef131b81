//! What the engine refuses, and why a sequence can fail.

use baton_kv_cache::KvError;
use baton_types::{BatonError, ErrorKind, SamplingError, SeqId};

/// Errors of the engine's calls. A call that fails leaves the engine unchanged, unless block accounting itself is
/// broken ([`EngineError::Kv`]).
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EngineError {
    /// A configured limit that cannot work.
    #[error("engine configuration: {field} is {value}; it must be {must}")]
    Config {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What is allowed.
        must: String,
    },
    /// `prompt_tokens` does not fit `tokens`.
    #[error("prompt_tokens is {prompt}; it must be between 1 and the {tokens} tokens given")]
    PromptTokens {
        /// The value of `prompt_tokens`.
        prompt: u32,
        /// Tokens given.
        tokens: usize,
    },
    /// A sampling field out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Prompt and answer together may exceed the model's context.
    #[error(
        "prompt of {prompt} tokens and max_tokens {max_tokens} need {}, more than the context of {context} tokens; \
         shorten the prompt or lower max_tokens", u64::from(*prompt) + u64::from(*max_tokens)
    )]
    ExceedsContext {
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens the answer may have.
        max_tokens: u32,
        /// The limit on both together.
        context: u32,
    },
    /// The sequence may need more KV than the whole pool holds.
    #[error(
        "the request needs KV for {needed} tokens, the worker's pool holds {capacity}; \
         shorten the prompt, lower max_tokens or give the worker more KV blocks"
    )]
    ExceedsPool {
        /// Tokens whose KV is needed at once.
        needed: u64,
        /// Most tokens whose KV one sequence can have.
        capacity: u64,
    },
    /// The answer of a resumed request is complete already.
    #[error("the answer is complete: {generated} tokens were generated, {why}")]
    AlreadyComplete {
        /// Tokens of the answer given.
        generated: u32,
        /// What ended it.
        why: &'static str,
    },
    /// The queue is full (I5).
    #[error("the queue is full: {waiting} sequences wait, the limit is {limit}; try again later")]
    QueueFull {
        /// Sequences that wait.
        waiting: u32,
        /// The limit.
        limit: u32,
    },
    /// No such sequence: it ended, or was never here.
    #[error("sequence {0} is not here: it has ended or was never submitted")]
    UnknownSequence(SeqId),
    /// The sequence is in another state.
    #[error("cannot {operation} sequence {seq}: it is {state}")]
    WrongState {
        /// The sequence.
        seq: SeqId,
        /// What was asked.
        operation: &'static str,
        /// What it is doing.
        state: &'static str,
    },
    /// The first token from the prefill side is not the next one of the answer (I4).
    #[error("first token of sequence {seq} has index {index}; the next token of its answer is {expected}")]
    FirstToken {
        /// The sequence.
        seq: SeqId,
        /// The index that came.
        index: u32,
        /// The index that was due.
        expected: u32,
    },
    /// Nothing is to be fetched.
    #[error("all {tokens} tokens are in the prefix cache already or on their way, or this worker keeps no prefixes")]
    Here {
        /// Tokens of the prefix.
        tokens: u32,
    },
    /// A prefix cannot be fetched now.
    #[error("there are no blocks for {tokens} tokens of a prefix now; compute them instead")]
    NoRoom {
        /// Tokens that are not here.
        tokens: u32,
    },
    /// A prefix cannot be served.
    #[error("{here} of {tokens} tokens of a prefix are in the cache; compute them instead")]
    NotHere {
        /// Tokens asked for.
        tokens: u32,
        /// Tokens that are here.
        here: u32,
    },
    /// Block accounting failed.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// I6 is broken: the blocks that sequences own are not those that the pool says are owned.
    #[error("engine state is inconsistent: {0}")]
    Inconsistent(String),
}

impl BatonError for EngineError {
    fn kind(&self) -> ErrorKind {
        match self {
            EngineError::Config { .. }
            | EngineError::PromptTokens { .. }
            | EngineError::ExceedsContext { .. }
            | EngineError::ExceedsPool { .. }
            | EngineError::AlreadyComplete { .. } => ErrorKind::InvalidArgument,
            EngineError::Sampling(error) => error.kind(),
            EngineError::QueueFull { .. } | EngineError::NoRoom { .. } => ErrorKind::ResourceExhausted,
            EngineError::UnknownSequence(_) | EngineError::Here { .. } | EngineError::NotHere { .. } => {
                ErrorKind::NotFound
            }
            EngineError::FirstToken { .. } => ErrorKind::DataLoss,
            EngineError::Kv(error) => error.kind(),
            EngineError::WrongState { .. } | EngineError::Inconsistent(_) => ErrorKind::Internal,
        }
    }
}

/// A model could not compute a batch.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("model step failed: {0}")]
pub struct RunError(pub String);

impl BatonError for RunError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// Why one sequence failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SequenceError {
    /// Its deadline passed.
    #[error("the request's deadline passed while it was {state}")]
    Deadline {
        /// What it was doing.
        state: &'static str,
    },
    /// The blocks it needs are in quarantine because a peer that does not answer may still write to them (I3), and no
    /// other blocks can come free.
    #[error(
        "{blocks} KV blocks are kept aside for a peer that does not answer, and the others do not do; try again later"
    )]
    Quarantined {
        /// Blocks in quarantine.
        blocks: u32,
    },
    /// The model failed on a batch it was part of.
    #[error(transparent)]
    Run(#[from] RunError),
    /// No token could be chosen for it: its constraint leaves none, or cannot be followed.
    #[error("{0}")]
    NoToken(String),
    /// The model broke its contract.
    #[error("the model gave something else than the {due} tokens that were due: {what}")]
    Output {
        /// Tokens that the step's rows sample and score.
        due: usize,
        /// What is wrong.
        what: String,
    },
}

impl BatonError for SequenceError {
    fn kind(&self) -> ErrorKind {
        match self {
            SequenceError::Deadline { .. } => ErrorKind::DeadlineExceeded,
            SequenceError::Quarantined { .. } => ErrorKind::ResourceExhausted,
            SequenceError::Run(error) => error.kind(),
            // It would fail the same way on every worker.
            SequenceError::NoToken(_) => ErrorKind::InvalidArgument,
            SequenceError::Output { .. } => ErrorKind::Internal,
        }
    }
}
