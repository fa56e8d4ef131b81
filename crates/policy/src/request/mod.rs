//! One request from placement to its end, with every recovery on the way, as an explicit state machine.
//!
//! The driver (the router) owns at most one decode stream and one prefill stream. It turns events on them into [`Input`]s
//! and carries out the [`Action`]s. The machine knows no stream, no clock and no text. It guarantees that every index
//! reaches the client once and in order (I4), and that every request ends (I5).
//!
//! Both workers may be asked at once ([`Reserve::Meanwhile`]): in Reserving the prompt is then at the prefill worker already. Or the prefill
//! worker is asked first, when the prompt has to wait there ([`Reserve::Late`]): Placing ─▶ Queued, then, once its turn is near (`Due`),
//! Reserving.
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
pub(crate) mod tests;

use std::time::Duration;

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use crate::placement::{Placed, Reserve};

pub use machine::RequestMachine;

/// Bounds of one request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestLimits {
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Most attempts at this request, at least 1. A failure costs one, unless its worker took nothing on.
    pub max_attempts: u32,
    /// How long a request that was placed before waits for a worker where none can take it. A new one waits [`NEW_WAITS`] at most.
    pub worker_wait: Duration,
}

/// Longest time that a request which no worker has taken yet waits for one. The last worker may have left, and the router not have heard of
/// the one that takes its place.
pub const NEW_WAITS: Duration = Duration::from_secs(2);

/// Why a leg or a request failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Kind of error. It decides whether another worker may help.
    pub kind: ErrorKind,
    /// Explanation for people.
    pub message: String,
    /// What the failure says about the worker.
    pub worker: Condition,
    /// It would miss its SLO.
    pub late: bool,
    /// With `late`: when the same request would be taken; `None`: never, it takes too long by itself.
    pub retry_after: Option<Duration>,
}

/// What a failure says about its worker. It decides whether this request asks that worker again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// The worker may recover after a while.
    Usable,
    /// The worker does not respond: it hangs or is gone. Each further try would take as long as noticing this took (I5).
    Silent,
    /// The worker drains, has left, or nobody listens at its address; so it did not take the request. No work was started, so the failure
    /// costs no attempt.
    Leaving,
}

impl Failure {
    /// A failure of this kind, of a worker that may recover.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), worker: Condition::Usable, late: false, retry_after: None }
    }

    /// The failure of a worker that does not respond ([`Condition::Silent`]).
    pub fn silent(message: impl Into<String>) -> Failure {
        Failure { worker: Condition::Silent, ..Failure::new(ErrorKind::Unavailable, message) }
    }

    /// The failure of a worker that takes no new requests ([`Condition::Leaving`]).
    pub fn leaving(message: impl Into<String>) -> Failure {
        Failure { worker: Condition::Leaving, ..Failure::new(ErrorKind::Unavailable, message) }
    }
}

/// Where a request stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Waiting for workers to be chosen.
    Placing,
    /// No worker could take the request; waiting before asking again.
    BackingOff,
    /// The prompt waits at the prefill worker, and no blocks are reserved for it.
    Queued {
        /// The worker that will be asked for a reservation.
        decode: WorkerId,
        /// The worker where the prompt waits.
        prefill: WorkerId,
    },
    /// The decode stream is open; waiting for its reservation, or for the message that it needs none.
    Reserving {
        /// The worker that will decode.
        decode: WorkerId,
        /// The worker that will prefill.
        prefill: WorkerId,
    },
    /// Prefill or handoff failed and the reservation was given back; waiting for another placement of the prefill.
    PlacingPrefill {
        /// The worker that will be asked for a new reservation.
        decode: WorkerId,
    },
    /// The prompt is being computed; its KV is being transferred layer by layer.
    Prefilling {
        /// The worker that holds the reservation.
        decode: WorkerId,
        /// The worker that computes the prompt.
        prefill: WorkerId,
    },
    /// The first token is emitted; the tail of the KV is still being transferred.
    Transferring {
        /// The worker that holds the reservation.
        decode: WorkerId,
        /// The worker that sends the KV.
        prefill: WorkerId,
    },
    /// The decode worker needs nothing more from a prefill worker.
    Decoding {
        /// The worker that decodes.
        decode: WorkerId,
        /// The worker that sent the KV. None: the decode worker computes the prompt itself.
        prefill: Option<WorkerId>,
    },
    /// The answer is complete, or the client has left.
    Finished,
    /// Answered with an error.
    Failed,
}

/// An event that the machine reacts to.
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// Answer to [`Action::Place`]: where, and when decode blocks are to be reserved.
    Placed(Placed, Reserve),
    /// Answer to [`Action::Place`]: no worker can take the request.
    NotPlaced(Failure),
    /// The prompt's turn is near at the prefill worker.
    Due,
    /// The decode worker reserved blocks.
    Reserved,
    /// The prefill worker sampled its token.
    FirstToken {
        /// The token. Its index is the number of answer tokens that the stream was opened with.
        token: TokenOut,
        /// Set when this token ends the answer.
        finish: Option<FinishReason>,
        /// Prompt tokens the prefill worker did not have to compute.
        cached_tokens: u32,
    },
    /// The prefill worker is done, and all its KV is applied at the decode worker.
    Transferred,
    /// A token from the decode worker.
    Token(TokenOut),
    /// The decode worker computes the prompt itself. Either it was asked to, or its cache has nearly all of the prompt and it
    /// needs no handoff.
    Started {
        /// Prompt tokens it did not have to compute.
        cached_tokens: u32,
    },
    /// The decode worker ended the answer.
    Finished(FinishReason),
    /// The decode stream ended before the answer did.
    DecodeLost(Failure),
    /// The prefill stream ended before the prefill worker was done.
    PrefillLost(Failure),
    /// The decode worker is healthy, but reports that the KV it reserved blocks for will not come. The decode stream has ended.
    HandoffFailed(Failure),
    /// KV arrived that fails verification (I2). The stream that reported it has ended.
    VerifyFailed(Failure),
    /// A stream is open, and for too long nothing has come.
    Stalled(Failure),
    /// The time asked for by [`Action::Backoff`] has passed.
    BackoffOver,
    /// A stop string was found in the text of the tokens emitted so far.
    StopMatched,
    /// The request's deadline has passed.
    Deadline,
    /// The driver gives up the request, for example because its process stops.
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

/// What the driver must do. It carries out actions in the order given.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Choose workers, leaving out [`RequestMachine::avoid`]; answer with `Placed` or `NotPlaced`.
    Place {
        /// Keep this decode worker, which may hold some of the prefix; only a prefill worker is wanted.
        decode: Option<WorkerId>,
        /// False: the decode worker is to prefill locally.
        split: bool,
    },
    /// Open a decode stream for the prompt and the tokens emitted so far.
    OpenDecode {
        /// The decode worker.
        worker: WorkerId,
        /// True: the decode worker computes the prompt itself.
        local: bool,
    },
    /// Run prefill for the sequence of the open decode stream, into its reservation.
    RunPrefill {
        /// The prefill worker.
        worker: WorkerId,
    },
    /// Have the prompt, and the tokens emitted so far, wait at this prefill worker for [`Action::SendTarget`].
    QueuePrefill {
        /// The prefill worker.
        worker: WorkerId,
    },
    /// Tell the prefill worker of the decode worker's reservation.
    SendTarget,
    /// Send this token to the client.
    Emit(TokenOut),
    /// Drop the decode stream; the worker frees everything.
    CancelDecode,
    /// Drop the prefill stream; the worker frees everything.
    CancelPrefill,
    /// Wait this long, then send [`Input::BackoffOver`].
    Backoff(Duration),
    /// This part of the route failed, and another one might not have. Not said of a full worker, nor of what is wrong with the request.
    Blame(Leg),
    /// For logs and metrics: a failure is being recovered from.
    Recovering {
        /// The leg that failed.
        leg: Leg,
        /// The failure.
        cause: Failure,
    },
    /// The answer is complete. The last action.
    Finish {
        /// Why it ended.
        reason: FinishReason,
        /// Prompt tokens whose KV was reused, on the attempt that gave the first token.
        cached_tokens: u32,
    },
    /// Answer with an error. The last action.
    Fail(Failure),
}
