//! The messages of a choice's two streams, and what it means when a stream ends.
//!
//! The shell turns messages and errors of its connections into these types. This file turns them into inputs of the
//! request's state machine. It knows no connection.

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use crate::request::{Failure, Input};

/// A message of a decode worker.
#[derive(Clone, PartialEq, Debug)]
pub enum DecodeWord {
    /// Blocks are reserved.
    Reserved {
        /// Where a prefill worker may write. Opaque bytes.
        target: Vec<u8>,
    },
    /// Tokens of the prompt with their log probabilities, in order.
    Scored(Vec<TokenOut>),
    /// A token.
    Token(TokenOut),
    /// The decode worker computes the prompt itself.
    Started {
        /// Prompt tokens it did not have to compute.
        cached_tokens: u32,
    },
    /// The answer has ended. The last message.
    Finished(FinishReason),
}

/// A message of a prefill worker.
#[derive(Clone, PartialEq, Debug)]
pub enum PrefillWord {
    /// The turn of a prompt that was sent without a target is near.
    Due,
    /// Tokens of the prompt with their log probabilities, in order.
    Scored(Vec<TokenOut>),
    /// The token it sampled.
    FirstToken {
        /// The token. Its index is the number of answer tokens that the stream was opened with.
        token: TokenOut,
        /// Set when this token ends the answer.
        finish: Option<FinishReason>,
        /// Prompt tokens it did not have to compute.
        cached_tokens: u32,
    },
    /// All KV is applied at the decode worker. The last message.
    Transferred,
}

/// How a stream ended before its last message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LegEnd {
    /// The stream was closed without an error.
    Early,
    /// The worker itself ended it with an error.
    Answered {
        /// Kind of error.
        kind: ErrorKind,
        /// The worker's error message.
        message: String,
    },
    /// The worker drains and did not take the request.
    Draining {
        /// The worker's error message.
        message: String,
    },
    /// The connection failed without a message from the worker.
    Lost {
        /// Why the connection failed.
        message: String,
        /// How it failed.
        broken: Broken,
    },
    /// The worker sent something that this version does not understand.
    Unclear {
        /// What it sent.
        message: String,
    },
    /// The worker has left the view, so the stream was never opened.
    Left {
        /// The worker that left.
        worker: WorkerId,
    },
}

/// How a connection to a worker failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// It was given up because nothing came: no answer to a ping, or to a connect.
    TimedOut,
    /// Nobody listens at its address. A later listener there is another process, and so another worker.
    Refused,
    /// Any other way: the other end closed it, or the network did.
    Closed,
}

impl DecodeWord {
    /// True when nothing follows.
    pub fn is_last(&self) -> bool {
        matches!(self, DecodeWord::Finished(_))
    }
}

impl PrefillWord {
    /// True when nothing follows.
    pub fn is_last(&self) -> bool {
        matches!(self, PrefillWord::Transferred)
    }
}

impl LegEnd {
    /// The end of a stream that its worker ended with a gRPC status code. A worker that does not know this router, or lets it do nothing, is no
    /// client's fault.
    pub fn answered(code: i32, message: String) -> LegEnd {
        let kind = match ErrorKind::from_grpc_code(code) {
            ErrorKind::Unauthenticated | ErrorKind::PermissionDenied => ErrorKind::Unavailable,
            other => other,
        };
        LegEnd::Answered { kind, message }
    }

    /// True when a decode worker that waits for KV reports with this end that the KV will not come.
    fn is_about_kv(&self) -> bool {
        matches!(self, LegEnd::Answered { kind: ErrorKind::Unavailable | ErrorKind::PathLost, .. })
    }

    fn failure(self, role: &str) -> Failure {
        let unavailable = |message: String| Failure::new(ErrorKind::Unavailable, message);
        match self {
            LegEnd::Early => unavailable(format!("the {role} worker ended the stream too early")),
            // The worker cancelled. Had the router cancelled, the stream would be gone.
            LegEnd::Answered { kind: ErrorKind::Cancelled, .. } => {
                unavailable(format!("the {role} worker cancelled the request"))
            }
            LegEnd::Answered { kind, message } => Failure::new(kind, format!("the {role} worker answered: {message}")),
            LegEnd::Draining { message } => Failure::leaving(format!("the {role} worker answered: {message}")),
            LegEnd::Lost { message, broken } => {
                let lost = format!("the {role} worker is lost: {message}");
                match broken {
                    Broken::TimedOut => Failure::silent(lost),
                    // It took nothing on.
                    Broken::Refused => Failure::leaving(lost),
                    Broken::Closed => unavailable(lost),
                }
            }
            LegEnd::Unclear { message } => Failure::new(ErrorKind::Internal, message),
            LegEnd::Left { worker } => Failure::leaving(format!("worker {worker} has left")),
        }
    }
}

/// The message as an input of the machine, which knows nothing of scores.
pub(super) fn decode_said(word: DecodeWord) -> Option<Input> {
    Some(match word {
        DecodeWord::Reserved { .. } => Input::Reserved,
        DecodeWord::Scored(_) => return None,
        DecodeWord::Token(token) => Input::Token(token),
        DecodeWord::Started { cached_tokens } => Input::Started { cached_tokens },
        DecodeWord::Finished(reason) => Input::Finished(reason),
    })
}

pub(super) fn prefill_said(word: PrefillWord) -> Option<Input> {
    Some(match word {
        PrefillWord::Due => Input::Due,
        PrefillWord::Scored(_) => return None,
        PrefillWord::FirstToken { token, finish, cached_tokens } => Input::FirstToken { token, finish, cached_tokens },
        PrefillWord::Transferred => Input::Transferred,
    })
}

/// The end of a decode stream as an input of the machine. `awaiting_kv`: the last message was a reservation.
pub(super) fn decode_ended(end: LegEnd, awaiting_kv: bool) -> Input {
    let about_kv = awaiting_kv && end.is_about_kv();
    match end.failure("decode") {
        failure if about_kv => Input::HandoffFailed(failure),
        failure if failure.kind == ErrorKind::DataLoss => Input::VerifyFailed(failure),
        failure => Input::DecodeLost(failure),
    }
}

pub(super) fn prefill_ended(end: LegEnd) -> Input {
    match end.failure("prefill") {
        failure if failure.kind == ErrorKind::DataLoss => Input::VerifyFailed(failure),
        failure => Input::PrefillLost(failure),
    }
}
