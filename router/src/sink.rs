//! Turns tokens into what the client gets: detokenises, matches stop strings, measures.
//!
//! Each choice has one sink, between the request driver and the front doors. UTF-8 characters are never split: text may lag
//! behind its tokens, and text held back is delivered at the end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_model_text::TextStream;
use baton_policy::Taken;
use baton_runtime::config::format_duration;
use baton_types::{ErrorKind, FinishReason, TokenOut, Usage};
use compact_str::CompactString;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::RequestError;
use crate::front::Slot;
use crate::gate::Turn;
use crate::record::{Record, TokenClock};
use crate::rounds::Rounds;
use crate::stop::{Released, StopMatcher};
use crate::tenant::Tenant;

/// How long a failure waits for room in the event channel.
const FAIL_GRACE: Duration = Duration::from_secs(1);
/// Tokens of an answer that are charged to its tenant together.
const CHARGE_EVERY: u32 = 16;

/// Something that happened to one choice.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Event {
    /// Index of the choice.
    pub choice: u32,
    /// What happened.
    pub kind: EventKind,
}

impl Event {
    /// The same for a client that wants nothing of the answer.
    pub fn without_answer(self) -> Event {
        let kind = match self.kind {
            EventKind::Token { .. } => EventKind::Scored(Vec::new()),
            EventKind::Finished { usage, .. } => EventKind::Finished {
                reason: FinishReason::Length,
                text: CompactString::default(),
                usage: Usage { completion_tokens: 0, ..usage },
            },
            kind => kind,
        };
        Event { kind, ..self }
    }
}

/// The events of a choice, in order. Exactly one is `Finished` or `Failed`, and it is the last.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum EventKind {
    /// Tokens of the prompt with their log probabilities. All come before the first token of the answer.
    Scored(Vec<TokenOut>),
    /// One token, and the text that is certain now.
    Token {
        /// The token and its place in the text.
        piece: Piece,
        /// New text. It may be empty, and may belong to earlier tokens.
        text: CompactString,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was held back until now.
        text: CompactString,
        /// Tokens that this choice used.
        usage: Usage,
    },
    /// The choice failed.
    Failed(RequestError),
}

/// An event on its way to the client, and the tokens that follow it and were ready with it.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub event: Event,
    pub more: Vec<(Piece, CompactString)>,
}

/// Tokens that travel in one parcel: it bounds what waits for a client.
const TOGETHER: usize = 8;

/// A token and its place in the answer's text.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Piece {
    /// The token.
    pub token: TokenOut,
    /// Characters of the answer before this token.
    pub offset: u32,
}

/// The parts that a sink is made of.
pub(crate) struct Way {
    /// Index of the choice.
    pub choice: u32,
    /// Tokens that end the answer without being part of its text.
    pub stop_ids: Vec<u32>,
    /// The detokeniser.
    pub text: TextStream,
    /// The stop strings.
    pub stop: StopMatcher,
    /// Tokens before which no stop string ends the answer.
    pub min_tokens: u32,
    /// Number of prompt tokens, for the usage.
    pub prompt_tokens: u32,
    /// Where events go.
    pub out: mpsc::Sender<Parcel>,
    /// Longest time that an event waits for the client to read those before it.
    pub send_timeout: Duration,
    /// The request's place among those in progress.
    pub slot: Slot,
    /// Whose allowance the answer's tokens are charged to.
    pub tenant: Option<Arc<Tenant>>,
    /// Why the request failed, for a client that is too far behind to get an event.
    pub failure: Arc<OnceLock<RequestError>>,
    /// The request's record.
    pub record: Arc<Record>,
    /// In which its tokens after the first are sent.
    pub rounds: Arc<Rounds>,
}

/// The output of one choice.
pub(crate) struct Sink {
    way: Way,
    clock: TokenClock,
    /// The round of its last turn.
    round: u64,
    /// Its room at the workers, if it waited for its turn.
    turn: Option<Turn>,
    /// Tokens that are sent next.
    held: Option<Parcel>,
    tokens: u32,
    /// Tokens that are charged to the tenant, and told to the gate.
    charged: u32,
    chars: u32,
    stopped: bool,
    ended: bool,
    /// The client has read nothing for too long.
    stalled: bool,
}

impl Sink {
    /// A sink that has had no token yet.
    pub fn new(way: Way) -> Sink {
        let clock = TokenClock::new(way.record.class_name());
        let (tokens, charged, chars, round) = (0, 0, 0, 0);
        let (turn, held) = (None, None);
        Sink { way, clock, round, turn, held, tokens, charged, chars, stopped: false, ended: false, stalled: false }
    }

    /// Index of the choice.
    pub fn choice(&self) -> u32 {
        self.way.choice
    }

    /// The request's record.
    pub fn record(&self) -> &Record {
        &self.way.record
    }

    /// Has room at the workers from now on, until the sink's end.
    pub fn begins(&mut self, turn: Turn) {
        self.turn = Some(turn);
    }

    /// Completes when nobody reads the events any more.
    pub fn client_gone(&self) -> impl Future<Output = ()> + Send + use<> {
        let out = self.way.out.clone();
        async move { out.closed().await }
    }

    /// Whether the next token may be sent now.
    pub fn has_turn(&self) -> bool {
        self.tokens == 0 || self.stopped || self.way.rounds.has_turn(self.round)
    }

    /// Waits for the next token's turn to be sent. It is short, whatever clients do, so that it needs no limit of time.
    pub async fn turn(&mut self) {
        self.way.rounds.turn(&mut self.round).await;
    }

    /// Takes a token that came now. It is sent by the next [`Sink::send`]. Tokens after a matched stop string are dropped.
    pub fn token(&mut self, token: TokenOut, now: Instant) -> Taken {
        if self.stopped {
            return Taken::Sent;
        }
        self.tokens += 1;
        if self.tokens == 1 || self.tokens - self.charged >= CHARGE_EVERY {
            self.charge();
        }
        let piece = Piece { offset: self.chars, token };
        // A token that ends the answer is not part of its text.
        let ends = self.way.stop_ids.contains(&piece.token.id);
        let text = if ends { CompactString::default() } else { self.way.text.push(piece.token.id) };
        self.chars += text.chars().count() as u32;
        let released = match self.tokens <= self.way.min_tokens {
            true => Released { text, stopped: false },
            false => self.way.stop.push(text),
        };
        self.stopped = released.stopped;
        self.way.record.token(now);
        self.clock.tick(now);
        match &mut self.held {
            Some(held) => held.more.push((piece, released.text)),
            None => self.hold(EventKind::Token { piece, text: released.text }),
        }
        if self.stopped { Taken::StopMatched } else { Taken::Sent }
    }

    /// Takes tokens of the prompt with their log probabilities. They come before all others.
    pub fn scored(&mut self, tokens: Vec<TokenOut>) {
        self.hold(EventKind::Scored(tokens));
    }

    /// Whether something is to be sent. `more`: what comes next came together with it, and can be sent with it.
    pub fn is_to_send(&self, more: bool) -> bool {
        self.held.as_ref().is_some_and(|held| !more || held.more.len() + 1 >= TOGETHER)
    }

    fn hold(&mut self, kind: EventKind) {
        self.held = Some(Parcel { event: Event { choice: self.way.choice, kind }, more: Vec::new() });
    }

    /// The workers are done with it, however long its client takes to read.
    fn leave(&mut self) {
        self.charge();
        self.turn = None;
    }

    /// Charges the tokens since the last time.
    fn charge(&mut self) {
        let tokens = self.tokens - std::mem::replace(&mut self.charged, self.tokens);
        self.way.tenant.iter().for_each(|tenant| tenant.charge(tokens));
        self.turn.iter_mut().for_each(|turn| turn.answered(tokens));
    }

    /// Ends the choice without an error. If a stop string matched, the reason is `Stop`, whatever the worker says. Waits until
    /// `deadline` for a client that does not read.
    pub async fn finish(mut self, reason: FinishReason, cached_tokens: u32, deadline: Instant) {
        self.leave();
        let (mut reason, mut text) = (reason, CompactString::default());
        if self.stopped {
            reason = FinishReason::Stop;
        } else {
            let rest = self.way.stop.push(self.way.text.clone().finish());
            text = rest.text + &self.way.stop.finish();
        }
        let usage = Usage {
            prompt_tokens: self.way.prompt_tokens,
            completion_tokens: self.tokens,
            cached_tokens: cached_tokens.min(self.way.prompt_tokens),
        };
        self.ended = true;
        self.way.record.finished(reason, usage);
        if !self.stalled && timeout_at(deadline, self.last(EventKind::Finished { reason, text, usage })).await.is_err()
        {
            let late = "the client did not read its answer before the deadline";
            let _ = self.way.failure.set(RequestError::new(ErrorKind::DeadlineExceeded, late));
        }
    }

    /// Ends the choice with an error.
    pub async fn fail(mut self, error: RequestError) {
        self.leave();
        self.ended = true;
        self.way.record.failed(&error);
        // A client that is too far behind for the event gets this failure when the channel ends.
        let _ = self.way.failure.set(error.clone());
        let _ = timeout(FAIL_GRACE, self.last(EventKind::Failed(error))).await;
    }

    /// Sends what is held, and then the last event.
    async fn last(&mut self, kind: EventKind) {
        for last in [None, Some(kind)] {
            last.into_iter().for_each(|kind| self.hold(kind));
            if self.send().is_none() {
                self.wait().await;
            }
            if self.stalled {
                return;
            }
        }
    }

    /// Sends what is held. None: there is no room for it yet.
    pub fn send(&mut self) -> Option<Taken> {
        let Some(parcel) = self.held.take() else { return Some(Taken::Sent) };
        match self.way.out.try_send(parcel) {
            Ok(()) => Some(Taken::Sent),
            Err(TrySendError::Closed(_)) => Some(Taken::ClientGone),
            Err(TrySendError::Full(parcel)) => {
                self.held = Some(parcel);
                None
            }
        }
    }

    /// Sends what is held once there is room. A client that reads nothing for too long counts as gone: it may still read what was sent, but its request is
    /// over.
    pub async fn wait(&mut self) -> Taken {
        let Some(parcel) = self.held.take() else { return Taken::Sent };
        match timeout(self.way.send_timeout, self.way.out.send(parcel)).await {
            Ok(sent) => sent.map_or(Taken::ClientGone, |()| Taken::Sent),
            Err(_) => {
                let limit = format_duration(self.way.send_timeout);
                let stalled = format!("the client read nothing of its answer for {limit} (--send-timeout)");
                let error = RequestError::new(ErrorKind::Cancelled, stalled);
                tracing::info!(request = %self.way.record.request_id(), %error, "request given up");
                self.way.record.failed(&error);
                let _ = self.way.failure.set(error);
                self.way.slot.give_back();
                self.stalled = true;
                Taken::ClientGone
            }
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.charge();
        if !self.ended {
            // Only a defect, or the end of the process, drops a driver before its end. The client still gets an error.
            let _ = self.way.failure.set(broken_off());
            let _ = self.send();
            self.hold(EventKind::Failed(broken_off()));
            let _ = self.send();
        }
    }
}

/// The error for a request that ended without a known cause.
pub(crate) fn broken_off() -> RequestError {
    RequestError::new(ErrorKind::Internal, "the request was broken off inside the router")
}
