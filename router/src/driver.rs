//! Runs one choice: performs the effects that its [`Choice`] asks for, and reports back what happened.
//!
//! The [`Choice`] (in `baton-policy`) makes the decisions. This file owns the streams, the client's sink and the real clock.
//! It also fixes the order in which simultaneous events are reported.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_policy::{
    BlockName, Choice, ChoiceInput, DecodeWord, Effect, Fetch, NameChain, NewRequest, Patience, PrefillWord,
    RequestLimits, Sequence, Slo, Taken, Targets,
};
use baton_proto::v1;
use baton_runtime::Shutdown;
use baton_types::{ErrorKind, RequestId, SamplingParams, WorkerId};
use tokio::sync::oneshot;
use tokio::task::coop::poll_proceed;
use tokio::time::{Instant, sleep_until};

use crate::error::RequestError;
use crate::forecast::Forecast;
use crate::gate::{InLine, Turn, Waited};
use crate::sink::Sink;
use crate::standing::Standing;
use crate::trace::{Kv, Subject, Trace};
use crate::waits::{Alarm, Dormant};
use crate::worker::{Allowed, FetchBegins, Leg, Word, Workers, open_decode, open_prefill, traced};

/// One choice to run.
pub(crate) struct Job {
    /// The request's id, the same in the logs of the router and the workers.
    pub request_id: RequestId,
    /// Token ids of the prompt.
    pub prompt: Arc<[u32]>,
    /// Names of the prompt's blocks.
    pub names: Arc<[BlockName]>,
    /// What comes before the first of them.
    pub root: NameChain,
    /// Tokens of each of these blocks.
    pub block_size: u32,
    /// How to sample the answer.
    pub sampling: SamplingParams,
    /// How the request is cached and ranked.
    pub standing: Standing,
    /// When the answer must be complete.
    pub deadline: Instant,
    /// How many times work may be started before the choice fails.
    pub max_attempts: u32,
    /// How long it waits for a worker where there is none.
    pub worker_wait: Duration,
    /// How long workers may send nothing.
    pub patience: Patience,
    /// When its tokens have to come. None: it is served if the first choice of its request is.
    pub slo: Option<Slo>,
    /// What its times are measured by, for metrics.
    pub targets: Option<Targets>,
    /// The beginning of the prompt, if people may see it.
    pub shown: Option<String>,
}

/// A running choice.
pub(crate) struct Driver {
    job: Job,
    workers: Arc<Workers>,
    shutdown: Shutdown,
    sink: Sink,
    decode: Option<Leg<DecodeWord>>,
    prefill: Option<Leg<PrefillWord>>,
    /// Where the prefill stream waits for its target, if it was opened without one.
    target: Option<oneshot::Sender<Vec<u8>>>,
    alarm: Alarm,
    forecast: Forecast,
    /// What a worker that computes takes from another one first. One that was begun goes on when the request is placed again.
    fetch: Option<(WorkerId, FetchBegins)>,
    /// Number of the latest placement, if no worker could take the request.
    unplaced: Option<u64>,
    waited: Waited,
    trace: Arc<Trace>,
    /// The client goes away, or the process waits no longer.
    broken_off: Dormant<ChoiceInput>,
}

impl Driver {
    /// A driver that is ready to run.
    pub fn new(mut job: Job, workers: Arc<Workers>, shutdown: Shutdown, sink: Sink) -> Driver {
        let (alarm, forecast) = (Alarm::new(job.deadline), Forecast::new(&workers, job.standing.class));
        let (gone, process) = (sink.client_gone(), shutdown.clone());
        let broken_off = Dormant::new(async move {
            tokio::select! {
                biased;
                () = gone => ChoiceInput::ClientGone,
                () = process.forced() => ChoiceInput::Stopping,
            }
        });
        let trace = workers.traces().begin(Subject {
            request: job.request_id.clone(),
            choice: sink.choice(),
            class: job.standing.class,
            received: sink.record().received(),
            prompt_tokens: job.prompt.len() as u32,
            prompt: job.shown.take(),
            targets: job.targets,
            kv: Kv::of(&job.prompt, &job.standing.cache_salt),
            span: sink.record().span().map(|span| span.child()),
        });
        let (decode, prefill, target, fetch, unplaced) = (None, None, None, None, None);
        Driver {
            job,
            workers,
            shutdown,
            sink,
            decode,
            prefill,
            target,
            alarm,
            forecast,
            fetch,
            unplaced,
            waited: Waited::default(),
            trace,
            broken_off,
        }
    }

    /// Runs the choice to its end. When the client goes away, cancels both legs and ends early.
    ///
    /// `line`: where it waits for its turn first.
    pub async fn run(mut self, line: Option<InLine>) {
        if let Some(line) = line {
            let begun = Instant::now();
            match self.waits(line).await {
                Ok(turn) => {
                    self.waited = Waited::of(begun.elapsed(), &turn, &self.job.standing);
                    self.sink.begins(turn);
                }
                Err(error) => {
                    if error.kind == ErrorKind::ResourceExhausted {
                        self.sink.record().rejected(&error);
                        self.workers.turned_away(&self.job.request_id, &error);
                    }
                    self.trace.failed(&error);
                    return self.sink.fail(error).await;
                }
            }
        }
        self.trace.begins();
        // The time of the latest event. Tokens that are ready together have one.
        let mut now = Instant::now();
        let mut choice = Choice::start(self.new_request(), now.into_std());
        loop {
            let input = match choice.next_effect() {
                Some(Effect::Finish { reason, cached_tokens }) => {
                    self.forecast.ended(cached_tokens);
                    self.trace.finished(reason, cached_tokens);
                    return self.sink.finish(reason, cached_tokens, self.job.deadline).await;
                }
                Some(Effect::Fail(failure)) => {
                    let late = failure.late;
                    let error = RequestError::from(failure);
                    if late {
                        self.sink.record().rejected(&error);
                    }
                    self.trace.failed(&error);
                    return self.sink.fail(error).await;
                }
                Some(Effect::Emit(token)) => {
                    if !self.sink.has_turn() {
                        self.sink.turn().await;
                        now = Instant::now();
                    }
                    self.forecast.token(now);
                    self.trace.token(now);
                    ChoiceInput::Taken(self.sink.token(token, now))
                }
                Some(Effect::EmitScored(tokens)) => {
                    self.sink.scored(tokens);
                    let instead = self.given().await;
                    now = Instant::now();
                    instead.unwrap_or(ChoiceInput::Taken(Taken::Sent))
                }
                Some(effect) => {
                    let Some(input) = self.perform(effect) else { continue };
                    now = Instant::now();
                    input
                }
                // What came together is sent together.
                None if self.sink.is_to_send(self.decode.as_ref().is_some_and(Leg::has_more)) => {
                    let Some(input) = self.given().await else { continue };
                    now = Instant::now();
                    input
                }
                None => {
                    let wake = choice.next_wake().map(Instant::from_std);
                    let (input, at) = poll_fn(|cx| self.happens(wake, cx)).await;
                    now = at;
                    // The decode worker knows first, and its word is not behind a prefill worker's long step.
                    let decode = self.decode.as_mut().and_then(Leg::take_transferred);
                    let prefill = self.prefill.as_mut().and_then(Leg::take_transferred);
                    self.trace.heard(&input, decode.or(prefill));
                    input
                }
            };
            choice.feed(input, now.into_std());
        }
    }

    async fn waits(&mut self, mut line: InLine) -> Result<Turn, RequestError> {
        let Job { deadline, slo, .. } = self.job;
        let limit = slo.and_then(|slo| slo.first_token);
        let late = limit.map(|limit| Instant::now() + limit).filter(|late| *late < deadline);
        let (kind, why) = tokio::select! {
            biased;
            turn = line.turn() => match turn {
                Some(turn) => return Ok(turn),
                None => (ErrorKind::ResourceExhausted, "all places are taken, and another request went before; retry later"),
            },
            end = &mut self.broken_off => match end {
                ChoiceInput::ClientGone => (ErrorKind::Cancelled, "the client went away while its request waited"),
                _ => (ErrorKind::Unavailable, "the router is stopping; ask another one"),
            },
            () = self.alarm.rings(late.or(Some(deadline))) => match limit.filter(|_| late.is_some()) {
                Some(limit) => return Err(Waited::too_long(limit)),
                None => (ErrorKind::DeadlineExceeded, "the request's time ran out while it waited for its turn"),
            }
        };
        let error = RequestError::new(kind, why);
        Err(if kind == ErrorKind::ResourceExhausted { error.code("too_many_requests") } else { error })
    }

    fn new_request(&self) -> NewRequest {
        let Job { prompt, names, root, block_size, sampling, standing, deadline, patience, slo, .. } = &self.job;
        let limits = RequestLimits {
            max_tokens: sampling.max_tokens,
            stop_token_ids: sampling.stop_token_ids.clone(),
            max_attempts: self.job.max_attempts,
            worker_wait: self.job.worker_wait,
        };
        let (prompt, names, root) = (Arc::clone(prompt), Arc::clone(names), *root);
        let (deadline, patience, block_size) = (deadline.into_std(), *patience, *block_size);
        let left = deadline.saturating_duration_since(Instant::now().into_std());
        let slo = slo.map(|slo| Slo { deadline: Some(left), ..self.waited.of_slo(slo) }).unwrap_or_default();
        let scored = sampling.prompt_logprobs.is_some();
        NewRequest {
            prompt,
            names,
            block_size,
            root,
            scored,
            limits,
            deadline,
            patience,
            slo,
            class: standing.class,
            handed_over: standing.handed_over,
            before: self.waited.before(),
        }
    }

    /// Performs one effect. Returns its result, for effects that have one at once.
    fn perform(&mut self, effect: Effect) -> Option<ChoiceInput> {
        match effect {
            Effect::Place(ask) => {
                let outcome = self.workers.place(&ask, &self.job.request_id, self.unplaced);
                let unplaced = outcome.chosen.is_err().then_some(outcome.number);
                let still = std::mem::replace(&mut self.unplaced, unplaced).is_some() && unplaced.is_some();
                self.forecast.placed(&outcome);
                let fetch = outcome.chosen.as_ref().ok().and_then(|chosen| chosen.fetch);
                if let Some(fetch) = fetch.and_then(|fetch| Some((fetch.to, self.fetch(&fetch)?))) {
                    self.fetch = Some(fetch);
                }
                if !still {
                    self.trace.placed(outcome.chosen.as_ref().ok().map(|chosen| chosen.placed));
                }
                return Some(ChoiceInput::from(outcome.chosen));
            }
            Effect::OpenDecode { worker, local, sequence } => {
                self.sink.record().worker(worker);
                self.forecast.opens(worker);
                let span = self.trace.opens_decode(worker, local);
                let sequence = Some(self.sequence(sequence));
                let request = v1::DecodeRequest { sequence, compute_here: local, takes_more: true };
                let fetch = if local { self.fetch_to(worker) } else { None };
                self.decode = Some(open_decode(self.workers.link(worker), traced(request, span), fetch));
            }
            Effect::OpenPrefill { worker, target, sequence } => {
                self.sink.record().worker(worker);
                self.forecast.opens(worker);
                let span = self.trace.opens_prefill(worker);
                let (target_follows, target) = (target.is_none(), target.unwrap_or_default());
                let request = v1::PrefillRequest { sequence: Some(self.sequence(sequence)), target, target_follows };
                let fetch = self.fetch_to(worker);
                let (prefill, follows) = open_prefill(self.workers.link(worker), traced(request, span), fetch);
                (self.prefill, self.target) = (Some(prefill), follows);
            }
            Effect::SendTarget(target) => {
                // A stream that has ended says so itself.
                if let Some(follows) = self.target.take() {
                    let _ = follows.send(target);
                }
            }
            Effect::DropDecode => self.decode = None,
            Effect::DropPrefill => (self.prefill, self.target) = (None, None),
            Effect::Recovering { leg, cause } => {
                self.trace.recovering(leg, &cause.message);
                self.sink.record().recovering(leg, &cause);
            }
            Effect::Judge(verdict) => self.workers.judge(verdict),
            Effect::Note { placed, names, tokens, answer } => {
                self.workers.note(placed, &names, answer);
                let prefix = || v1::Prefix {
                    request_id: self.job.request_id.0.clone(),
                    tokens: tokens.to_vec(),
                    cache_salt: self.job.standing.cache_salt.clone(),
                    ..v1::Prefix::default()
                };
                let names: Arc<[BlockName]> = names.into();
                let prompt = self.job.prompt.len();
                self.workers.recall(self.job.standing.tenant, prompt, &names, prefix);
                self.workers.keep(names, prefix);
            }
            // `run` performs these.
            Effect::Emit(_) | Effect::EmitScored(_) | Effect::Finish { .. } | Effect::Fail(_) => {}
        }
        None
    }

    fn fetch(&self, fetch: &Fetch) -> Option<FetchBegins> {
        let Job { request_id, prompt, standing, .. } = &self.job;
        // One token after the last block: what follows is of no matter.
        let tokens = prompt.get(..fetch.tokens as usize + 1)?.to_vec();
        let left = self.job.deadline.saturating_duration_since(Instant::now());
        let prefix = v1::Prefix {
            request_id: request_id.0.clone(),
            tokens,
            cache_salt: standing.cache_salt.clone(),
            cache_keep_seconds: standing.cache_keep_seconds,
            priority: standing.class.at_workers(standing.priority),
            ..v1::Prefix::default()
        };
        self.workers.fetch(*fetch, prefix, Allowed::of(fetch, left))
    }

    /// The fetch of this worker, if it has one.
    fn fetch_to(&self, worker: WorkerId) -> Option<FetchBegins> {
        self.fetch.as_ref().filter(|(to, _)| *to == worker).map(|(_, begins)| begins.clone())
    }

    /// Sends the client what is to be sent, and waits until there is room for it. Returns what happens instead.
    async fn given(&mut self) -> Option<ChoiceInput> {
        match self.sink.send() {
            Some(Taken::Sent) => return None,
            Some(taken) => return Some(ChoiceInput::Taken(taken)),
            None => {}
        }
        let Driver { sink, job, shutdown, .. } = self;
        Some(tokio::select! {
            biased;
            taken = sink.wait() => ChoiceInput::Taken(taken),
            () = sleep_until(job.deadline) => ChoiceInput::Wake,
            () = shutdown.forced() => ChoiceInput::Stopping,
        })
    }

    /// The next outside event, and when. Of events that are ready together, the first in this order is taken.
    fn happens(&mut self, wake: Option<Instant>, cx: &mut Context<'_>) -> Poll<(ChoiceInput, Instant)> {
        let budget = ready!(poll_proceed(cx));
        let now = Instant::now();
        let said = match Pin::new(&mut self.broken_off).poll(cx) {
            Poll::Ready(end) => Poll::Ready(end),
            // Prefill before decode: the decode stream may be ahead by as much as the sockets hold.
            Poll::Pending => match next(&mut self.prefill, cx) {
                Poll::Ready(said) => Poll::Ready(said),
                Poll::Pending if wake.is_some_and(|wake| wake <= now) => Poll::Ready(ChoiceInput::Wake),
                Poll::Pending => next(&mut self.decode, cx),
            },
        };
        match (said, wake) {
            (Poll::Ready(said), _) => {
                budget.made_progress();
                Poll::Ready((said, now))
            }
            // Only who waits needs a timer.
            (Poll::Pending, Some(wake)) => self.alarm.poll_at(wake, cx).map(|()| (ChoiceInput::Wake, Instant::now())),
            (Poll::Pending, None) => Poll::Pending,
        }
    }

    fn sequence(&self, sequence: Sequence) -> v1::Sequence {
        let Sequence { tokens, prompt_tokens, scored, time_left } = sequence;
        let Job { request_id, sampling, standing, .. } = &self.job;
        let prompt_logprobs = sampling.prompt_logprobs.filter(|_| scored);
        let sampling = SamplingParams { prompt_logprobs, ..sampling.clone() };
        v1::Sequence {
            request_id: request_id.0.clone(),
            tokens: tokens.to_vec(),
            prompt_tokens,
            sampling: Some(sampling.into()),
            // At least 1, because 0 means no deadline.
            deadline_ms: u64::try_from(time_left.as_millis()).unwrap_or(u64::MAX).max(1),
            cache_salt: standing.cache_salt.clone(),
            priority: standing.class.at_workers(standing.priority),
            cache_keep_seconds: standing.cache_keep_seconds,
            tenant: standing.tenant,
            weight: standing.weight,
        }
    }
}

/// The next message of a leg. Pending when the leg has ended or is absent.
fn next<W: Word>(leg: &mut Option<Leg<W>>, cx: &mut Context<'_>) -> Poll<ChoiceInput> {
    let Some(running) = leg else { return Poll::Pending };
    let said = ready!(running.poll_said(cx));
    if said.is_none() {
        *leg = None;
    }
    said.map_or(Poll::Pending, Poll::Ready)
}
