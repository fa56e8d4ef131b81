//! Runs one choice: does what the request's state machine says, and tells it what happened.
//!
//! The machine (in `baton-policy`) decides; this file owns the streams, the clock and nothing else.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use baton_policy::{Action, Failure, Input, Limits, Placed, Prefixes, RequestMachine};
use baton_proto::v1;
use baton_runtime::Shutdown;
use baton_types::{ErrorKind, RequestId, SamplingParams, WorkerId};
use futures::StreamExt;
use tokio::time::{Instant, sleep_until};

use crate::error::RequestError;
use crate::input::Standing;
use crate::sink::{Sink, Taken};
use crate::worker::{DecodeLeg, Leg, PrefillLeg, Said, Workers};

/// That its connection to the prefill worker broke is all a decode worker sees when that one dies; whether it lives is what the
/// prefill stream says, and so long that is waited for.
const SECOND_WORD: Duration = Duration::from_millis(100);

/// What is to be done.
pub(crate) struct Job {
    /// The same in every log on its way.
    pub id: RequestId,
    /// Token ids.
    pub prompt: Arc<[u32]>,
    /// Names of what it begins with.
    pub names: Arc<[u64]>,
    /// How to answer.
    pub sampling: SamplingParams,
    /// Its place beside others.
    pub standing: Standing,
    /// When it must be done.
    pub deadline: Instant,
    /// How often work may be started.
    pub max_attempts: u32,
}

/// One choice on its way.
pub(crate) struct Driver {
    job: Job,
    workers: Arc<Workers>,
    shutdown: Shutdown,
    sink: Option<Sink>,
    placed: Option<Placed>,
    decode: Option<Leg>,
    prefill: Option<Leg>,
    /// Of the newest decode stream: what it was asked for, and where its KV may be written.
    sequence: v1::Sequence,
    target: Vec<u8>,
    wake: Option<Instant>,
    /// What the decode stream said last, and until when the prefill stream may say something first.
    held: Option<(Instant, Input)>,
}

impl Driver {
    /// Ready to run.
    pub fn new(job: Job, workers: Arc<Workers>, shutdown: Shutdown, sink: Sink) -> Driver {
        let (placed, decode, prefill, wake, held) = (None, None, None, None, None);
        let (sequence, target) = (v1::Sequence::default(), Vec::new());
        Driver { job, workers, shutdown, sink: Some(sink), placed, decode, prefill, sequence, target, wake, held }
    }

    /// Runs the choice to its end. Ends early, with the legs cancelled, when the client goes away.
    pub async fn run(mut self) {
        let limits = Limits {
            max_tokens: self.job.sampling.max_tokens,
            stop_token_ids: self.job.sampling.stop_token_ids.clone(),
            max_attempts: self.job.max_attempts.max(1),
        };
        let (mut machine, first) = RequestMachine::start(limits);
        let mut todo = VecDeque::from([first]);
        let mut said = Vec::new();
        while self.sink.is_some() {
            let input = match todo.pop_front() {
                Some(action) => match self.perform(action, &machine).await {
                    Some(input) => input,
                    None => continue,
                },
                None => self.happens().await,
            };
            machine.step(input, &mut said);
            todo.extend(said.drain(..));
        }
    }

    /// Does one thing; some have their answer at once.
    async fn perform(&mut self, action: Action, machine: &RequestMachine) -> Option<Input> {
        match action {
            Action::Place { decode, split } => {
                Some(match self.workers.place(split, decode, machine.avoid(), &self.job.names) {
                    Ok(placed) => Input::Placed(*self.placed.insert(placed)),
                    Err(failure) => Input::NotPlaced(failure),
                })
            }
            Action::OpenDecode { worker, local } => {
                self.sequence = self.sequence(machine.emitted());
                self.note_worker(worker);
                let request = v1::DecodeRequest { sequence: Some(self.sequence.clone()), local_prefill: local };
                self.decode = Some(DecodeLeg::open(self.workers.lease(worker), request));
                None
            }
            Action::RunPrefill { worker } => {
                self.sequence.deadline_ms = self.milliseconds_left();
                self.note_worker(worker);
                let sequence = Some(self.sequence.clone());
                let request = v1::PrefillRequest { sequence, target: self.target.clone() };
                self.prefill = Some(PrefillLeg::open(self.workers.lease(worker), request));
                None
            }
            Action::Emit(token) => self.emit(token).await,
            Action::CancelDecode => {
                (self.decode, self.held) = (None, None);
                None
            }
            Action::CancelPrefill => {
                self.prefill = None;
                None
            }
            Action::Backoff(time) => {
                self.wake = Some(Instant::now() + time);
                None
            }
            Action::Recovering { leg, cause } => {
                if let Some(sink) = &self.sink {
                    sink.record().recovering(leg, &cause);
                }
                None
            }
            Action::Finish { reason, cached_tokens } => {
                // What is asked next may begin with this answer.
                if let Some(placed) = self.placed {
                    let all = [&self.job.prompt, machine.emitted()].concat();
                    self.workers.have(placed, &Prefixes::names(&self.job.standing.cache_salt, &all));
                }
                self.sink.take()?.finish(reason, cached_tokens, self.job.deadline).await;
                None
            }
            Action::Fail(failure) => {
                self.sink.take()?.fail(RequestError::from(failure)).await;
                None
            }
        }
    }

    async fn emit(&mut self, token: baton_types::TokenOut) -> Option<Input> {
        let deadline = self.job.deadline;
        let sink = self.sink.as_mut()?;
        tokio::select! {
            taken = sink.token(token) => match taken {
                Taken::Sent => None,
                Taken::StopMatched => Some(Input::StopMatched),
                Taken::ClientGone => Some(Input::ClientGone),
            },
            () = sleep_until(deadline) => Some(Input::Deadline),
            () = self.shutdown.forced() => Some(stopping()),
        }
    }

    /// The next thing that happens by itself.
    async fn happens(&mut self) -> Input {
        loop {
            let Some(sink) = &self.sink else { return Input::ClientGone };
            tokio::select! {
                biased;
                () = sink.client_gone() => return Input::ClientGone,
                () = self.shutdown.forced() => return stopping(),
                () = sleep_until(self.job.deadline) => return Input::Deadline,
                () = at(self.wake) => {
                    self.wake = None;
                    return Input::BackoffOver;
                }
                // Before the decode stream, which may be ahead of it by as much as the sockets hold.
                said = next(&mut self.prefill) => return said.input,
                input = over(&mut self.held) => return input,
                said = next(&mut self.decode) => {
                    if let Some(target) = said.target {
                        self.target = target;
                    }
                    match said.input {
                        Input::HandoffFailed(failure) if failure.kind == ErrorKind::PathLost && self.prefill.is_some() => {
                            self.held = Some((Instant::now() + SECOND_WORD, Input::HandoffFailed(failure)));
                        }
                        input => return input,
                    }
                }
            }
        }
    }

    fn sequence(&self, emitted: &[u32]) -> v1::Sequence {
        v1::Sequence {
            request_id: self.job.id.0.clone(),
            tokens: [&self.job.prompt, emitted].concat(),
            prompt_tokens: self.job.prompt.len() as u32,
            sampling: Some(self.job.sampling.clone().into()),
            deadline_ms: self.milliseconds_left(),
            cache_salt: self.job.standing.cache_salt.clone(),
            priority: self.job.standing.priority,
            cache_keep_seconds: self.job.standing.cache_keep_seconds,
        }
    }

    fn milliseconds_left(&self) -> u64 {
        let left = self.job.deadline.saturating_duration_since(Instant::now());
        // 0 would say that there is no deadline.
        u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)
    }

    fn note_worker(&self, worker: WorkerId) {
        if let Some(sink) = &self.sink {
            sink.record().worker(worker);
        }
    }
}

fn stopping() -> Input {
    Input::Abort(Failure::new(ErrorKind::Unavailable, "the router is stopping"))
}

async fn at(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// What was held back, once its time has come.
async fn over(held: &mut Option<(Instant, Input)>) -> Input {
    if let Some((until, _)) = held {
        sleep_until(*until).await;
        if let Some((_, input)) = held.take() {
            return input;
        }
    }
    pending().await
}

/// What a leg says next. A leg that has said its last word, or is not there, says nothing.
async fn next(leg: &mut Option<Leg>) -> Said {
    if let Some(running) = leg {
        if let Some(said) = running.next().await {
            return said;
        }
        *leg = None;
    }
    pending().await
}
