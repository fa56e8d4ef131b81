//! The transitions, one function for each input. Code that several of them share is in `moves.rs`.

use std::collections::VecDeque;
use std::time::Duration;

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use super::{Action, Failure, Input, Leg, NEW_WAITS, RequestLimits, State};
use crate::placement::{Placed, Reserve};

/// Most decode tokens kept while the prefill stream has not sent the first token. The two streams are two connections, so
/// decode tokens can overtake the first token. More of them than this means that the prefill stream hangs.
const MAX_EARLY: usize = 1024;
/// Waits for a worker to appear double from the first to the longest, until they are as long together as is allowed.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// One request. Feed it every input through [`RequestMachine::step`] and do what comes out.
#[derive(Clone, Debug)]
pub struct RequestMachine {
    pub(super) limits: RequestLimits,
    pub(super) state: State,
    /// Ids of the tokens given to the client. The next index is its length (I4).
    pub(super) emitted: Vec<u32>,
    /// How many of the emitted tokens the newest decode stream was opened with.
    pub(super) base: usize,
    /// Failures that cost an attempt.
    pub(super) attempt: u32,
    /// The next wait for a worker, and the waits since the last token together.
    pub(super) next_wait: Duration,
    pub(super) waited: Duration,
    pub(super) verify_failures: u32,
    pub(super) avoid: Vec<WorkerId>,
    /// Workers in `avoid` that are never asked again: they hang, drain or are gone.
    pub(super) gone: Vec<WorkerId>,
    pub(super) last_failure: Option<Failure>,
    pub(super) decode_open: bool,
    pub(super) prefill_open: bool,
    /// Decode tokens that came before the prefill stream's first token.
    pub(super) early: VecDeque<TokenOut>,
    /// The end of the answer, if it came before the first token too.
    pub(super) early_finish: Option<FinishReason>,
    pub(super) cached_tokens: u32,
}

impl RequestMachine {
    /// A new request, and the first action for it.
    pub fn start(limits: RequestLimits) -> (RequestMachine, Action) {
        let machine = RequestMachine {
            limits,
            state: State::Placing,
            emitted: Vec::new(),
            base: 0,
            attempt: 0,
            next_wait: FIRST_WAIT,
            waited: Duration::ZERO,
            verify_failures: 0,
            avoid: Vec::new(),
            gone: Vec::new(),
            last_failure: None,
            decode_open: false,
            prefill_open: false,
            early: VecDeque::new(),
            early_finish: None,
            cached_tokens: 0,
        };
        (machine, Action::Place { decode: None, split: true })
    }

    /// Where the request stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Ids of the tokens emitted so far.
    pub fn emitted(&self) -> &[u32] {
        &self.emitted
    }

    /// Workers that failed this request and are not to be asked again for now.
    pub fn avoid(&self) -> &[WorkerId] {
        &self.avoid
    }

    /// True when nothing more can happen.
    pub fn ended(&self) -> bool {
        matches!(self.state, State::Finished | State::Failed)
    }

    /// Takes one input and appends the actions it leads to. Inputs that come too late, or from a stream that was dropped,
    /// have no effect.
    pub fn step(&mut self, input: Input, out: &mut Vec<Action>) {
        if self.ended() {
            return;
        }
        match input {
            Input::Placed(placed, reserve) => self.on_placed(placed, reserve, out),
            Input::NotPlaced(failure) => self.on_not_placed(failure, out),
            Input::Due => self.on_due(out),
            Input::Reserved => self.on_reserved(out),
            Input::FirstToken { token, finish, cached_tokens } => {
                self.on_first_token(token, finish, cached_tokens, out)
            }
            Input::Transferred => self.on_transferred(out),
            Input::Token(token) => self.on_token(token, out),
            Input::Started { cached_tokens } => self.on_started(cached_tokens, out),
            Input::Finished(reason) => self.on_finished(reason, out),
            Input::DecodeLost(failure) => self.on_decode_lost(failure, out),
            Input::PrefillLost(failure) => self.on_prefill_lost(failure, out),
            Input::HandoffFailed(failure) => self.on_handoff_failed(failure, out),
            Input::VerifyFailed(failure) => self.on_verify_failed(failure, out),
            Input::Stalled(failure) => self.on_stalled(failure, out),
            Input::BackoffOver => self.on_backoff_over(out),
            Input::StopMatched => self.finish(FinishReason::Stop, out),
            Input::Deadline => {
                self.fail(Failure::new(ErrorKind::DeadlineExceeded, "the request's deadline passed"), out)
            }
            Input::Abort(failure) => self.fail(failure, out),
            Input::ClientGone => self.finish(FinishReason::Cancelled, out),
        }
    }

    fn on_placed(&mut self, placed: Placed, reserve: Reserve, out: &mut Vec<Action>) {
        let decode = match self.state {
            State::Placing => placed.decode,
            State::PlacingPrefill { decode } => decode,
            _ => return,
        };
        match (placed.prefill, reserve) {
            (None, _) => self.open_local(decode, out),
            (Some(prefill), Reserve::First) => self.reserve(decode, prefill, out),
            (Some(prefill), Reserve::Late) => self.queue(decode, prefill, out),
            (Some(prefill), Reserve::Meanwhile) => {
                self.queue(decode, prefill, out);
                self.on_due(out);
            }
        }
    }

    fn on_due(&mut self, out: &mut Vec<Action>) {
        if let State::Queued { decode, prefill } = self.state {
            self.decode_open = true;
            self.state = State::Reserving { decode, prefill };
            out.push(Action::OpenDecode { worker: decode, local: false });
        }
    }

    fn on_not_placed(&mut self, failure: Failure, out: &mut Vec<Action>) {
        match self.state {
            State::PlacingPrefill { decode } => self.open_local(decode, out),
            State::Placing => self.wait_for_a_worker(failure, out),
            _ => {}
        }
    }

    /// Handles that no worker can take the request:
    ///
    /// - One that would be too late fails at once, and so does one whose last worker was full, if nothing is emitted yet.
    /// - Every other one waits for a worker to come (back), a new one a short time only.
    ///
    /// After the wait, workers that failed are asked again: they may have recovered, and asking costs nothing. Workers that
    /// hang, drain or are gone are not ([`Condition`](super::Condition)).
    fn wait_for_a_worker(&mut self, failure: Failure, out: &mut Vec<Action>) {
        let most = match &self.last_failure {
            Some(last) if last.kind == ErrorKind::ResourceExhausted && self.emitted.is_empty() => Duration::ZERO,
            Some(_) => self.limits.worker_wait,
            None if failure.kind == ErrorKind::Unavailable => self.limits.worker_wait.min(NEW_WAITS),
            None => Duration::ZERO,
        };
        let wait = self.next_wait.min(most.saturating_sub(self.waited));
        if wait.is_zero() {
            return self.fail(self.last_failure.clone().unwrap_or(failure), out);
        }
        out.push(Action::Backoff(wait));
        self.waited += wait;
        self.next_wait = LONGEST_WAIT.min(2 * self.next_wait);
        self.avoid.retain(|worker| self.gone.contains(worker));
        self.state = State::BackingOff;
    }

    fn on_backoff_over(&mut self, out: &mut Vec<Action>) {
        if self.state == State::BackingOff {
            self.place(out);
        }
    }

    fn on_reserved(&mut self, out: &mut Vec<Action>) {
        match self.state {
            State::Reserving { decode, prefill } => {
                let waits = std::mem::replace(&mut self.prefill_open, true);
                self.state = State::Prefilling { decode, prefill };
                out.push(if waits { Action::SendTarget } else { Action::RunPrefill { worker: prefill } });
            }
            _ if self.decode_open => self.protocol_error("a reservation it was not asked for", out),
            _ => {}
        }
    }

    fn on_started(&mut self, cached_tokens: u32, out: &mut Vec<Action>) {
        if let State::Reserving { decode, .. } = self.state {
            // The decode worker's cache has nearly all of the prompt, so no handoff follows.
            if std::mem::take(&mut self.prefill_open) {
                out.push(Action::CancelPrefill);
            }
            self.state = State::Decoding { decode, prefill: None };
        }
        self.note_cached(cached_tokens);
    }

    fn on_first_token(
        &mut self,
        token: TokenOut,
        finish: Option<FinishReason>,
        cached_tokens: u32,
        out: &mut Vec<Action>,
    ) {
        let State::Prefilling { decode, prefill } = self.state else {
            if let State::Queued { .. } | State::Reserving { .. } = self.state {
                let wrong = "the prefill worker computed before it knew where to";
                self.prefill_failed(Failure::new(ErrorKind::Internal, wrong), out);
            }
            return;
        };
        if token.index as usize != self.base {
            let wrong = format!("the prefill worker numbered its token {}, not {}", token.index, self.base);
            return self.prefill_failed(Failure::new(ErrorKind::Internal, wrong), out);
        }
        self.note_cached(cached_tokens);
        self.state = State::Transferring { decode, prefill };
        if !self.accept(token, out) {
            return;
        }
        if let Some(reason) = finish.or_else(|| self.natural_end()) {
            return self.finish(reason, out);
        }
        self.flush_early(out);
    }

    fn on_transferred(&mut self, out: &mut Vec<Action>) {
        self.prefill_open = false;
        match self.state {
            State::Transferring { decode, prefill } => self.state = State::Decoding { decode, prefill: Some(prefill) },
            State::Prefilling { .. } | State::Queued { .. } => {
                let wrong = "the prefill worker ended without its token";
                self.prefill_failed(Failure::new(ErrorKind::Internal, wrong), out);
            }
            _ => {}
        }
    }

    /// Another wait for a worker may be as long as the first one.
    pub(super) fn wait_anew(&mut self) {
        (self.next_wait, self.waited) = (FIRST_WAIT, Duration::ZERO);
    }

    pub(super) fn on_token(&mut self, token: TokenOut, out: &mut Vec<Action>) {
        match self.state {
            State::Reserving { .. } => self.protocol_error("a token before its reservation", out),
            State::Prefilling { .. } if self.is_early(&token) => {
                if self.early.len() == MAX_EARLY {
                    return self.protocol_error("more tokens than can be kept while the first one is missing", out);
                }
                self.early.push_back(token);
            }
            State::Prefilling { decode, prefill } | State::Transferring { decode, prefill } => {
                // A decode worker that sends a token has received all the KV.
                self.state = State::Decoding { decode, prefill: Some(prefill) };
                self.accept(token, out);
                self.flush_early(out);
            }
            State::Decoding { .. } => {
                self.accept(token, out);
            }
            _ => {}
        }
    }

    pub(super) fn on_finished(&mut self, reason: FinishReason, out: &mut Vec<Action>) {
        match self.state {
            _ if !self.decode_open => {}
            _ if reason == FinishReason::Cancelled => {
                let why = "the decode worker gave the request up";
                self.on_decode_lost(Failure::new(ErrorKind::Unavailable, why), out);
            }
            State::Reserving { .. } => self.protocol_error("an end before its reservation", out),
            State::Prefilling { .. } if self.emitted.len() == self.base => self.early_finish = Some(reason),
            _ => {
                self.decode_open = false;
                self.finish(reason, out);
            }
        }
    }

    fn on_decode_lost(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if !self.decode_open || self.early_finish.is_some() {
            // The stream was dropped or has sent its last message, so its end is no failure.
            return;
        }
        self.decode_open = false;
        self.restart(failure, out);
    }

    fn on_handoff_failed(&mut self, failure: Failure, out: &mut Vec<Action>) {
        match self.state {
            State::Prefilling { .. } | State::Transferring { .. } if self.early_finish.is_none() => {
                self.decode_open = false;
                self.prefill_failed(failure, out);
            }
            _ => self.on_decode_lost(failure, out),
        }
    }

    fn on_prefill_lost(&mut self, failure: Failure, out: &mut Vec<Action>) {
        self.prefill_open = false;
        self.prefill_failed(failure, out);
    }

    /// Gives up the worker that the request waits for.
    fn on_stalled(&mut self, failure: Failure, out: &mut Vec<Action>) {
        match self.state {
            State::Queued { .. } | State::Prefilling { .. } | State::Transferring { .. } => {
                self.prefill_failed(failure, out)
            }
            State::Reserving { .. } | State::Decoding { .. } => self.restart(failure, out),
            _ => {}
        }
    }

    /// Recovers from a failed prefill or handoff. The KV may be incomplete, and its sender may still be writing. So the
    /// reservation is given back, which fences its epoch (I3). A prefill worker then writes into a new reservation: another
    /// worker, or the same one over another path.
    fn prefill_failed(&mut self, failure: Failure, out: &mut Vec<Action>) {
        let (decode, prefill) = match self.state {
            State::Queued { decode, prefill }
            | State::Reserving { decode, prefill }
            | State::Prefilling { decode, prefill }
            | State::Transferring { decode, prefill } => (decode, prefill),
            _ => return,
        };
        // If only the path between the two workers broke, they may have another path, so neither is avoided.
        let (leg, culprit) = match failure.kind {
            ErrorKind::PathLost => (Leg::Transfer, None),
            _ => (Leg::Prefill, Some(prefill)),
        };
        if !self.spend_attempt(leg, failure, culprit, out) {
            return;
        }
        self.close(out);
        if let State::Queued { .. } = self.state {
            // No decode worker has anything of it yet.
            return self.place(out);
        }
        if self.recompute() {
            return self.open_local(decode, out);
        }
        self.state = State::PlacingPrefill { decode };
        out.push(Action::Place { decode: Some(decode), split: true });
    }

    fn on_verify_failed(&mut self, failure: Failure, out: &mut Vec<Action>) {
        match self.state {
            State::Reserving { decode, prefill }
            | State::Prefilling { decode, prefill }
            | State::Transferring { decode, prefill }
            | State::Decoding { decode, prefill: Some(prefill) } => {
                if !self.spend_verification(failure, out) {
                    return;
                }
                if self.recompute() {
                    return self.open_local(decode, out);
                }
                self.reserve(decode, prefill, out);
            }
            State::Queued { .. } => self.prefill_failed(failure, out),
            _ => self.on_decode_lost(failure, out),
        }
    }
}
