//! Runs one choice: does what its [`Choice`] says, and tells it what happened.
//!
//! The choice (in `baton-policy`) decides; this file owns the streams, the client's sink and the real clock, and keeps the
//! order in which things that happen at once are told.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;

use baton_policy::{Choice, ChoiceInput, Effect, NewRequest, RequestLimits, Sequence};
use baton_proto::v1;
use baton_runtime::Shutdown;
use baton_types::{RequestId, SamplingParams};
use futures::StreamExt;
use tokio::time::{Instant, sleep_until};

use crate::error::RequestError;
use crate::input::Standing;
use crate::sink::Sink;
use crate::worker::{Leg, Workers, open_decode, open_prefill};

/// What is to be done.
pub(crate) struct Job {
    /// The same in every log on its way.
    pub request_id: RequestId,
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
    sink: Sink,
    decode: Option<Leg>,
    prefill: Option<Leg>,
}

impl Driver {
    /// Ready to run.
    pub fn new(job: Job, workers: Arc<Workers>, shutdown: Shutdown, sink: Sink) -> Driver {
        Driver { job, workers, shutdown, sink, decode: None, prefill: None }
    }

    /// Runs the choice to its end. Ends early, with the legs cancelled, when the client goes away.
    pub async fn run(mut self) {
        let mut effects = Vec::new();
        let mut choice = Choice::start(self.new_request(), now(), &mut effects);
        let mut todo = VecDeque::from(effects);
        let mut said = Vec::new();
        loop {
            let input = match todo.pop_front() {
                Some(Effect::Finish { reason, cached_tokens }) => {
                    return self.sink.finish(reason, cached_tokens, self.job.deadline).await;
                }
                Some(Effect::Fail(failure)) => return self.sink.fail(RequestError::from(failure)).await,
                Some(effect) => match self.perform(effect).await {
                    Some(input) => input,
                    None => continue,
                },
                None => self.happens(choice.next_wake()).await,
            };
            choice.step(input, now(), &mut said);
            todo.extend(said.drain(..));
        }
    }

    fn new_request(&self) -> NewRequest {
        let Job { prompt, names, sampling, standing, deadline, max_attempts, .. } = &self.job;
        let limits = RequestLimits {
            max_tokens: sampling.max_tokens,
            stop_token_ids: sampling.stop_token_ids.clone(),
            max_attempts: *max_attempts,
        };
        let (prompt, names, cache_salt) = (Arc::clone(prompt), Arc::clone(names), standing.cache_salt.clone());
        NewRequest { prompt, names, cache_salt, limits, deadline: deadline.into_std() }
    }

    /// Does one thing; some have their answer at once.
    async fn perform(&mut self, effect: Effect) -> Option<ChoiceInput> {
        match effect {
            Effect::Place(ask) => return Some(ChoiceInput::Placed(self.workers.place(&ask))),
            Effect::OpenDecode { worker, local, sequence } => {
                self.sink.record().worker(worker);
                let sequence = Some(self.sequence(sequence));
                let request = v1::DecodeRequest { sequence, local_prefill: local };
                self.decode = Some(open_decode(self.workers.link(worker), request));
            }
            Effect::OpenPrefill { worker, target, sequence } => {
                self.sink.record().worker(worker);
                let request = v1::PrefillRequest { sequence: Some(self.sequence(sequence)), target };
                self.prefill = Some(open_prefill(self.workers.link(worker), request));
            }
            Effect::Emit(token) => return Some(self.emit(token).await),
            Effect::DropDecode => self.decode = None,
            Effect::DropPrefill => self.prefill = None,
            Effect::Recovering { leg, cause } => self.sink.record().recovering(leg, &cause),
            Effect::Note { placed, names } => self.workers.note(placed, &names),
            // The last ones, which `run` does.
            Effect::Finish { .. } | Effect::Fail(_) => {}
        }
        None
    }

    async fn emit(&mut self, token: baton_types::TokenOut) -> ChoiceInput {
        tokio::select! {
            taken = self.sink.token(token) => ChoiceInput::Taken(taken),
            () = sleep_until(self.job.deadline) => ChoiceInput::Wake,
            () = self.shutdown.forced() => ChoiceInput::Stopping,
        }
    }

    /// The next thing that happens by itself, in the order that the choice asks for.
    async fn happens(&mut self, wake: Option<std::time::Instant>) -> ChoiceInput {
        tokio::select! {
            biased;
            () = self.sink.client_gone() => ChoiceInput::ClientGone,
            () = self.shutdown.forced() => ChoiceInput::Stopping,
            // Before the decode stream, which may be ahead of it by as much as the sockets hold.
            said = next(&mut self.prefill) => said,
            () = at(wake) => ChoiceInput::Wake,
            said = next(&mut self.decode) => said,
        }
    }

    fn sequence(&self, sequence: Sequence) -> v1::Sequence {
        let Sequence { tokens, prompt_tokens, time_left } = sequence;
        let Job { request_id, sampling, standing, .. } = &self.job;
        v1::Sequence {
            request_id: request_id.0.clone(),
            tokens: tokens.to_vec(),
            prompt_tokens,
            sampling: Some(sampling.clone().into()),
            // 0 would say that there is no deadline.
            deadline_ms: u64::try_from(time_left.as_millis()).unwrap_or(u64::MAX).max(1),
            cache_salt: standing.cache_salt.clone(),
            priority: standing.priority,
            cache_keep_seconds: standing.cache_keep_seconds,
        }
    }
}

/// The time, as the runtime has it.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

async fn at(wake: Option<std::time::Instant>) {
    match wake {
        Some(at) => sleep_until(at.into()).await,
        None => pending().await,
    }
}

/// What a leg says next. A leg that has said its last word, or is not there, says nothing.
async fn next(leg: &mut Option<Leg>) -> ChoiceInput {
    if let Some(running) = leg {
        if let Some(said) = running.next().await {
            return said;
        }
        *leg = None;
    }
    pending().await
}
