//! One answer in progress: its request's state machine, its two streams and its timers.
//!
//! The shell owns the streams and the client's sink. It feeds events on them as [`ChoiceInput`]s. It takes the [`Effect`]s one
//! by one and carries them out. A choice knows no connection and no text.
//!
//! The shell follows three rules. It feeds the result of an effect, if there is one, before it takes the next effect. It waits for
//! other events only when no effect is left. When several events have happened, it feeds them in this order:
//!
//! 1. The client is gone, or the process stops.
//! 2. Messages of the prefill stream. The decode stream may be ahead of it by as much as the sockets hold.
//! 3. The clock ([`Choice::next_wake`]).
//! 4. Messages of the decode stream.
//!
//! And it feeds nothing of a stream that was dropped or replaced.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockName, NameChain};
use baton_types::{Class, ErrorKind, FinishReason, TokenOut, WorkerId};

use super::fleet::Ask;
use super::legs::{self, DecodeWord, LegEnd, PrefillWord};
use super::outliers::{Outcome, Subject, Verdict};
use super::pace::{self, DecodePace};
use crate::placement::{Chosen, Placed, Reserve, Slo};
use crate::prefixes::Prefixes;
use crate::request::{Action, Failure, Input, Leg, RequestLimits, RequestMachine, State};

/// How long to wait for the prefill stream after the decode worker reports that its path to the prefill worker broke. When a
/// prefill worker dies, the decode worker sees only a broken connection. The prefill stream tells whether the prefill worker
/// is alive.
pub const SECOND_WORD: Duration = Duration::from_millis(100);

/// A request for one answer.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Token ids.
    pub prompt: Arc<[u32]>,
    /// Names of the prompt's blocks ([`Prefixes::names`]).
    pub names: Arc<[BlockName]>,
    /// Tokens of each of these blocks.
    pub block_size: u32,
    /// What comes before the first of them, which follows from the tenant's salt. Requests share prefixes only with requests of the same one.
    pub root: NameChain,
    /// Log probabilities of the prompt's tokens are wanted.
    pub scored: bool,
    /// Bounds of the answer.
    pub limits: RequestLimits,
    /// When the answer must be complete.
    pub deadline: Instant,
    /// How long workers may send nothing.
    pub patience: Patience,
    /// When its tokens have to come. A request that was placed once is not given up for it.
    pub slo: Slo,
    /// Whether somebody waits for it.
    pub class: Class,
    /// A prefill worker is to compute the prompt, where there is one, however short it is.
    pub handed_over: bool,
    /// About so many tokens of prompts each worker computes before this one's, as its tenant has a share of its own; `None`: all that are there.
    pub before: Option<u64>,
}

/// How long to wait for a worker whose stream is open and that sends nothing. Then the request goes on elsewhere. Its process may be alive
/// and answer pings while its engine stands still.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// For the first token, from its stream's opening or its last message: a prompt may have to wait, and is computed.
    pub first_token: Duration,
    /// For each later token.
    pub token: Duration,
}

/// An event that the choice reacts to.
#[derive(Clone, PartialEq, Debug)]
pub enum ChoiceInput {
    /// Answer to [`Effect::Place`]: where, and when decode blocks are to be reserved.
    Placed(Result<(Placed, Reserve), Failure>),
    /// A message of the decode stream.
    DecodeSaid(DecodeWord),
    /// The decode stream ended without a last message.
    DecodeEnded(LegEnd),
    /// A message of the prefill stream.
    PrefillSaid(PrefillWord),
    /// The prefill stream ended without a last message.
    PrefillEnded(LegEnd),
    /// The result of an [`Effect::Emit`] or [`Effect::EmitScored`].
    Taken(Taken),
    /// The client went away.
    ClientGone,
    /// The router's process stops and waits no longer.
    Stopping,
    /// The time of [`Choice::next_wake`] may have come.
    Wake,
}

impl From<Result<Chosen, Failure>> for ChoiceInput {
    /// The answer to [`Effect::Place`].
    fn from(chosen: Result<Chosen, Failure>) -> ChoiceInput {
        ChoiceInput::Placed(chosen.map(|Chosen { placed, reserve, .. }| (placed, reserve)))
    }
}

/// The result of giving something to the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// The client has it, or will have it.
    Sent,
    /// The token completed a stop string. No token after it is wanted.
    StopMatched,
    /// The client is gone.
    ClientGone,
}

/// The sequence for which a stream is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sequence {
    /// Token ids of the prompt, then of the answer as far as the client has it.
    pub tokens: Arc<[u32]>,
    /// How many of `tokens` are the prompt.
    pub prompt_tokens: u32,
    /// Log probabilities of the prompt's tokens are wanted, and the client does not have all of them.
    pub scored: bool,
    /// Time left until the deadline.
    pub time_left: Duration,
}

/// What the shell must do.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Call [`crate::Fleet::place`]; answer with [`ChoiceInput::Placed`].
    Place(Box<Ask>),
    /// Open a decode stream, in place of any other.
    OpenDecode {
        /// The decode worker.
        worker: WorkerId,
        /// True: the decode worker computes the prompt itself.
        local: bool,
        /// The sequence to continue.
        sequence: Sequence,
    },
    /// Open a prefill stream, in place of any other.
    OpenPrefill {
        /// The prefill worker.
        worker: WorkerId,
        /// Where the KV goes, as given in the decode worker's reservation; `None`: [`Effect::SendTarget`] will say.
        target: Option<Vec<u8>>,
        /// The same tokens as the decode stream's.
        sequence: Sequence,
    },
    /// Send this target down the prefill stream, which was opened without one.
    SendTarget(Vec<u8>),
    /// Drop the decode stream, which cancels it.
    DropDecode,
    /// Drop the prefill stream, which cancels it.
    DropPrefill,
    /// Give this token to the client; answer with [`ChoiceInput::Taken`].
    Emit(TokenOut),
    /// Give these tokens of the prompt with their log probabilities to the client; answer with [`ChoiceInput::Taken`].
    EmitScored(Vec<TokenOut>),
    /// For logs and metrics: a failure is being recovered from.
    Recovering {
        /// The leg that failed.
        leg: Leg,
        /// The failure.
        cause: Failure,
    },
    /// Call [`crate::Fleet::judge`].
    Judge(Verdict),
    /// Call [`crate::Fleet::note`], because a later prompt may begin with this prompt and answer.
    Note {
        /// Where the request ran.
        placed: Placed,
        /// Names of the blocks of prompt and answer.
        names: Vec<BlockName>,
        /// Their tokens.
        tokens: Arc<[u32]>,
        /// Tokens of the answer.
        answer: u32,
    },
    /// The answer is complete. The last effect.
    Finish {
        /// Why it ended.
        reason: FinishReason,
        /// Prompt tokens whose KV was reused, on the attempt that gave the first token.
        cached_tokens: u32,
    },
    /// Answer with an error. The last effect.
    Fail(Failure),
}

/// One answer in progress.
#[derive(Clone, Debug)]
pub struct Choice {
    request: NewRequest,
    machine: RequestMachine,
    placed: Option<Placed>,
    /// Leading tokens of the prompt whose log probabilities the client has, or that have none.
    scored: u32,
    /// Tokens that the newest decode stream was opened with.
    tokens: Arc<[u32]>,
    /// Where its KV may be written, from its reservation.
    target: Vec<u8>,
    /// The decode stream is open and has not sent its last message.
    decode: bool,
    /// The prefill stream is open and has not sent its last message.
    prefill: bool,
    /// The decode stream's last message was a reservation.
    awaiting_kv: bool,
    /// When to look for a worker again.
    backoff: Option<Instant>,
    /// A broken path reported by the decode worker, held back until this time so that the prefill stream can report first
    /// ([`SECOND_WORD`]).
    held: Option<(Instant, Failure)>,
    /// Of the decode stream.
    pace: DecodePace,
    /// When the workers were chosen, and when the prefill stream was opened.
    placed_at: Instant,
    prefill_opened: Instant,
    /// When the prefill worker said that the prompt's turn is near: what it waits for from then on is not its own doing.
    due: Option<Instant>,
    /// When the last token was given to the client.
    emitted_at: Instant,
    /// When a stream was opened, a message came, or the client took a token, whichever was last.
    progress: Instant,
    /// Buffer for the machine's actions, kept to reuse its memory.
    said: Vec<Action>,
    /// Effects that the shell has not taken yet.
    todo: VecDeque<Effect>,
}

impl Choice {
    /// Starts a new answer. It has effects already.
    pub fn start(request: NewRequest, now: Instant) -> Choice {
        let (machine, first) = RequestMachine::start(request.limits.clone());
        let scored = if request.scored { 1 } else { request.prompt.len() as u32 };
        let mut choice = Choice {
            tokens: Arc::clone(&request.prompt),
            request,
            machine,
            placed: None,
            scored,
            target: Vec::new(),
            decode: false,
            prefill: false,
            awaiting_kv: false,
            backoff: None,
            held: None,
            pace: DecodePace::default(),
            placed_at: now,
            prefill_opened: now,
            due: None,
            emitted_at: now,
            progress: now,
            said: Vec::new(),
            todo: VecDeque::new(),
        };
        choice.perform(first, now);
        choice
    }

    /// Where the request stands.
    pub fn state(&self) -> State {
        self.machine.state()
    }

    /// Ids of the tokens emitted so far.
    pub fn emitted(&self) -> &[u32] {
        self.machine.emitted()
    }

    /// True when nothing more can happen.
    pub fn ended(&self) -> bool {
        self.machine.ended()
    }

    /// When the answer must be complete, whatever happens. Also bounds how long the shell waits for a client that does not read.
    pub fn deadline(&self) -> Instant {
        self.request.deadline
    }

    /// When to send [`ChoiceInput::Wake`] at the latest. None once the answer has ended.
    pub fn next_wake(&self) -> Option<Instant> {
        let held = self.held.as_ref().map(|(until, _)| *until);
        let next = [Some(self.request.deadline), self.backoff, held, self.stalled_at()].into_iter().flatten().min();
        next.filter(|_| !self.ended())
    }

    /// When the worker that the request waits for counts as stalled.
    fn stalled_at(&self) -> Option<Instant> {
        let Patience { first_token, token } = self.request.patience;
        let begun = self.pace.has_begun()
            || matches!(self.state(), State::Transferring { .. } | State::Decoding { prefill: Some(_), .. });
        (self.decode || self.prefill).then(|| self.progress + if begun { token } else { first_token })
    }

    /// Takes one input. Inputs that come too late, or from a stream that has sent its last message, have no effect.
    pub fn feed(&mut self, input: ChoiceInput, now: Instant) {
        use ChoiceInput::*;
        if self.ended() {
            return;
        }
        let of_workers = matches!(input, DecodeSaid(_) | DecodeEnded(_) | PrefillSaid(_) | PrefillEnded(_) | Wake);
        if of_workers && now >= self.request.deadline {
            return self.tell(Input::Deadline, now);
        }
        if matches!(input, DecodeSaid(_) | PrefillSaid(_) | Taken(_)) {
            self.progress = now;
        }
        match input {
            Placed(Ok((placed, reserve))) => {
                (self.placed, self.placed_at) = (Some(placed), now);
                self.tell(Input::Placed(placed, reserve), now);
            }
            Placed(Err(failure)) => self.tell(Input::NotPlaced(failure), now),
            DecodeSaid(word) if self.decode => self.decode_said(word, now),
            DecodeEnded(end) if self.decode => self.decode_ended(end, now),
            PrefillSaid(word) if self.prefill => self.prefill_said(word, now),
            PrefillEnded(end) if self.prefill => {
                self.prefill = false;
                self.tell(legs::prefill_ended(end), now);
            }
            Taken(self::Taken::Sent) => self.pace.waited(now.saturating_duration_since(self.emitted_at)),
            DecodeSaid(_) | DecodeEnded(_) | PrefillSaid(_) | PrefillEnded(_) => {}
            Taken(self::Taken::StopMatched) => self.tell(Input::StopMatched, now),
            Taken(self::Taken::ClientGone) | ClientGone => self.tell(Input::ClientGone, now),
            Stopping => {
                let stopping = Failure::new(ErrorKind::Unavailable, "the router is stopping");
                self.tell(Input::Abort(stopping), now);
            }
            Wake => self.wake(now),
        }
    }

    /// The next effect to carry out. The effects of an input come after those that are left, so that `Finish` or `Fail` stays the last.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.todo.pop_front()
    }

    fn decode_said(&mut self, word: DecodeWord, now: Instant) {
        self.decode = !word.is_last();
        self.awaiting_kv = false;
        match &word {
            DecodeWord::Reserved { target } => {
                self.awaiting_kv = true;
                self.target.clone_from(target);
            }
            DecodeWord::Token(_) => self.pace.token(now),
            DecodeWord::Scored(_) | DecodeWord::Started { .. } | DecodeWord::Finished(_) => {}
        }
        match word {
            DecodeWord::Scored(tokens) => self.scored(tokens, now),
            word => legs::decode_said(word).into_iter().for_each(|input| self.tell(input, now)),
        }
    }

    fn prefill_said(&mut self, word: PrefillWord, now: Instant) {
        self.prefill = !word.is_last();
        if let Some(Placed { decode, prefill: Some(prefill) }) = self.placed {
            match &word {
                PrefillWord::FirstToken { cached_tokens, .. } => {
                    let time = now.saturating_duration_since(self.prefill_opened);
                    let time = pace::of_prompt(time, self.tokens.len(), *cached_tokens);
                    self.judge(Subject::Worker(prefill), Outcome::Worked(Some(time)));
                }
                PrefillWord::Transferred => self.judge(Subject::Pair { prefill, decode }, Outcome::Worked(None)),
                PrefillWord::Due => self.due = Some(now),
                PrefillWord::Scored(_) => {}
            }
        }
        match word {
            PrefillWord::Scored(tokens) => self.scored(tokens, now),
            word => legs::prefill_said(word).into_iter().for_each(|input| self.tell(input, now)),
        }
    }

    /// Passes on what the client does not have yet: after a failure the prompt is scored again.
    fn scored(&mut self, mut tokens: Vec<TokenOut>, now: Instant) {
        tokens.retain(|token| token.index >= self.scored);
        let expected = self.scored..;
        if tokens
            .iter()
            .zip(expected)
            .any(|(token, due)| token.index != due || self.request.prompt.get(due as usize) != Some(&token.id))
        {
            let wrong = Failure::new(ErrorKind::Internal, "a worker scored other tokens than those of the prompt");
            return self.tell(Input::Abort(wrong), now);
        }
        self.scored += tokens.len() as u32;
        if !tokens.is_empty() {
            self.emitted_at = now;
            self.todo.push_back(Effect::EmitScored(tokens));
        }
    }

    fn judge(&mut self, on: Subject, outcome: Outcome) {
        let outcome = match outcome {
            // It may have given way to others again and again.
            Outcome::Worked(_) if self.request.class.is_batch() => Outcome::Worked(None),
            outcome => outcome,
        };
        self.todo.push_back(Effect::Judge(Verdict { on, placed: self.placed_at, outcome }));
    }

    fn blame(&mut self, leg: Leg) {
        let Some(Placed { decode, prefill }) = self.placed else { return };
        let on = match (leg, prefill) {
            (Leg::Decode, _) => Subject::Worker(decode),
            (Leg::Prefill, Some(prefill)) => Subject::Worker(prefill),
            (Leg::Transfer, Some(prefill)) => Subject::Pair { prefill, decode },
            (Leg::Prefill | Leg::Transfer, None) => return,
        };
        self.judge(on, Outcome::Failed);
    }

    fn decode_ended(&mut self, end: LegEnd, now: Instant) {
        self.decode = false;
        match legs::decode_ended(end, self.awaiting_kv) {
            Input::HandoffFailed(failure) if failure.kind == ErrorKind::PathLost && self.prefill => {
                self.held = Some((now + SECOND_WORD, failure));
            }
            input => self.tell(input, now),
        }
    }

    /// Handles the timers that are due.
    fn wake(&mut self, now: Instant) {
        if self.backoff.take_if(|at| *at <= now).is_some() {
            self.tell(Input::BackoffOver, now);
        }
        if let Some((_, failure)) = self.held.take_if(|(until, _)| *until <= now) {
            self.tell(Input::HandoffFailed(failure), now);
        }
        if self.stalled_at().is_some_and(|at| at <= now) {
            let waited = now.saturating_duration_since(self.progress);
            self.tell(Input::Stalled(Failure::silent(format!("the worker has sent nothing for {waited:.0?}"))), now);
        }
    }

    fn tell(&mut self, input: Input, now: Instant) {
        let mut said = std::mem::take(&mut self.said);
        self.machine.step(input, &mut said);
        // The answer begins when all of the prompt is scored.
        if (self.scored as usize) < self.request.prompt.len() && said.iter().any(|a| matches!(a, Action::Emit(_))) {
            said.clear();
            let missing =
                "a worker began the answer without log probabilities of the prompt; is it of an older version?";
            self.machine.step(Input::Abort(Failure::new(ErrorKind::Internal, missing)), &mut said);
        }
        for action in said.drain(..) {
            self.perform(action, now);
        }
        self.said = said;
    }

    /// Turns one action of the machine into effects.
    fn perform(&mut self, action: Action, now: Instant) {
        match action {
            Action::Place { decode, split } => {
                let (avoid, names) = (self.machine.avoid().to_vec(), Arc::clone(&self.request.names));
                let emitted = self.machine.emitted().len() as u32;
                let tokens = self.request.prompt.len() as u32 + emitted;
                let most = self.request.limits.max_tokens.saturating_sub(emitted);
                let NewRequest { class, handed_over, before, .. } = self.request;
                let slo = if self.placed.is_none() { self.request.slo } else { Slo::default() };
                self.todo.push_back(Effect::Place(Box::new(Ask {
                    split,
                    handed_over,
                    decode,
                    avoid,
                    names,
                    tokens,
                    most,
                    slo,
                    class,
                    before,
                })));
            }
            Action::OpenDecode { worker, local } => {
                self.tokens = self.sequence_so_far();
                (self.decode, self.awaiting_kv, self.held) = (true, false, None);
                (self.pace, self.progress) = (DecodePace::default(), now);
                self.todo.push_back(Effect::OpenDecode { worker, local, sequence: self.sequence(now) });
            }
            Action::RunPrefill { worker } => {
                (self.prefill, self.prefill_opened, self.progress) = (true, now, now);
                let target = Some(self.target.clone());
                self.todo.push_back(Effect::OpenPrefill { worker, target, sequence: self.sequence(now) });
            }
            Action::QueuePrefill { worker } => {
                self.tokens = self.sequence_so_far();
                (self.prefill, self.prefill_opened, self.progress) = (true, now, now);
                self.due = None;
                self.todo.push_back(Effect::OpenPrefill { worker, target: None, sequence: self.sequence(now) });
            }
            Action::SendTarget => {
                self.progress = now;
                self.prefill_opened += self.due.take().map_or(Duration::ZERO, |due| now.saturating_duration_since(due));
                self.todo.push_back(Effect::SendTarget(self.target.clone()));
            }
            Action::Emit(token) => {
                self.emitted_at = now;
                self.todo.push_back(Effect::Emit(token));
            }
            Action::CancelDecode => {
                (self.decode, self.held) = (false, None);
                self.todo.push_back(Effect::DropDecode);
            }
            Action::CancelPrefill => {
                self.prefill = false;
                self.todo.push_back(Effect::DropPrefill);
            }
            Action::Backoff(time) => self.backoff = Some(now + time),
            Action::Blame(leg) => self.blame(leg),
            Action::Recovering { leg, cause } => self.todo.push_back(Effect::Recovering { leg, cause }),
            Action::Finish { reason, cached_tokens } => {
                if let Some(placed) = self.placed {
                    // A client may have left because nothing came any more.
                    if self.pace.has_begun() && reason != FinishReason::Cancelled {
                        self.judge(Subject::Worker(placed.decode), Outcome::Worked(self.pace.per_token()));
                    }
                    // A prompt that was scored is in no prefix cache.
                    if !self.request.scored {
                        let NewRequest { root, block_size, names, .. } = &self.request;
                        let tokens = self.sequence_so_far();
                        let names = Prefixes::names(*root, *block_size, names, &tokens);
                        let answer = self.machine.emitted().len() as u32;
                        self.todo.push_back(Effect::Note { placed, names, tokens, answer });
                    }
                }
                self.todo.push_back(Effect::Finish { reason, cached_tokens });
            }
            Action::Fail(failure) => self.todo.push_back(Effect::Fail(failure)),
        }
    }

    fn sequence(&self, now: Instant) -> Sequence {
        let prompt_tokens = self.request.prompt.len() as u32;
        let time_left = self.request.deadline.saturating_duration_since(now);
        let scored = self.scored < prompt_tokens;
        Sequence { tokens: Arc::clone(&self.tokens), prompt_tokens, scored, time_left }
    }

    /// The prompt, and the answer as far as the client has it.
    fn sequence_so_far(&self) -> Arc<[u32]> {
        match self.machine.emitted() {
            [] => Arc::clone(&self.request.prompt),
            emitted => [&self.request.prompt, emitted].concat().into(),
        }
    }
}
