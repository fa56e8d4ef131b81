//! The path behind both front doors: admission, planning, one driver per choice, one stream of events back.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_policy::{Asks, BlockName, Patience, Prefixes, Slo, Targets};
use baton_runtime::{Bytes, Shutdown};
use baton_types::{Class, ErrorKind};
use compact_str::CompactString;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};

use crate::body::Bodies;
use crate::driver::{Driver, Job};
use crate::error::RequestError;
use crate::gate::Gate;
use crate::input::GenerateInput;
use crate::keys::KeyRing;
use crate::models::{Models, Served};
use crate::record::{Record, rejected};
use crate::rounds::Rounds;
use crate::sink::{Event, EventKind, Parcel, Piece, Sink, Way, broken_off};
use crate::standing::Standing;
use crate::stop::StopMatcher;
use crate::tenant::{Pass, Tenant};

/// Parcels that may wait for a client; a full channel holds back the workers' streams (I5).
const PARCELS: usize = 32;
/// Most events that go out in one write.
const AT_ONCE: usize = 64;
/// Longest timeout of a request, even if more is configured.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a request waits for the slots of those that were turned away for it.
const TURNED_AWAY: Duration = Duration::from_secs(2);
/// Most permits of a semaphore; every platform can count this many.
const MAX_SLOTS: usize = 1 << 24;

/// The state that both front doors share.
pub(crate) struct Front {
    pub models: Arc<Models>,
    pub shutdown: Shutdown,
    pub limits: FrontLimits,
    pub bodies: Bodies,
    /// When the router started, seconds since 1970.
    pub started: u64,
    slots: Arc<Semaphore>,
    rounds: Arc<Rounds>,
    keys: Option<Arc<KeyRing>>,
}

/// Settings of the front doors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrontLimits {
    pub request_timeout: Duration,
    pub max_attempts: u32,
    pub worker_wait: Duration,
    pub patience: Patience,
    pub slo: Slo,
    /// The router predicts whether it will be met.
    pub predicts: bool,
    pub max_inflight: usize,
    pub body_limit: usize,
    pub body_memory: Bytes,
    pub keep_alive: Duration,
    pub send_timeout: Duration,
}

/// A request's place among those in progress. It is given back when the client has everything and every driver has ended, or earlier when
/// the client does not read.
#[derive(Clone)]
pub(crate) struct Slot(Arc<Mutex<Place>>);

enum Place {
    /// Taken, of all and of the tenant's own, and what to do should it be given back early.
    Taken { _permit: OwnedSemaphorePermit, _pass: Option<Pass>, then: Option<Box<dyn FnOnce() + Send>> },
    /// Given back early.
    GivenBack,
}

impl Slot {
    fn new(permit: OwnedSemaphorePermit, pass: Option<Pass>) -> Slot {
        Slot(Arc::new(Mutex::new(Place::Taken { _permit: permit, _pass: pass, then: None })))
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the place back now.
    pub fn give_back(&self) {
        // Not under the lock: what is done may drop other clones of this slot.
        let taken = std::mem::replace(&mut *self.place(), Place::GivenBack);
        if let Place::Taken { then: Some(then), .. } = taken {
            then();
        }
    }

    /// Does this once if the place is given back because the client does not read.
    pub fn when_given_back(&self, then: impl FnOnce() + Send + 'static) {
        match &mut *self.place() {
            Place::Taken { then: what, .. } => return *what = Some(Box::new(then)),
            Place::GivenBack => {}
        }
        then();
    }
}

/// A running request. Dropping it cancels every choice at once.
pub(crate) struct Generation {
    /// The model that answers.
    pub served: Served,
    /// The class that it is served as.
    pub class: Class,
    /// Token ids of each prompt.
    pub prompts: Vec<Arc<[u32]>>,
    /// Answers per prompt; choice `c` answers prompt `c / n`.
    pub n: u32,
    parcels: mpsc::Receiver<Parcel>,
    /// The rest of a parcel, and whose it is.
    more: std::vec::IntoIter<(Piece, CompactString)>,
    of: u32,
    open: Vec<bool>,
    /// Nothing of the answers is wanted.
    only_prompt: bool,
    failure: Arc<OnceLock<RequestError>>,
    slot: Slot,
}

impl Front {
    /// A front with no requests yet.
    pub fn new(models: Arc<Models>, shutdown: Shutdown, limits: FrontLimits, keys: Option<Arc<KeyRing>>) -> Front {
        let limits = FrontLimits { max_inflight: limits.max_inflight.clamp(1, MAX_SLOTS), ..limits };
        Front {
            models,
            shutdown,
            bodies: Bodies::new(limits.body_limit, limits.body_memory),
            started: unix_seconds(),
            slots: Arc::new(Semaphore::new(limits.max_inflight)),
            rounds: Rounds::start(),
            limits,
            keys,
        }
    }

    /// Who asks, by the Authorization header; None where clients need no key.
    pub fn tenant(&self, authorization: Option<&[u8]>) -> Result<Option<Arc<Tenant>>, RequestError> {
        self.keys.as_ref().map(|keys| keys.tenant(authorization)).transpose()
    }

    /// Why requests are refused now; None when they are accepted.
    pub fn not_ready(&self) -> Option<String> {
        let draining = self.shutdown.is_draining().then(|| "draining".to_owned());
        draining.or_else(|| self.models.not_ready())
    }

    /// Counts a request that was refused before its class was known.
    pub fn refused(&self, error: &RequestError) {
        rejected(error, "unknown");
    }

    /// Deadline of a request that arrived at `received`: the configured timeout, or the client's if that is shorter.
    pub fn deadline(&self, received: Instant, client: Option<Duration>) -> Instant {
        let timeout = client.unwrap_or(Duration::MAX).min(self.limits.request_timeout).min(LONGEST);
        received + timeout
    }

    /// Completes when no request is running and every event has been delivered.
    pub async fn idle(&self) {
        let all = u32::try_from(self.limits.max_inflight).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let _ = self.slots.acquire_many(all).await;
    }

    /// Starts a request, or says why it is refused.
    pub async fn generate(&self, input: GenerateInput) -> Result<Generation, RequestError> {
        let record = Arc::new(Record::new(input.request_id.clone(), input.tenant.clone(), input.received, input.span));
        let started = self.start(input, &record).await;
        if let Err(error) = &started {
            record.failed(error);
            record.rejected(error);
        }
        started
    }

    async fn start(&self, mut input: GenerateInput, record: &Arc<Record>) -> Result<Generation, RequestError> {
        if self.shutdown.is_draining() {
            return Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; ask another one"));
        }
        let served = self.models.named(&input.model)?.clone();
        let Served { model, workers, gate } = &served;
        input.check(model)?;
        let tenant = input.tenant.clone();
        if let Some(tenant) = &tenant {
            input.standing = tenant.standing(input.standing)?;
        }
        let slo = input.standing.promised(self.limits.slo, self.limits.predicts)?;
        let class = input.standing.class;
        record.class(class);
        let lines_up = tenant.is_some() || class.is_batch();
        let permit = self.admit(input.choices(), class, tenant.is_some())?;
        let pass = tenant.as_ref().map(|tenant| tenant.admit(input.choices())).transpose()?;

        let (n, deadline, stop, standing) = (input.n, input.deadline, input.stop.clone(), input.standing.clone());
        let (calls, only_prompt) = (input.tools.is_some(), input.only_prompt);
        let choices = input.choices();
        let planned = input.plan(model, workers.capacity()).await?;
        let permit = match permit {
            None => self.make_room(choices, &standing).await?,
            Some(permit) => permit,
        };
        let slot = Slot::new(permit, pass);
        let (out, parcels) = mpsc::channel(PARCELS);
        let mut prompts = Vec::with_capacity(planned.len());
        let failure = Arc::new(OnceLock::new());
        // Of a request, the first choice decides: the others share what is computed for it.
        let (mut choice, targets, mut slo) = (0, Targets::of(&slo, class), Some(slo));
        // Batch work may wait as long as others have work, until its deadline.
        let patience = match class {
            Class::Interactive => self.limits.patience,
            Class::Batch => Patience { first_token: LONGEST, token: LONGEST },
        };
        let block_size = workers.block_size();
        let root = workers.root(&standing.cache_salt, block_size);
        for plan in planned {
            let names: Arc<[BlockName]> = Prefixes::names(root, block_size, &[], &plan.prompt).into();
            // Choices of one prompt share its KV.
            let mut tokens = plan.prompt.len() as u32;
            for sampling in plan.choices {
                let sink = Sink::new(Way {
                    choice,
                    stop_ids: sampling.stop_token_ids.clone(),
                    text: model.text_stream(calls),
                    stop: StopMatcher::new(stop.clone()),
                    min_tokens: sampling.min_tokens,
                    prompt_tokens: plan.prompt.len() as u32,
                    out: out.clone(),
                    send_timeout: self.limits.send_timeout,
                    slot: slot.clone(),
                    tenant: tenant.clone(),
                    failure: Arc::clone(&failure),
                    record: Arc::clone(record),
                    rounds: Arc::clone(&self.rounds),
                });
                let request_id = record.request_id().clone();
                let prompt = Arc::clone(&plan.prompt);
                let standing = standing.clone();
                let FrontLimits { max_attempts, worker_wait, .. } = self.limits;
                let names = Arc::clone(&names);
                let slo = slo.take();
                let job = Job {
                    request_id,
                    prompt,
                    names,
                    root,
                    block_size,
                    sampling,
                    standing,
                    deadline,
                    max_attempts,
                    worker_wait,
                    patience,
                    slo,
                    targets,
                    shown: workers.traces().shows_prompts().then(|| model.beginning(&plan.prompt)),
                };
                let tokens = std::mem::replace(&mut tokens, 1);
                let Standing { priority, tenant: whose, weight, .. } = job.standing;
                let asks = Asks { class, weight, priority, prompt_tokens: tokens, alone: choices == 1 };
                let line = lines_up.then(|| gate.line_up(whose, asks));
                let driver = Driver::new(job, Arc::clone(workers), self.shutdown.clone(), sink);
                let slot = slot.clone();
                tokio::spawn(async move {
                    driver.run(line).await;
                    drop(slot);
                });
                choice += 1;
            }
            prompts.push(plan.prompt);
        }
        let open = vec![true; choice as usize];
        let (more, of) = (Vec::new().into_iter(), 0);
        Ok(Generation { served, class, prompts, n, parcels, more, of, open, only_prompt, failure, slot })
    }

    /// Where requests wait for their turn, for each model.
    fn gates(&self) -> impl Iterator<Item = &Arc<Gate>> {
        self.models.all().map(|served| &served.gate)
    }

    /// Whether somebody waits who may be turned away for a request of this class.
    fn may_make_room(&self, class: Class) -> bool {
        self.gates().any(|gate| gate.may_make_room(class))
    }

    /// Fails while every slot is taken, and nobody waits who might have to give one up.
    pub fn has_room(&self) -> Result<(), RequestError> {
        match self.slots.available_permits() {
            // Of the class nothing is known yet.
            0 if !self.may_make_room(Class::Interactive) => Err(self.full()),
            _ => Ok(()),
        }
    }

    /// Reserves a slot for every choice, or refuses the request before any work is done. None: there are none, but somebody waits whose slots
    /// the request may get: batch work for interactive requests, other tenants for a tenant.
    fn admit(&self, choices: u32, class: Class, tenant: bool) -> Result<Option<OwnedSemaphorePermit>, RequestError> {
        match Arc::clone(&self.slots).try_acquire_many_owned(choices) {
            Ok(permit) => Ok(Some(permit)),
            Err(_) if (tenant || !class.is_batch()) && self.may_make_room(class) => Ok(None),
            Err(_) => Err(self.full()),
        }
    }

    /// Slots of requests that wait, of batch work or of tenants that have more of them than this one.
    async fn make_room(&self, choices: u32, standing: &Standing) -> Result<OwnedSemaphorePermit, RequestError> {
        if !self.gates().any(|gate| gate.make_room(standing, choices)) {
            return Err(self.full());
        }
        // Those that were turned away give up their slots as soon as they have told their clients.
        match timeout(TURNED_AWAY, Arc::clone(&self.slots).acquire_many_owned(choices)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(self.full()),
        }
    }

    fn full(&self) -> RequestError {
        let full = format!("{} answers are in the making already; retry later", self.limits.max_inflight);
        RequestError::new(ErrorKind::ResourceExhausted, full).code("too_many_requests")
    }
}

impl Generation {
    /// The request's place.
    pub fn slot(&self) -> Slot {
        self.slot.clone()
    }

    /// True after the end of the last choice, or after the first failure.
    pub fn ended(&self) -> bool {
        !self.open.contains(&true)
    }

    /// The next event; None after the end of the last choice, or after the first failure.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same for who polls.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended() {
            return Poll::Ready(None);
        }
        if let Some(event) = self.rest() {
            return Poll::Ready(Some(event));
        }
        Poll::Ready(Some(match ready!(self.parcels.poll_recv(cx)) {
            Some(parcel) => self.noted(parcel),
            None => {
                self.open.clear();
                let error = self.failure.get().cloned().unwrap_or_else(broken_off);
                Event { choice: 0, kind: EventKind::Failed(error) }
            }
        }))
    }

    /// The next event, if it is there already.
    pub fn next_ready(&mut self) -> Option<Event> {
        if self.ended() {
            return None;
        }
        self.rest().or_else(|| Some(self.parcels.try_recv().ok()?).map(|parcel| self.noted(parcel)))
    }

    /// The events that are there already; not without end, however fast they come.
    pub fn all_ready(&mut self) -> impl Iterator<Item = Event> {
        std::iter::from_fn(|| self.next_ready()).take(AT_ONCE)
    }

    /// The next event of the last parcel.
    fn rest(&mut self) -> Option<Event> {
        let (piece, text) = self.more.next()?;
        Some(self.wanted(Event { choice: self.of, kind: EventKind::Token { piece, text } }))
    }

    fn wanted(&self, event: Event) -> Event {
        if self.only_prompt { event.without_answer() } else { event }
    }

    fn noted(&mut self, Parcel { event, more }: Parcel) -> Event {
        (self.more, self.of) = (more.into_iter(), event.choice);
        match event.kind {
            EventKind::Token { .. } | EventKind::Scored(_) => {}
            EventKind::Finished { .. } => self.open[event.choice as usize] = false,
            EventKind::Failed(_) => self.open.clear(),
        }
        self.wanted(event)
    }
}

/// The current time, seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
