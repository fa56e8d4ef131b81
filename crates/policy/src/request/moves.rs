//! Code that several transitions share: emitting in order, opening and closing legs, and spending attempts.

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use super::machine::RequestMachine;
use super::{Action, Condition, Failure, Leg, State};

/// After this many verification failures, the decode worker computes the prompt itself.
const MAX_VERIFY_FAILURES: u32 = 2;

impl RequestMachine {
    /// True for a decode token that comes in order, but before the first token, which the prefill stream still has to send.
    pub(super) fn is_early(&self, token: &TokenOut) -> bool {
        self.emitted.len() == self.base && token.index as usize == self.base + 1 + self.early.len()
    }

    /// Emits the token if it is the next one, and drops it if it is a duplicate. False when it is neither, or exceeds the
    /// limit of tokens: then a recovery has begun or the request has ended.
    pub(super) fn accept(&mut self, token: TokenOut, out: &mut Vec<Action>) -> bool {
        let (index, next) = (token.index as usize, self.emitted.len());
        if index < next {
            if self.emitted[index] != token.id {
                // The worker continues an answer that differs from the client's (I1 broken). Resume from the client's answer.
                let differs = format!("token {index} is {}, but the client has {}", token.id, self.emitted[index]);
                self.restart(Failure::new(ErrorKind::DataLoss, differs), out);
                return false;
            }
            return true;
        }
        if index > next {
            self.restart(Failure::new(ErrorKind::Internal, format!("token {index} came, but {next} is next")), out);
            return false;
        }
        if next >= self.limits.max_tokens as usize {
            self.finish(FinishReason::Length, out);
            return false;
        }
        self.emitted.push(token.id);
        self.wait_anew();
        out.push(Action::Emit(token));
        true
    }

    pub(super) fn flush_early(&mut self, out: &mut Vec<Action>) {
        while let Some(token) = self.early.pop_front() {
            self.on_token(token, out);
        }
        if let Some(reason) = self.early_finish.take() {
            self.on_finished(reason, out);
        }
    }

    /// Why the answer ends, if the emitted tokens alone end it: a stop token, or the limit of tokens.
    pub(super) fn natural_end(&self) -> Option<FinishReason> {
        let last = self.emitted.last()?;
        if self.limits.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        (self.emitted.len() >= self.limits.max_tokens as usize).then_some(FinishReason::Length)
    }

    /// Records the cached tokens of the attempt that gives the first token. Later attempts are not counted: they compute the
    /// prompt again, together with the answer so far.
    pub(super) fn note_cached(&mut self, tokens: u32) {
        if self.base == 0 {
            self.cached_tokens = tokens;
        }
    }

    pub(super) fn place(&mut self, out: &mut Vec<Action>) {
        self.state = State::Placing;
        out.push(Action::Place { decode: None, split: !self.recompute() });
    }

    /// True when the decode worker is to compute the prompt itself, and no handoff is to be tried again.
    pub(super) fn recompute(&self) -> bool {
        self.verify_failures >= MAX_VERIFY_FAILURES || (self.attempt > 0 && self.last_attempt())
    }

    pub(super) fn last_attempt(&self) -> bool {
        self.attempt + 1 >= self.limits.max_attempts
    }

    pub(super) fn open_decode(&mut self, worker: WorkerId, local: bool, out: &mut Vec<Action>) {
        self.close(out);
        self.base = self.emitted.len();
        self.decode_open = true;
        out.push(Action::OpenDecode { worker, local });
    }

    pub(super) fn open_local(&mut self, decode: WorkerId, out: &mut Vec<Action>) {
        self.open_decode(decode, true, out);
        self.state = State::Decoding { decode, prefill: None };
    }

    /// Asks `decode` for a reservation that `prefill` is to write into.
    pub(super) fn reserve(&mut self, decode: WorkerId, prefill: WorkerId, out: &mut Vec<Action>) {
        self.open_decode(decode, false, out);
        self.state = State::Reserving { decode, prefill };
    }

    /// Has the prompt wait at `prefill` before `decode` is asked for a reservation.
    pub(super) fn queue(&mut self, decode: WorkerId, prefill: WorkerId, out: &mut Vec<Action>) {
        self.close(out);
        self.base = self.emitted.len();
        self.prefill_open = true;
        self.state = State::Queued { decode, prefill };
        out.push(Action::QueuePrefill { worker: prefill });
    }

    pub(super) fn protocol_error(&mut self, what: &str, out: &mut Vec<Action>) {
        self.restart(Failure::new(ErrorKind::Internal, format!("the decode worker sent {what}")), out);
    }

    /// Starts over at the next index, on another worker if there is one. Called when the decode stream is lost or can no longer
    /// be trusted.
    pub(super) fn restart(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if let Some(reason) = self.natural_end() {
            // The client already has the whole answer.
            return self.finish(reason, out);
        }
        let decode = match self.state {
            State::Reserving { decode, .. }
            | State::Prefilling { decode, .. }
            | State::Transferring { decode, .. }
            | State::Decoding { decode, .. } => Some(decode),
            _ => None,
        };
        if self.spend_attempt(Leg::Decode, failure, decode, out) {
            self.close(out);
            self.place(out);
        }
    }

    pub(super) fn spend_verification(&mut self, failure: Failure, out: &mut Vec<Action>) -> bool {
        self.verify_failures += 1;
        // No worker is avoided: either one may be at fault, and the same pair is tried again first.
        self.spend_attempt(Leg::Transfer, failure, None, out)
    }

    /// Counts a failure. False when the request fails: no attempt is left, or no other worker can help with this kind.
    ///
    /// A worker that did not take the request ([`Condition::Leaving`]) costs no attempt. Such a worker is not asked again, so
    /// there are at most as many of these failures as workers (I5).
    pub(super) fn spend_attempt(
        &mut self,
        leg: Leg,
        failure: Failure,
        culprit: Option<WorkerId>,
        out: &mut Vec<Action>,
    ) -> bool {
        use ErrorKind::*;
        if failure.worker != Condition::Leaving {
            self.attempt += 1;
        }
        let tells = matches!(failure.kind, Unavailable | PathLost | DataLoss | FailedPrecondition | Internal);
        if tells && failure.worker != Condition::Leaving {
            // A handoff that could not begin, or was given up, does not say which of the two workers failed.
            let unclear = leg == Leg::Prefill
                && failure.kind == Unavailable
                && failure.worker == Condition::Usable
                && !matches!(self.state, State::Queued { .. } | State::Reserving { .. });
            out.push(Action::Blame(if unclear { Leg::Transfer } else { leg }));
        }
        // The router has checked the request, so a worker that refuses it may be the one that is wrong. A second one decides.
        let refused = |kind| matches!(kind, InvalidArgument | NotFound | TooLarge);
        let agreed = refused(failure.kind) && self.last_failure.as_ref().is_some_and(|last| refused(last.kind));
        if agreed || failure.kind == DeadlineExceeded || self.attempt >= self.limits.max_attempts {
            self.fail(failure, out);
            return false;
        }
        self.avoid.extend(culprit);
        if failure.worker != Condition::Usable {
            self.gone.extend(culprit);
        }
        self.last_failure = Some(failure.clone());
        out.push(Action::Recovering { leg, cause: failure });
        true
    }

    /// Drops the open streams and the early tokens.
    pub(super) fn close(&mut self, out: &mut Vec<Action>) {
        if std::mem::take(&mut self.decode_open) {
            out.push(Action::CancelDecode);
        }
        if std::mem::take(&mut self.prefill_open) {
            out.push(Action::CancelPrefill);
        }
        self.early.clear();
        self.early_finish = None;
    }

    pub(super) fn finish(&mut self, reason: FinishReason, out: &mut Vec<Action>) {
        self.close(out);
        self.state = State::Finished;
        out.push(Action::Finish { reason, cached_tokens: self.cached_tokens });
    }

    pub(super) fn fail(&mut self, failure: Failure, out: &mut Vec<Action>) {
        self.close(out);
        self.state = State::Failed;
        out.push(Action::Fail(failure));
    }
}
