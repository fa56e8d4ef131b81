//! What the two streams of a choice say, and what their ends mean.
//!
//! The shell turns messages and errors of its transport into these; this file turns them into inputs of the request's
//! state machine. It knows no transport.

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use crate::request::{Failure, Input};

/// A decode worker's message.
#[derive(Clone, PartialEq, Debug)]
pub enum DecodeWord {
    /// Blocks are reserved.
    Reserved {
        /// Where a prefill worker may write. Opaque.
        target: Vec<u8>,
    },
    /// A token.
    Token(TokenOut),
    /// It computes the prompt itself.
    Started {
        /// Prompt tokens it did not have to compute.
        cached_tokens: u32,
    },
    /// The answer has ended. The last message.
    Finished(FinishReason),
}

/// A prefill worker's message.
#[derive(Clone, PartialEq, Debug)]
pub enum PrefillWord {
    /// The token it sampled.
    FirstToken {
        /// Numbered by how many tokens the sequence had been given.
        token: TokenOut,
        /// Set when it ends the answer.
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
    /// It was closed without a word.
    Early,
    /// The worker itself ended it with an error.
    Answered {
        /// Which.
        kind: ErrorKind,
        /// Its words.
        message: String,
    },
    /// The worker drains and did not take the request.
    Draining {
        /// Its words.
        message: String,
    },
    /// The connection failed, and the worker said nothing.
    Lost {
        /// Why.
        message: String,
        /// Nothing came over the connection, or nobody listens at its end: the worker hangs, or is gone.
        silent: bool,
    },
    /// The worker said what this version does not understand.
    Unclear {
        /// What.
        message: String,
    },
    /// The worker has left the view, so the stream was never opened.
    Left {
        /// Who.
        worker: WorkerId,
    },
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
    /// The decode worker's own word that the KV it waits for will not come.
    fn is_about_kv(&self) -> bool {
        matches!(self, LegEnd::Answered { kind: ErrorKind::Unavailable | ErrorKind::PathLost, .. })
    }

    fn failure(self, role: &str) -> Failure {
        let unavailable = |message: String| Failure::new(ErrorKind::Unavailable, message);
        match self {
            LegEnd::Early => unavailable(format!("the {role} worker ended the stream too early")),
            // Nobody on this side cancelled, or the stream would be gone.
            LegEnd::Answered { kind: ErrorKind::Cancelled, .. } => {
                unavailable(format!("the {role} worker cancelled the request"))
            }
            LegEnd::Answered { kind, message } => Failure::new(kind, format!("the {role} worker answered: {message}")),
            LegEnd::Draining { message } => Failure::leaving(format!("the {role} worker answered: {message}")),
            LegEnd::Lost { message, silent } => {
                let lost = format!("the {role} worker is lost: {message}");
                if silent { Failure::silent(lost) } else { unavailable(lost) }
            }
            LegEnd::Unclear { message } => Failure::new(ErrorKind::Internal, message),
            LegEnd::Left { worker } => Failure::leaving(format!("worker {worker} has left")),
        }
    }
}

/// The message as the machine takes it.
pub(super) fn decode_said(word: DecodeWord) -> Input {
    match word {
        DecodeWord::Reserved { .. } => Input::Reserved,
        DecodeWord::Token(token) => Input::Token(token),
        DecodeWord::Started { cached_tokens } => Input::Started { cached_tokens },
        DecodeWord::Finished(reason) => Input::Finished(reason),
    }
}

pub(super) fn prefill_said(word: PrefillWord) -> Input {
    match word {
        PrefillWord::FirstToken { token, finish, cached_tokens } => Input::FirstToken { token, finish, cached_tokens },
        PrefillWord::Transferred => Input::Transferred,
    }
}

/// `awaiting_kv`: the last message was a reservation.
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
