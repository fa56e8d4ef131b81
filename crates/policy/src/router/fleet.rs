//! The workers as one router sees them: the view, what runs where, which workers are lost, and which one is next.
//!
//! The shell that drives the fleet gives it each new view of the registry, passes on what choices ask, and connects and
//! probes as the fleet says. The fleet knows no connection and nothing about requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use baton_kv_cache::BlockName;
use baton_latency::{Backlog, Calibration, StepWork};
use baton_membership::{Member, Role, View};
use baton_types::{BatonError, Class, WorkerId, hash_bytes};

use super::capacity::Capacity;
use super::legs::LegEnd;
use super::load::Load;
use super::outliers::{Judgement, Outliers, Subject, Verdict};
use crate::gate::GateRoom;
use crate::kv_index::Holder;
use crate::placement::{Candidate, Chosen, Held, Placed, Placement, PlacementError, PlacementInput, Slo, Terms};
use crate::prefixes::Prefixes;
use crate::request::Failure;

/// How often a lost worker is asked whether it is back.
pub const PROBE_EVERY: Duration = Duration::from_millis(250);
/// Least number of prefix names whose place is remembered, and half the most (I5). This covers a million tokens.
const PREFIXES: usize = 1 << 16;
/// Tokens of an answer, before one was given.
const FIRST_ANSWER: f64 = 200.0;
/// How fast the expected length of an answer follows.
const ANSWER_FOLLOWS: f64 = 0.02;
/// Tokens of a block, unless a worker is set otherwise.
const USUAL_BLOCK: u32 = 16;

/// Every worker in the view.
pub struct Fleet {
    model: String,
    view: Arc<View>,
    workers: BTreeMap<WorkerId, Worker>,
    placement: Box<dyn Placement>,
    prefixes: Prefixes,
    outliers: Outliers,
    /// Expected tokens of an answer: a moving mean.
    answer: f64,
    /// What predictions of the first token, and of the time from token to token, leave out.
    calibrations: (Calibration, Calibration),
    /// Workers of the model by role, prefill first, in the order of their ids.
    roles: [Vec<WorkerId>; 2],
    block_size: u32,
    /// Number of joins so far.
    joined: u64,
    /// Number of placements so far.
    placements: u64,
}

#[derive(Debug)]
struct Worker {
    /// Number of this join. It distinguishes a worker that left and came back from its earlier join.
    joined: u64,
    in_flight: Arc<AtomicU32>,
    /// Set from a failure of its connection until it answers again.
    lost: bool,
    /// The worker itself said that it drains. Its registration may say so later, or never (I7).
    draining: bool,
    load: Load,
}

/// The request to place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// False: the decode worker prefills, even if prefill workers are alive.
    pub split: bool,
    /// Keep this decode worker; only a prefill worker is wanted.
    pub decode: Option<WorkerId>,
    /// Workers that failed this request.
    pub avoid: Vec<WorkerId>,
    /// Names of the prompt's blocks ([`Prefixes::names`]).
    pub names: Arc<[BlockName]>,
    /// Tokens of the prompt, and of the answer so far.
    pub tokens: u32,
    /// Most tokens that the answer may still have.
    pub most: u32,
    /// When its tokens have to come.
    pub slo: Slo,
    /// Batch requests wait for all that a worker has to do, interactive ones for other interactive ones alone.
    pub class: Class,
}

/// The workers that joined and left with a view.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// Connect to these workers. Call [`Fleet::unusable`] for a worker to which no connection is possible.
    pub joined: Vec<Member>,
    /// Let go of the connections to these workers. Requests that run on them keep their connections: only the connection itself
    /// tells that a worker is lost (I7).
    pub left: Vec<WorkerId>,
}

/// One request's use of one worker, until it is dropped.
#[derive(Debug)]
pub struct WorkerLease {
    worker: WorkerId,
    joined: u64,
    in_flight: Arc<AtomicU32>,
}

/// An order to ask a lost worker whether it is back.
#[derive(PartialEq, Eq, Debug)]
pub struct Probe {
    worker: WorkerId,
    joined: u64,
    at: Instant,
}

/// A member of the view, for display.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerState<'a> {
    /// The member.
    pub member: &'a Member,
    /// Its connection failed, and it has not answered since.
    pub lost: bool,
    /// It does worse than others, and gets no requests but those that try it.
    pub ejected: bool,
    /// Requests this router has running on it.
    pub in_flight: u32,
}

impl Worker {
    fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }
}

impl WorkerLease {
    /// The worker in use.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }
}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Probe {
    /// The worker to ask.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// When to ask.
    pub fn at(&self) -> Instant {
        self.at
    }
}

impl Fleet {
    /// A fleet without workers. All requests are for this model.
    pub fn new(model: &str, placement: Box<dyn Placement>) -> Fleet {
        let (view, workers) = (Arc::default(), BTreeMap::new());
        let (prefixes, outliers) = (Prefixes::new(PREFIXES), Outliers::default());
        let (model, answer, roles) = (model.to_owned(), FIRST_ANSWER, Default::default());
        let (block_size, joined, placements, calibrations) = (USUAL_BLOCK, 0, 0, Default::default());
        Fleet {
            model,
            view,
            workers,
            placement,
            prefixes,
            outliers,
            answer,
            calibrations,
            roles,
            block_size,
            joined,
            placements,
        }
    }

    /// Takes over a new view and returns what changed.
    pub fn update(&mut self, view: Arc<View>) -> Changes {
        let mut changes = Changes::default();
        self.workers.retain(|id, _| {
            let stays = view.get(*id).is_some();
            if !stays {
                changes.left.push(*id);
            }
            stays
        });
        for member in view.members.iter().filter(|m| works(m)) {
            if !self.workers.contains_key(&member.id) {
                self.joined += 1;
                let (joined, in_flight, load) = (self.joined, Arc::default(), Load::default());
                self.workers.insert(member.id, Worker { joined, in_flight, lost: false, draining: false, load });
                changes.joined.push(member.clone());
            }
        }
        changes.left.iter().for_each(|id| self.outliers.forget(*id));
        self.roles = [Role::Prefill, Role::Decode].map(|role| {
            let serves = |m: &&Member| m.role == role && m.model == self.model;
            view.members.iter().filter(serves).map(|m| m.id).collect()
        });
        self.view = view;
        self.block_size = self.usual_block_size();
        changes
    }

    /// Removes a worker to which no connection is possible. It is not chosen, and joins again with the next view.
    pub fn unusable(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// Chooses workers for a request of the model. Lost workers, and those that do worse than others ([`Fleet::judge`]), are chosen only
    /// when placement fails without them; lost ones last. A decode worker that the request already has is kept in any case.
    ///
    /// # Errors
    /// Why no worker can take the request.
    pub fn place(&mut self, ask: &Ask, held: &[Holder], now: Instant) -> Result<Chosen, Failure> {
        self.placements = self.placements.wrapping_add(1);
        let block_size = self.block_size();
        let some = self.some(held, ask);
        let delays = (self.calibrations.0.delay(), self.calibrations.1.delay());
        let Fleet { model, view, workers, placement, prefixes, outliers, .. } = self;
        let (sent, apart) = (prefixes.find(&ask.names, now), &outliers.apart(now));
        let held = Held { blocks: ask.names.len(), by: held };
        let answer = (self.answer as u32).min(ask.most);
        let Ask { split, decode, tokens, mut slo, class, .. } = *ask;
        // As long as nobody knows how long a prompt takes, nobody misses a deadline for it.
        slo.deadline = slo.deadline.filter(|_| workers.values().any(|worker| worker.load.knows_prompts()));
        let avoid = &ask.avoid;
        let input =
            PlacementInput { model, split, decode, avoid, tokens, answer, block_size, slo, delays, sent, held, apart };
        let there = |id, worker: &Worker| !worker.lost || decode == Some(id);
        let well = |id, worker: &Worker| {
            there(id, worker) && (outliers.allows(Subject::Worker(id), now) || decode == Some(id))
        };
        let some: Option<Vec<&Member>> = some.map(|some| some.iter().filter_map(|id| view.get(*id)).collect());
        // Those that are looked at may all be unfit: then all are.
        let tries: [(Option<&[&Member]>, Which<'_>); 4] =
            [(some.as_deref(), &well), (None, &well), (None, &there), (None, &|_, _| true)];
        let mut chosen = Err(PlacementError::NoDecodeWorker { model: model.clone(), draining: 0 });
        for (members, which) in tries {
            let found = match members {
                Some(members) => candidates(members.iter().copied(), workers, class, now, which),
                None => candidates(view.members.iter(), workers, class, now, which),
            };
            chosen = placement.place(&found, &input);
            match chosen {
                Ok(_) => break,
                // Workers that are lost, or do worse than others, are no faster. But those that were looked at may not be the fastest.
                Err(PlacementError::Late(_)) if members.is_none() => break,
                Err(_) => {}
            }
        }
        let mut chosen = chosen.map_err(|error| Failure {
            late: matches!(error, PlacementError::Late(_)),
            retry_after: error.retry_after(),
            ..Failure::new(error.kind(), error.to_string())
        })?;
        chosen.number = self.placements;
        let Placed { decode, prefill } = chosen.placed;
        outliers.placed(Subject::Worker(decode), now);
        if let Some(prefill) = prefill {
            outliers.placed(Subject::Worker(prefill), now);
            outliers.placed(Subject::Pair { prefill, decode }, now);
        }
        let cached = [Some(decode), prefill].map(|worker| worker.map_or(0, |worker| input.cached(worker)));
        prefixes.note(&ask.names, chosen.placed, now);
        self.count(ask, chosen.placed, cached, answer, now);
        Ok(chosen)
    }

    /// Workers that are worth a look, where there are more than placement needs.
    fn some(&self, held: &[Holder], ask: &Ask) -> Option<BTreeSet<WorkerId>> {
        let most = self.placement.looks_at();
        if self.roles.iter().all(|role| role.len() <= most.saturating_mul(2)) {
            return None;
        }
        let mut some: BTreeSet<WorkerId> = held.iter().map(|holder| holder.worker).chain(ask.decode).collect();
        for role in self.roles.iter().filter(|role| !role.is_empty()) {
            let mut at = self.placements;
            for _ in 0..most {
                // SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
                at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (at ^ at >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                some.insert(role[(mixed ^ mixed >> 27) as usize % role.len()]);
            }
        }
        Some(some)
    }

    /// Counts a request that was placed in the loads of its workers. `cached`: tokens that its decode and its prefill worker need not compute.
    fn count(&mut self, ask: &Ask, placed: Placed, cached: [u32; 2], answer: u32, now: Instant) {
        let (size, number) = (self.block_size().max(1), self.placements);
        let prompt = |cached: u32| StepWork::default().with_prompt(cached.min(ask.tokens).into(), ask.tokens.into());
        let [at_decode, at_prefill] = cached;
        if let Some(worker) = placed.prefill.and_then(|id| self.workers.get_mut(&id)) {
            worker.load.sent(number, prompt(at_prefill), 0, ask.class, now);
        }
        if let Some(worker) = self.workers.get_mut(&placed.decode).filter(|_| ask.decode.is_none()) {
            let own = if placed.prefill.is_none() { prompt(at_decode) } else { StepWork::default() };
            let blocks = (ask.tokens - at_decode.min(ask.tokens)).saturating_add(answer).div_ceil(size);
            worker.load.sent(number, own.with_row(ask.tokens.into()), blocks, ask.class, now);
        }
    }

    /// A request that was placed with these predictions had its first token after `first` seconds, and then one each `token` seconds, if it had
    /// enough. Times of requests that a worker failed say nothing.
    pub fn measured(&mut self, predicted: &Terms, first: Option<f64>, token: Option<f64>) {
        let (firsts, tokens) = &mut self.calibrations;
        let Terms { room, queue, compute, step, .. } = *predicted;
        match first {
            Some(first) if room + queue <= compute => firsts.add(compute + queue + room, first),
            Some(first) => firsts.compare(predicted.first_token, first),
            None => {}
        }
        if let Some(token) = token {
            tokens.add(step, token);
        }
    }

    /// Median relative errors lately of the predicted times to the first token, and from token to token.
    pub fn errors(&self) -> (Option<f64>, Option<f64>) {
        (self.calibrations.0.error(), self.calibrations.1.error())
    }

    /// Nothing is heard of a worker any more: what it said is of no use.
    pub fn untold(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.load = Load::default();
        }
    }

    /// A worker says what it had to do at that time, and how many routers hear it.
    pub fn told(&mut self, worker: WorkerId, backlog: Backlog, routers: u32, at: Instant) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.load.told(backlog, routers, at);
        }
    }

    /// Takes in how a request fared on a worker, or between two. Those that do worse than others are ejected for a while.
    pub fn judge(&mut self, verdict: Verdict, now: Instant) -> Option<Judgement> {
        let equals = match verdict.on {
            Subject::Pair { prefill, decode } => {
                // A record of workers that have left would stay for ever.
                let here = self.workers.contains_key(&prefill) && self.workers.contains_key(&decode);
                here.then(Vec::new)?
            }
            Subject::Worker(id) => {
                let Member { role, model, .. } = self.view.get(id).filter(|_| self.workers.contains_key(&id))?;
                let serves =
                    |m: &Member| self.workers.get(&m.id).is_some_and(|w| !w.lost && !w.draining) && !m.draining;
                let equal = |m: &&Member| m.role == *role && m.model == *model && (m.id == id || serves(m));
                self.view.members.iter().filter(equal).map(|m| m.id).collect()
            }
        };
        self.outliers.judge(verdict, &equals, now)
    }

    /// Records that these workers have the KV of the prefixes with these names, after an answer of so many tokens.
    pub fn note(&mut self, placed: Placed, names: &[BlockName], answer: u32, now: Instant) {
        self.prefixes.note(names, placed, now);
        self.answer += (f64::from(answer) - self.answer) * ANSWER_FOLLOWS;
    }

    /// The stream to a worker is opened for the request with this placement.
    pub fn opened(&mut self, worker: WorkerId, number: u64, now: Instant) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.load.opened(number, now);
        }
    }

    /// The request with this placement has begun to answer, or has ended: its workers know of it, or will never.
    pub fn begun(&mut self, chosen: &Chosen) {
        for id in [Some(chosen.placed.decode), chosen.placed.prefill].into_iter().flatten() {
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.load.begun(chosen.number);
            }
        }
    }

    /// Counts a request on this worker until its lease is dropped.
    ///
    /// # Errors
    /// [`LegEnd::Left`]: the worker is no longer in the view.
    pub fn lease(&self, worker: WorkerId) -> Result<WorkerLease, LegEnd> {
        let used = self.workers.get(&worker).ok_or(LegEnd::Left { worker })?;
        used.in_flight.fetch_add(1, Ordering::Relaxed);
        Ok(WorkerLease { worker, joined: used.joined, in_flight: Arc::clone(&used.in_flight) })
    }

    /// Records how a call to a worker ended. A worker that drains is not chosen again.
    ///
    /// When the connection itself failed, the worker is marked as lost, so other requests need not find out for themselves. The
    /// view may go on naming a dead worker for as long as its registration lasts, or longer (I7). The returned probe says when
    /// to ask the worker whether it is back. There is one probe for all requests that lost it.
    pub fn ended(&mut self, lease: &WorkerLease, end: &LegEnd, now: Instant) -> Option<Probe> {
        let (worker, joined) = (lease.worker, lease.joined);
        let used = self.of(worker, joined)?;
        used.draining |= matches!(end, LegEnd::Draining { .. });
        if !matches!(end, LegEnd::Lost { .. }) || std::mem::replace(&mut used.lost, true) {
            return None;
        }
        Some(Probe { worker, joined, at: now + PROBE_EVERY })
    }

    /// Records the result of a probe. `answered`: the worker responded in any way. Returns the next probe if the worker is still
    /// lost.
    pub fn probed(&mut self, probe: Probe, answered: bool, now: Instant) -> Option<Probe> {
        let worker = self.of(probe.worker, probe.joined)?;
        worker.lost = !answered;
        if answered {
            return None;
        }
        Some(Probe { at: now + PROBE_EVERY, ..probe })
    }

    /// Why no request can be served now; None when one can.
    pub fn not_ready(&self) -> Option<String> {
        let usable = |m: &Member| {
            let takes = self.workers.get(&m.id).is_some_and(|worker| !worker.draining) && !m.draining;
            m.role == Role::Decode && m.model == self.model && takes
        };
        let none = !self.view.members.iter().any(usable);
        none.then(|| format!("no decode worker for model {:?} yet", self.model))
    }

    /// The capacity of the workers in the view. A worker may be configured with a shorter context than its model has.
    pub fn capacity(&self) -> Capacity {
        Capacity::together(self.view.members.iter().filter(|m| works(m) && m.model == self.model))
    }

    /// The room that the workers in the view have for requests of several tenants; `window`: prompt tokens for each worker that computes
    /// prompts.
    pub fn gate_room(&self, window: u32) -> GateRoom {
        GateRoom::together(self.view.members.iter().filter(|m| works(m) && m.model == self.model), window)
    }

    /// Fingerprint of the weights and KV layouts of the decode workers that take requests. It stays equal as long as these do.
    /// While workers are replaced there may be several layouts; the fingerprint then covers all of them.
    pub fn fingerprint(&self) -> u64 {
        let serves = |m: &&Member| m.role == Role::Decode && m.model == self.model && !m.draining;
        let layouts: BTreeSet<u64> = self.view.members.iter().filter(serves).map(|m| m.layout).collect();
        layouts.into_iter().reduce(|all, layout| hash_bytes(all, &layout.to_le_bytes())).unwrap_or(0)
    }

    /// Tokens of a block of the decode workers that take requests: names of a prompt's blocks are the workers' own only at this size. Where
    /// several are in use, that of the longest there; 16 where there are none.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    fn usual_block_size(&self) -> u32 {
        let serves = |m: &&Member| m.role == Role::Decode && m.model == self.model && !m.draining && m.block_size > 0;
        let joined = |m: &&Member| self.workers.get(&m.id).map_or(u64::MAX, |worker| worker.joined);
        let first = self.view.members.iter().filter(serves).min_by_key(joined);
        first.map_or(USUAL_BLOCK, |member| member.block_size)
    }

    /// The model whose requests are placed.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The latest view.
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// All members of the view, including those that are not workers.
    pub fn members(&self) -> impl Iterator<Item = WorkerState<'_>> {
        self.view.members.iter().map(|member| {
            let worker = self.workers.get(&member.id);
            let (lost, in_flight) = worker.map_or((false, 0), |worker| (worker.lost, worker.in_flight()));
            let ejected = self.outliers.is_ejected(Subject::Worker(member.id));
            WorkerState { member, lost, ejected, in_flight }
        })
    }

    /// The worker, unless it has left since this join.
    fn of(&mut self, worker: WorkerId, joined: u64) -> Option<&mut Worker> {
        self.workers.get_mut(&worker).filter(|worker| worker.joined == joined)
    }
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Fleet { model, view, workers, .. } = self;
        f.debug_struct("Fleet").field("model", model).field("view", view).field("workers", workers).finish()
    }
}

/// Which workers are candidates.
type Which<'a> = &'a dyn Fn(WorkerId, &Worker) -> bool;

/// True for members that run requests.
fn works(member: &Member) -> bool {
    matches!(member.role, Role::Prefill | Role::Decode)
}

fn candidates<'a>(
    members: impl Iterator<Item = &'a Member>,
    workers: &BTreeMap<WorkerId, Worker>,
    class: Class,
    now: Instant,
    which: impl Fn(WorkerId, &Worker) -> bool,
) -> Vec<Candidate<'a>> {
    let candidate = |m: &'a Member| {
        let worker = workers.get(&m.id).filter(|worker| which(m.id, worker))?;
        let (draining, in_flight, load) =
            (m.draining || worker.draining, worker.in_flight(), worker.load.now(worker.in_flight(), now));
        let load = if class.is_batch() { load } else { load.map(Backlog::for_interactive) };
        Some(Candidate { id: m.id, role: m.role, model: &m.model, layout: m.layout, draining, in_flight, load })
    };
    members.filter(|m| works(m)).filter_map(candidate).collect()
}
