//! The one path behind both front doors: admission, plan, one driver a choice, one stream of events back.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_policy::Prefixes;
use baton_runtime::{Shutdown, metrics as names};
use baton_types::ErrorKind;
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use crate::driver::{Driver, Job};
use crate::error::RequestError;
use crate::input::GenerateInput;
use crate::model::ServedModel;
use crate::record::Record;
use crate::sink::{Event, EventKind, Sink, Way, broken_off};
use crate::stop::StopMatcher;
use crate::worker::Workers;

/// Events that may wait for a client; a full channel holds back the workers' streams (I5).
const EVENTS: usize = 64;
/// More than this is no deadline any more.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a semaphore can count, on every platform.
const MAX_SLOTS: usize = 1 << 24;

/// What both front doors share.
pub(crate) struct Front {
    pub model: Arc<ServedModel>,
    pub workers: Arc<Workers>,
    pub shutdown: Shutdown,
    pub request_timeout: Duration,
    pub max_attempts: u32,
    pub body_limit: usize,
    pub keep_alive: Duration,
    /// Seconds since 1970.
    pub started: u64,
    max_inflight: usize,
    slots: Arc<Semaphore>,
}

/// Limits of a front door.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrontLimits {
    pub request_timeout: Duration,
    pub max_attempts: u32,
    pub max_inflight: usize,
    pub body_limit: usize,
    pub keep_alive: Duration,
}

/// A request under way. Dropping it cancels every choice at once.
pub(crate) struct Generation {
    /// The prompts' token ids.
    pub prompts: Vec<Arc<[u32]>>,
    /// Answers a prompt; choice `c` answers prompt `c / n`.
    pub n: u32,
    events: mpsc::Receiver<Event>,
    open: Vec<bool>,
    failure: Arc<OnceLock<RequestError>>,
    /// Kept until the client has everything, and by each driver until its worker has let go.
    _place: Arc<OwnedSemaphorePermit>,
}

impl Front {
    /// Everything a request needs.
    pub fn new(model: Arc<ServedModel>, workers: Arc<Workers>, shutdown: Shutdown, limits: FrontLimits) -> Front {
        let FrontLimits { request_timeout, max_attempts, max_inflight, body_limit, keep_alive } = limits;
        let max_inflight = max_inflight.clamp(1, MAX_SLOTS);
        let slots = Arc::new(Semaphore::new(max_inflight));
        Front {
            model,
            workers,
            shutdown,
            request_timeout,
            max_attempts,
            body_limit,
            keep_alive,
            started: unix_seconds(),
            max_inflight,
            slots,
        }
    }

    /// Why requests are refused now; None when they are not.
    pub fn not_ready(&self) -> Option<String> {
        let draining = self.shutdown.is_draining().then(|| "draining".to_owned());
        draining.or_else(|| self.workers.not_ready())
    }

    /// Longest sequence that can be asked for now, tokens: the model's, or what its workers are set to if that is less.
    pub fn context_tokens(&self) -> u32 {
        self.workers.capacity().context().unwrap_or(self.model.context_tokens())
    }

    /// Counts a request that was refused before any work.
    pub fn refused(&self, error: &RequestError) {
        counter!(names::REJECTED, "reason" => error.code.unwrap_or(error.kind.as_str())).increment(1);
    }

    /// When a request that came in at `received` must be done: the configured limit, or what its client allows if less.
    pub fn deadline(&self, received: Instant, client: Option<Duration>) -> Instant {
        let timeout = client.unwrap_or(Duration::MAX).min(self.request_timeout).min(LONGEST);
        received + timeout
    }

    /// Completes when no request is under way, its last event given out.
    pub async fn idle(&self) {
        let all = u32::try_from(self.max_inflight).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let _ = self.slots.acquire_many(all).await;
    }

    /// Starts a request, or says why not.
    pub async fn generate(&self, input: GenerateInput) -> Result<Generation, RequestError> {
        let record = Arc::new(Record::new(input.request_id.clone(), input.received));
        let started = self.start(input, &record).await;
        if let Err(error) = &started {
            record.failed(error);
            self.refused(error);
        }
        started
    }

    async fn start(&self, input: GenerateInput, record: &Arc<Record>) -> Result<Generation, RequestError> {
        if self.shutdown.is_draining() {
            return Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; ask another one"));
        }
        input.check(&self.model)?;
        let permit = Arc::new(self.admit(input.choices())?);
        let (n, deadline, stop, standing) = (input.n, input.deadline, input.stop.clone(), input.standing.clone());
        let calls = input.tools.is_some();
        let planned = input.plan(&self.model, self.workers.capacity()).await?;
        let (out, events) = mpsc::channel(EVENTS);
        let mut prompts = Vec::with_capacity(planned.len());
        let failure = Arc::new(OnceLock::new());
        let mut choice = 0;
        for plan in planned {
            let names: Arc<[u64]> = Prefixes::names(&standing.cache_salt, &plan.prompt).into();
            for sampling in plan.choices {
                let sink = Sink::new(Way {
                    choice,
                    stop_ids: sampling.stop_token_ids.clone(),
                    text: self.model.text_stream(calls),
                    stop: StopMatcher::new(stop.clone()),
                    prompt_tokens: plan.prompt.len() as u32,
                    out: out.clone(),
                    failure: Arc::clone(&failure),
                    record: Arc::clone(record),
                });
                let request_id = record.request_id().clone();
                let prompt = Arc::clone(&plan.prompt);
                let standing = standing.clone();
                let (names, max_attempts) = (Arc::clone(&names), self.max_attempts);
                let job = Job { request_id, prompt, names, sampling, standing, deadline, max_attempts };
                let driver = Driver::new(job, Arc::clone(&self.workers), self.shutdown.clone(), sink);
                let permit = Arc::clone(&permit);
                tokio::spawn(async move {
                    driver.run().await;
                    drop(permit);
                });
                choice += 1;
            }
            prompts.push(plan.prompt);
        }
        Ok(Generation { prompts, n, events, open: vec![true; choice as usize], failure, _place: permit })
    }

    /// A place for every choice, or a refusal before anything is spent.
    fn admit(&self, choices: u32) -> Result<OwnedSemaphorePermit, RequestError> {
        Arc::clone(&self.slots).try_acquire_many_owned(choices).map_err(|_| {
            let full = format!("{} answers are in the making already; retry later", self.max_inflight);
            RequestError::new(ErrorKind::ResourceExhausted, full).code("too_many_requests")
        })
    }
}

impl Generation {
    /// True after the last choice's end, or after the first failure.
    pub fn ended(&self) -> bool {
        !self.open.contains(&true)
    }

    /// The next event; None after the last choice's end, or after the first failure.
    pub async fn next(&mut self) -> Option<Event> {
        if self.ended() {
            return None;
        }
        let Some(event) = self.events.recv().await else {
            self.open.clear();
            let error = self.failure.get().cloned().unwrap_or_else(broken_off);
            return Some(Event { choice: 0, kind: EventKind::Failed(error) });
        };
        match event.kind {
            EventKind::Token { .. } => {}
            EventKind::Finished { .. } => self.open[event.choice as usize] = false,
            EventKind::Failed(_) => self.open.clear(),
        }
        Some(event)
    }
}

/// Now, in seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
