//! One request from placement to its end, with every recovery on the way, as an explicit state machine.
//!
//! The driver (the router) owns at most one decode stream and one prefill stream, turns what happens on them into
//! [`Input`]s and does what the [`Action`]s say. The machine knows no stream, no clock and no text. It owns what must
//! not go wrong: every index reaches the client once and in order (I4), and every request ends (I5).
//!
//! ```text
//!              Placed(split)          Reserved          FirstToken           Transferred
//!   Placing ────────────────▶ Reserving ─────▶ Prefilling ──────▶ Transferring ──────▶ Decoding ──▶ Finished
//!     ▲  │  Placed(local)             │ Started  │  PrefillLost      │                    ▲   │
//!     │  └────────────────────────────┴──────────┼───────────────────┼────────────────────┘   │
//!     │ BackoffOver                              ▼                   ▼                        │
//!   BackingOff ◀── NotPlaced            PlacingPrefill ──▶ Reserving, or Decoding locally     │
//!     ▲                                                                                       │
//!     └── DecodeLost in any state: place again with prompt + emitted tokens ◀─────────────────┘
//! ```

mod machine;
mod moves;
#[cfg(test)]
mod tests;

use std::time::Duration;

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use crate::placement::Placed;

pub use machine::RequestMachine;

/// Bounds of one request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestLimits {
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// How often work may be started for this request, at least 1.
    pub max_attempts: u32,
}

/// Why a leg ended, or why a request does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// What kind; decides whether another worker may help.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
    /// What it says of the worker.
    pub worker: Condition,
}

/// What a failure says of its worker, and so whether this request asks it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// It may be well again after a while.
    Usable,
    /// Nothing came from it: it hangs, or is gone. Each further try would cost as long as its silence took to notice (I5).
    Silent,
    /// It took nothing on: it drains, or has left. No work was started, so the failure costs no attempt.
    Leaving,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), worker: Condition::Usable }
    }

    /// A worker that says nothing, not even that it is gone.
    pub fn silent(message: impl Into<String>) -> Failure {
        Failure { worker: Condition::Silent, ..Failure::new(ErrorKind::Unavailable, message) }
    }

    /// A worker that takes nothing new.
    pub fn leaving(message: impl Into<String>) -> Failure {
        Failure { worker: Condition::Leaving, ..Failure::new(ErrorKind::Unavailable, message) }
    }
}

/// Where a request stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Waiting for workers to be chosen.
    Placing,
    /// Nobody could take it; waiting before asking again.
    BackingOff,
    /// The decode stream is open; waiting for its reservation, or for word that it needs none.
    Reserving {
        /// Will decode.
        decode: WorkerId,
        /// Will prefill.
        prefill: WorkerId,
    },
    /// The prefill worker is lost and the reservation given back; waiting for another prefill worker.
    PlacingPrefill {
        /// Will be asked for a new reservation.
        decode: WorkerId,
    },
    /// The prompt is being computed; its KV is on its way layer by layer.
    Prefilling {
        /// Holds the reservation.
        decode: WorkerId,
        /// Computes.
        prefill: WorkerId,
    },
    /// The first token is out; the tail of the KV is still on its way.
    Transferring {
        /// Holds the reservation.
        decode: WorkerId,
        /// Sends.
        prefill: WorkerId,
    },
    /// The decode worker has all it needs.
    Decoding {
        /// Decodes.
        decode: WorkerId,
        /// Sent the KV; None: the decode worker computes the prompt itself.
        prefill: Option<WorkerId>,
    },
    /// The answer is complete, or its client has left.
    Finished,
    /// Answered with an error.
    Failed,
}

/// What happened.
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// Answer to [`Action::Place`].
    Placed(Placed),
    /// Answer to [`Action::Place`]: nobody.
    NotPlaced(Failure),
    /// The decode worker reserved blocks.
    Reserved,
    /// The prefill worker sampled its token.
    FirstToken {
        /// Numbered by how many tokens the sequence had been given.
        token: TokenOut,
        /// Set when it ends the answer.
        finish: Option<FinishReason>,
        /// Prompt tokens the prefill worker did not have to compute.
        cached_tokens: u32,
    },
    /// The prefill worker's part is done and applied at the decode worker.
    Transferred,
    /// A token from the decode worker.
    Token(TokenOut),
    /// The decode worker has computed the prompt itself: it was asked to, or has next to all of it and needs no handoff.
    Started {
        /// Prompt tokens it did not have to compute.
        cached_tokens: u32,
    },
    /// The decode worker ended the answer.
    Finished(FinishReason),
    /// The decode stream ended before the answer did.
    DecodeLost(Failure),
    /// The prefill stream ended before its part was done.
    PrefillLost(Failure),
    /// The decode worker is well, but says that the KV it reserved blocks for will not come. Its stream has ended.
    HandoffFailed(Failure),
    /// KV arrived that does not verify (I2). Whichever stream said so has ended.
    VerifyFailed(Failure),
    /// The time asked for by [`Action::Backoff`] has passed.
    BackoffOver,
    /// A stop string was found in the text of the tokens emitted so far.
    StopMatched,
    /// The request's deadline has passed.
    Deadline,
    /// The driver gives the request up, for example because its process stops.
    Abort(Failure),
    /// The client went away.
    ClientGone,
}

/// Which part of the route failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Leg {
    /// The prefill worker.
    Prefill,
    /// The decode worker.
    Decode,
    /// The KV between them.
    Transfer,
}

impl Leg {
    /// A stable word for logs and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
            Leg::Transfer => "transfer",
        }
    }
}

/// What the driver does, in the order given.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Choose workers, leaving out [`RequestMachine::avoid`]; answer with `Placed` or `NotPlaced`.
    Place {
        /// Keeps this decode worker, which may hold some of the prefix; only a prefill worker is wanted.
        decode: Option<WorkerId>,
        /// False: decode prefills locally.
        split: bool,
    },
    /// Open a decode stream for prompt + the tokens emitted until now.
    OpenDecode {
        /// Where.
        worker: WorkerId,
        /// The decode worker computes the prompt itself.
        local: bool,
    },
    /// Run prefill for the sequence of the open decode stream, into its reservation.
    RunPrefill {
        /// Where.
        worker: WorkerId,
    },
    /// Give this token to the client.
    Emit(TokenOut),
    /// Drop the decode stream; the worker frees everything.
    CancelDecode,
    /// Drop the prefill stream; the worker frees everything.
    CancelPrefill,
    /// Wait, then say `BackoffOver`.
    Backoff(Duration),
    /// For logs and metrics: a failure is being recovered from.
    Recovering {
        /// What failed.
        leg: Leg,
        /// How.
        cause: Failure,
    },
    /// The answer is complete. The last action.
    Finish {
        /// Why it ended.
        reason: FinishReason,
        /// Prompt tokens whose KV was reused on the first attempt.
        cached_tokens: u32,
    },
    /// Answer with an error. The last action.
    Fail(Failure),
}
