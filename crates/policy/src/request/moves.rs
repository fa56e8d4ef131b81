//! What several transitions have in common: emitting in order, opening and closing legs, and spending attempts.

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use super::machine::RequestMachine;
use super::{Action, Condition, Failure, Leg, State};

/// Verification may fail this often before the prompt is computed where it is needed.
const MAX_VERIFY_FAILURES: u32 = 2;

impl RequestMachine {
    /// True for a decode token that follows the one the prefill stream still owes.
    pub(super) fn is_early(&self, token: &TokenOut) -> bool {
        self.emitted.len() == self.base && token.index as usize == self.base + 1 + self.early.len()
    }

    /// Gives the token to the client if it is the next one, drops it if it is a duplicate. False when it was neither
    /// and a recovery began (or the request ended).
    pub(super) fn accept(&mut self, token: TokenOut, out: &mut Vec<Action>) -> bool {
        let (index, next) = (token.index as usize, self.emitted.len());
        if index < next {
            if self.emitted[index] != token.id {
                // The worker continues another answer than the client has (I1 broken): resume from the client's.
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

    /// The answer's end, if the tokens emitted say so by themselves.
    pub(super) fn natural_end(&self) -> Option<FinishReason> {
        let last = self.emitted.last()?;
        if self.limits.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        (self.emitted.len() >= self.limits.max_tokens as usize).then_some(FinishReason::Length)
    }

    /// Of the attempt that gave the first token; those after it compute the prompt once more, with the answer so far.
    pub(super) fn note_cached(&mut self, tokens: u32) {
        if self.base == 0 {
            self.cached_tokens = tokens;
        }
    }

    pub(super) fn place(&mut self, out: &mut Vec<Action>) {
        self.state = State::Placing;
        out.push(Action::Place { decode: None, split: !self.recompute() });
    }

    /// True when KV from elsewhere is not to be tried again.
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

    /// Asks for a reservation that `prefill` is to write into.
    pub(super) fn reserve(&mut self, decode: WorkerId, prefill: WorkerId, out: &mut Vec<Action>) {
        self.open_decode(decode, false, out);
        self.state = State::Reserving { decode, prefill };
    }

    pub(super) fn protocol_error(&mut self, what: &str, out: &mut Vec<Action>) {
        self.restart(Failure::new(ErrorKind::Internal, format!("the decode worker sent {what}")), out);
    }

    /// The decode stream is lost, or cannot be trusted any further: starts over at the next index, on another worker if
    /// there is one.
    pub(super) fn restart(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if let Some(reason) = self.natural_end() {
            // Everything the client can get, it has.
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
        // Nobody is avoided: either side may be at fault, and the same pair is tried again first.
        self.spend_attempt(Leg::Transfer, failure, None, out)
    }

    /// Counts a failure. False when it was one too many, or of a kind no other worker can help with. A worker that took nothing on
    /// costs no attempt; since it is not asked again, there are at most as many such failures as workers (I5).
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
        let final_kind = matches!(failure.kind, InvalidArgument | NotFound | TooLarge | DeadlineExceeded);
        if final_kind || self.attempt >= self.limits.max_attempts {
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

    /// Drops whatever is open.
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
