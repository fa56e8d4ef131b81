//! The workers as one router sees them: the view, what runs where, which workers are lost, and which one is next.
//!
//! The shell that drives the fleet gives it each new view of the registry, passes on what choices ask, and connects and
//! probes as the fleet says. The fleet knows no connection and nothing about requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use baton_kv_cache::BlockName;
use baton_latency::{Backlog, Calibration};
use baton_membership::{Member, Role, View};
use baton_types::{WorkerId, hash_bytes};

use super::capacity::Capacity;
use super::legs::LegEnd;
use super::outliers::{Judgement, Outliers, Subject, Verdict};
use crate::gate::GateRoom;
use crate::placement::{Chosen, Delays, Links, Placed, Placement, Terms};
use crate::prefixes::Prefixes;

mod hot;
mod keeping;
mod placing;
mod recall;
mod roster;

use hot::Hot;
use keeping::Keeping;
pub use keeping::{Keep, KeepSizes};
pub use placing::{Ask, Known};
pub use recall::Recall;
use roster::{Apart, Roster, Worker, works};

/// How often a lost worker is asked whether it is back.
pub const PROBE_EVERY: Duration = Duration::from_millis(250);
/// Least number of prefix names whose place is remembered, and half the most (I5). This covers a million tokens.
const PREFIXES: usize = 1 << 16;
/// For so long after an answer its worker counts as one that has its KV, though it does not say so: what it says is on its way. Then what it says
/// counts.
const SAYS: Duration = Duration::from_secs(1);
/// Tokens of an answer, before one was given.
const FIRST_ANSWER: f64 = 200.0;
/// How fast the expected length of an answer follows.
const ANSWER_FOLLOWS: f64 = 0.02;
/// Workers beside which one is judged, where there are more than twice as many.
const EQUALS: usize = 64;
/// Tokens of a block, unless a worker is set otherwise.
const USUAL_BLOCK: u32 = 16;

/// What predictions leave out, learned from what came of them.
#[derive(Clone, Debug)]
struct Calibrations {
    first_token: Calibration,
    token: Calibration,
    expected: Calibration,
}

impl Default for Calibrations {
    fn default() -> Self {
        let (first_token, token) = (Calibration::default(), Calibration::default());
        Calibrations { first_token, token, expected: Calibration::either_way() }
    }
}

impl Calibrations {
    fn delays(&self) -> Delays {
        let Calibrations { first_token, token, expected } = self;
        Delays { first_token: first_token.delay(), token: token.delay(), expected: expected.delay() }
    }
}

/// Every worker in the view.
pub struct Fleet {
    model: String,
    view: Arc<View>,
    roster: Roster,
    placement: Box<dyn Placement>,
    prefixes: Prefixes,
    outliers: Outliers,
    /// Expected tokens of an answer: a moving mean.
    answer: f64,
    calibrations: Calibrations,
    block_size: u32,
    /// Number of placements so far.
    placements: u64,
    /// Where a prompt has to wait for so long, decode blocks are reserved late; `None`: never.
    late: Option<Duration>,
    /// A number of this router's own: where others place their requests at the same time, it takes other ones of equal workers.
    seed: u64,
    /// What KV stores keep.
    keeping: Keeping,
    /// What idle workers take ahead of need.
    hot: Hot,
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
    /// A fleet without workers. All requests are for this model. `seed`: a random number, another one for each router.
    pub fn new(model: &str, placement: Box<dyn Placement>, seed: u64) -> Fleet {
        Fleet {
            model: model.to_owned(),
            view: Arc::default(),
            roster: Roster::default(),
            placement,
            prefixes: Prefixes::new(PREFIXES),
            outliers: Outliers::default(),
            answer: FIRST_ANSWER,
            calibrations: Default::default(),
            block_size: USUAL_BLOCK,
            placements: 0,
            late: None,
            seed,
            keeping: Keeping::new(1),
            hot: Hot::new(1, 0),
        }
    }

    /// From now on decode blocks are reserved only when a prompt's turn is near, where it has to wait for so long at its prefill worker, as far
    /// as that is predicted. So a queue of prompts holds no decode blocks.
    pub fn reserve_late(&mut self, from: Option<Duration>) {
        self.late = from;
    }

    /// Takes over a new view and returns what changed.
    pub fn update(&mut self, view: Arc<View>) -> Changes {
        let changes = self.roster.update(&view, &self.model);
        for id in &changes.left {
            self.outliers.forget(*id);
            self.hot.leave(*id);
        }
        self.view = view;
        self.block_size = self.usual_block_size();
        changes
    }

    /// Removes a worker to which no connection is possible. It is not chosen, and joins again with the next view.
    pub fn unusable(&mut self, worker: WorkerId) {
        self.roster.remove(worker);
    }

    /// A request that was placed with these predictions had its first token after `first` seconds, and then one each `token` seconds, if it had
    /// enough. Times of requests that a worker failed say nothing.
    pub fn measured(&mut self, predicted: &Terms, first: Option<f64>, token: Option<f64>) {
        let Calibrations { first_token, token: tokens, expected } = &mut self.calibrations;
        let Terms { room, queue, compute, step, later, .. } = *predicted;
        match first {
            Some(first) if room + queue <= compute => first_token.add(compute + queue + room, first),
            Some(first) => first_token.compare(predicted.first_token, first),
            None => {}
        }
        if let Some(token) = token {
            tokens.add(step, token);
            expected.add(later, token);
        }
    }

    /// Median relative errors lately of the predicted times to the first token, and from token to token.
    pub fn errors(&self) -> (Option<f64>, Option<f64>) {
        (self.calibrations.first_token.error(), self.calibrations.expected.error())
    }

    /// A prefix could not be moved to this worker, though both were asked and said yes: their network does not let it through, or is too slow. For a
    /// while none is moved to or from it: seconds at first, since what connects them may just have been slow to begin.
    pub fn not_fetched(&mut self, to: WorkerId, now: Instant) {
        if let Some(worker) = self.roster.get_mut(to) {
            worker.apart.fail(now);
        }
    }

    /// A prefix was moved to this worker.
    pub fn fetched(&mut self, to: WorkerId) {
        if let Some(worker) = self.roster.get_mut(to) {
            worker.apart = Apart::default();
        }
    }

    /// A worker that was to give or to take a prefix was silent, or is gone. A KV store serves no requests that would notice: for a while nothing is
    /// asked of it.
    pub fn silent(&mut self, worker: WorkerId, now: Instant) {
        if self.roster.get(worker).is_some_and(|worker| worker.role == Role::KvStore) {
            self.not_fetched(worker, now);
        }
    }

    /// A worker says how fast KV leaves it for others.
    pub fn linked(&mut self, worker: WorkerId, links: Links) {
        if let Some(worker) = self.roster.get_mut(worker) {
            worker.links = links;
        }
    }

    /// Nothing is heard of a worker any more: what it said is of no use, and no prefix is asked of it.
    pub fn untold(&mut self, worker: WorkerId) {
        if let Some(worker) = self.roster.get_mut(worker) {
            (worker.load, worker.links) = Default::default();
        }
    }

    /// A worker says what it had to do at that time, and how many routers hear it.
    pub fn told(&mut self, worker: WorkerId, backlog: Backlog, routers: u32, at: Instant) {
        if let Some(worker) = self.roster.get_mut(worker) {
            worker.load.told(backlog, routers, at);
        }
    }

    /// Takes in how a request fared on a worker, or between two. Those that do worse than others are ejected for a while.
    pub fn judge(&mut self, verdict: Verdict, now: Instant) -> Option<Judgement> {
        let equals = match verdict.on {
            Subject::Pair { prefill, decode } => {
                // A record of workers that have left would stay for ever.
                let here = [prefill, decode].iter().all(|id| self.roster.get(*id).is_some());
                here.then(Vec::new)?
            }
            Subject::Worker(id) => self.roster.equals(id, EQUALS, self.seed.wrapping_add(self.placements))?,
        };
        self.outliers.judge(verdict, &equals, now)
    }

    /// Records that these workers have the KV of the prefixes with these names, after an answer of so many tokens.
    pub fn note(&mut self, placed: Placed, names: &[BlockName], answer: u32, now: Instant) {
        self.prefixes.note(names, placed, now + SAYS);
        self.answer += (f64::from(answer) - self.answer) * ANSWER_FOLLOWS;
    }

    /// The stream to a worker is opened for the request with this placement.
    pub fn opened(&mut self, worker: WorkerId, number: u64, now: Instant) {
        if let Some(worker) = self.roster.get_mut(worker) {
            worker.load.opened(number, now);
        }
    }

    /// The request with this placement has begun to answer, or has ended: its workers know of it, or will never.
    pub fn begun(&mut self, chosen: &Chosen) {
        for id in [Some(chosen.placed.decode), chosen.placed.prefill].into_iter().flatten() {
            if let Some(worker) = self.roster.get_mut(id) {
                worker.load.begun(chosen.number);
            }
        }
    }

    /// Counts a request on this worker until its lease is dropped.
    ///
    /// # Errors
    /// [`LegEnd::Left`]: the worker is no longer in the view.
    pub fn lease(&self, worker: WorkerId) -> Result<WorkerLease, LegEnd> {
        let used = self.roster.get(worker).ok_or(LegEnd::Left { worker })?;
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
        let none = !self.roster.serving().any(|worker| worker.role == Role::Decode && !worker.drains());
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
        let joined = |m: &&Member| self.roster.get(m.id).map_or(u64::MAX, |worker| worker.joined);
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
            let worker = self.roster.get(member.id);
            let (lost, in_flight) = worker.map_or((false, 0), |worker| (worker.lost, worker.in_flight()));
            let ejected = self.outliers.is_ejected(Subject::Worker(member.id));
            WorkerState { member, lost, ejected, in_flight }
        })
    }

    /// What each worker has to do, as it said last and as was sent to it since; of those that said something.
    pub fn backlogs(&self, now: Instant) -> impl Iterator<Item = (WorkerId, Backlog)> {
        self.roster.serving().filter_map(move |worker| Some((worker.id, worker.load.now(worker.in_flight(), now)?)))
    }

    /// The worker, unless it has left since this join.
    fn of(&mut self, worker: WorkerId, joined: u64) -> Option<&mut Worker> {
        self.roster.get_mut(worker).filter(|worker| worker.joined == joined)
    }
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Fleet { model, view, roster, .. } = self;
        f.debug_struct("Fleet").field("model", model).field("view", view).field("roster", roster).finish()
    }
}
