//! The workers of the view, KV stores among them, each in a place of its own, so that placement reads many of them without a search.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use baton_latency::Backlog;
use baton_membership::{Member, Role, View};
use baton_types::{Class, WorkerId, mix};

use super::Changes;
use crate::placement::{Candidate, Links};
use crate::router::load::Load;

/// How long a worker exchanges no prefixes after one could not be moved to it, and after many.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LAST_PAUSE: Duration = Duration::from_secs(32);

/// The workers of a view, in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct Roster {
    workers: Vec<Worker>,
    /// Where each stands in `workers`.
    places: HashMap<WorkerId, usize>,
    /// Places of the workers of the model by role, prefill first.
    roles: [Vec<usize>; 2],
    /// Number of joins so far.
    joined: u64,
}

/// A worker: what placement reads of its registration, and what this router knows of it.
#[derive(Debug)]
pub(super) struct Worker {
    pub id: WorkerId,
    pub role: Role,
    /// It serves the model of this fleet.
    pub serves: bool,
    pub layout: u64,
    /// Its registration says that it drains.
    pub leaving: bool,
    /// Number of this join. It distinguishes a worker that left and came back from its earlier join.
    pub joined: u64,
    pub in_flight: Arc<AtomicU32>,
    /// Set from a failure of its connection until it answers again.
    pub lost: bool,
    /// The worker itself said that it drains. Its registration may say so later, or never (I7).
    pub draining: bool,
    pub load: Load,
    /// How fast KV leaves it, as it says.
    pub links: Links,
    /// Workers with equal ones exchange prefixes; 0: it exchanges none.
    pub exchanges: u64,
    /// Set: none could be moved to it.
    pub apart: Apart,
}

/// Prefixes that could not be moved to a worker: after each one none is moved for a while, twice as long as after the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Apart {
    until: Option<Instant>,
    pause: Duration,
}

impl Apart {
    /// One more was not moved.
    pub fn fail(&mut self, now: Instant) {
        // Those that were under way with it say nothing new.
        if self.is_over(now) {
            self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LAST_PAUSE);
            self.until = Some(now + self.pause);
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

/// Which workers are fit for a request.
pub(super) type Fit<'a> = &'a dyn Fn(&Worker) -> bool;
/// A request's model, class, and most tokens of prompts before it of its class, as far as tenants share.
pub(super) type For<'a> = (&'a str, Class, Option<u64>);

impl Worker {
    fn new(member: &Member, model: &str, joined: u64) -> Worker {
        let Member { id, role, layout, draining: leaving, exchanges, .. } = *member;
        let (serves, in_flight, load) = (member.model == model, Arc::default(), Load::default());
        let (lost, draining, links) = (false, false, Links::default());
        Worker {
            id,
            role,
            serves,
            layout,
            leaving,
            joined,
            in_flight,
            lost,
            draining,
            load,
            links,
            exchanges,
            apart: Apart::default(),
        }
    }

    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub fn drains(&self) -> bool {
        self.leaving || self.draining
    }

    /// Whether prefixes may move to it and from it: none has failed on the way lately.
    pub fn gives(&self, now: Instant) -> bool {
        self.apart.is_over(now)
    }

    /// Whether prefixes may be moved to it or from it now.
    pub fn moves(&self, now: Instant) -> bool {
        self.serves && self.exchanges != 0 && !self.lost && !self.drains() && self.gives(now)
    }

    fn candidate<'a>(&'a self, (model, class, before): For<'a>, now: Instant) -> Candidate<'a> {
        let Worker { id, role, layout, ref links, .. } = *self;
        let exchanges = if self.gives(now) { self.exchanges } else { 0 };
        let (draining, in_flight) = (self.drains(), self.in_flight());
        let load = self.load.now(in_flight, now);
        let load = if class.is_batch() { load } else { load.map(Backlog::for_interactive) };
        // What other routers let in is not known here.
        let before = before.filter(|_| self.load.routers() == 1);
        let load = load.map(|load| before.map_or(load, |before| load.for_tenant(before)));
        Candidate { id, role, model, layout, draining, in_flight, load, links, exchanges }
    }
}

impl Roster {
    /// Takes over the workers of a view, and returns which ones joined and left.
    pub fn update(&mut self, view: &View, model: &str) -> Changes {
        let mut changes = Changes::default();
        let mut before: BTreeMap<WorkerId, Worker> = self.workers.drain(..).map(|worker| (worker.id, worker)).collect();
        for member in view.members.iter().filter(|m| works(m) || m.role == Role::KvStore) {
            let new = Worker::new(member, model, self.joined + 1);
            self.workers.push(match before.remove(&member.id) {
                Some(Worker { joined, in_flight, lost, draining, load, links, apart, .. }) => {
                    Worker { joined, in_flight, lost, draining, load, links, apart, ..new }
                }
                None => {
                    self.joined += 1;
                    changes.joined.push(member.clone());
                    new
                }
            });
        }
        changes.left.extend(before.into_keys());
        self.number();
        changes
    }

    /// Removes a worker until the next view.
    pub fn remove(&mut self, worker: WorkerId) {
        self.workers.retain(|other| other.id != worker);
        self.number();
    }

    fn number(&mut self) {
        self.places = self.workers.iter().enumerate().map(|(place, worker)| (worker.id, place)).collect();
        self.roles = [Role::Prefill, Role::Decode].map(|role| {
            let is_so = |(_, worker): &(usize, &Worker)| worker.serves && worker.role == role;
            self.workers.iter().enumerate().filter(is_so).map(|(place, _)| place).collect()
        });
    }

    pub fn get(&self, worker: WorkerId) -> Option<&Worker> {
        Some(&self.workers[*self.places.get(&worker)?])
    }

    pub fn get_mut(&mut self, worker: WorkerId) -> Option<&mut Worker> {
        Some(&mut self.workers[*self.places.get(&worker)?])
    }

    /// Workers that serve the model.
    pub fn serving(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().filter(|worker| worker.serves)
    }

    /// Places of `most` random workers of each role, and of `with`, in order. `None`: there are hardly more.
    pub fn some(&self, most: usize, with: impl Iterator<Item = WorkerId>, turn: u64) -> Option<Vec<usize>> {
        if self.roles.iter().all(|role| role.len() <= most.saturating_mul(2)) {
            return None;
        }
        let mut some: Vec<usize> = with.filter_map(|id| self.places.get(&id).copied()).collect();
        for role in self.roles.iter().filter(|role| !role.is_empty()) {
            let mut at = turn;
            some.extend((0..most).map(|_| {
                // SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
                at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
                role[mix(at) as usize % role.len()]
            }));
        }
        some.sort_unstable();
        some.dedup();
        Some(some)
    }

    /// A worker, and those that could run its requests as well; `most` of them, from a random place on, where there are more than twice as many.
    /// `None`: it does not serve the model.
    pub fn equals(&self, worker: WorkerId, most: usize, turn: u64) -> Option<Vec<WorkerId>> {
        let role = &self.roles[usize::from(self.get(worker)?.role != Role::Prefill)];
        let (from, count) = match role.len() <= most.saturating_mul(2) {
            true => (0, role.len()),
            false => (mix(turn) as usize % role.len(), most),
        };
        let some = role.iter().cycle().skip(from).take(count).map(|place| &self.workers[*place]);
        let well = some.filter(|other| other.id != worker && !(other.lost || other.drains()));
        Some(well.map(|other| other.id).chain([worker]).collect())
    }

    /// Whether some worker has learned how long prompts take.
    pub fn knows_prompts(&self) -> bool {
        self.serving().any(|worker| worker.load.knows_prompts())
    }

    /// Those of these places, or of all where there are none, that serve the model and are `fit`, as placement sees them for such a request.
    pub fn candidates<'a>(
        &'a self,
        places: Option<&[usize]>,
        request: For<'a>,
        now: Instant,
        fit: Fit<'_>,
    ) -> Vec<Candidate<'a>> {
        let candidate = |worker: &'a Worker| (worker.serves && fit(worker)).then(|| worker.candidate(request, now));
        match places {
            Some(places) => places.iter().filter_map(|place| candidate(&self.workers[*place])).collect(),
            None => self.workers.iter().filter_map(candidate).collect(),
        }
    }
}

/// True for members that run requests.
pub(super) fn works(member: &Member) -> bool {
    matches!(member.role, Role::Prefill | Role::Decode)
}
