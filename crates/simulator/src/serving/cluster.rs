//! The cluster: routers, workers, and what happens when.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::{Event, Start};
use baton_membership::{Member, Role, View};
use baton_policy::{
    Ask, BlockName, Chosen, Fleet, Followed, KvChange, KvIndex, LeastLoaded, Placed, Placement, Predicted, Prefixes,
    RoundRobin, WorkerLease,
};
use baton_types::{SeqId, TokenOut, WorkerId};

use super::early::PresentLoad;
use super::outcome::{Outcome, Served};
use super::worker::Worker;
use super::{Policy, Prompt, Setup};

/// Tokens of a block.
pub(super) const BLOCK: u32 = 16;
/// How long a message is on the way, in nanoseconds.
const WIRE: u64 = 300_000;
/// How often workers tell what has changed, in nanoseconds.
const NEWS: u64 = 50_000_000;
/// How long the last blocks of a handoff take after the last step of its prompt, in nanoseconds.
const TAIL: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

enum Happens {
    Arrives(usize),
    /// At a decode worker.
    Opens(usize),
    /// At a prefill worker.
    Prefills(usize),
    Stepped(usize),
    Transferred(usize),
    Tells,
    Counted,
}

/// A request on its way.
#[derive(Default)]
struct Flight {
    router: usize,
    placed: Option<Placed>,
    chosen: Option<Chosen>,
    leases: Vec<WorkerLease>,
    /// At the prefill and at the decode worker.
    seqs: [Option<SeqId>; 2],
    names: Arc<[BlockName]>,
    began: u64,
    first: u64,
    last: u64,
    /// When its prompt began to be computed.
    tokens: u32,
    served: Served,
    /// The token that the prefill worker sampled.
    sampled: Option<TokenOut>,
}

struct Router {
    fleet: Fleet,
    index: KvIndex,
}

pub(super) struct Cluster<'a> {
    setup: &'a Setup,
    prompts: &'a [Prompt],
    begin: Instant,
    now: u64,
    planned: BTreeMap<(u64, u64), Happens>,
    numbers: u64,
    routers: Vec<Router>,
    /// Prefill workers, then decode workers.
    workers: Vec<Worker>,
    flights: BTreeMap<usize, Flight>,
    arrived: usize,
    outcome: Outcome,
}

impl<'a> Cluster<'a> {
    pub fn new(setup: &'a Setup, prompts: &'a [Prompt]) -> Cluster<'a> {
        let count = setup.prefills + setup.decodes;
        let id = |at: usize| WorkerId(1000 + at as u64);
        let workers = (0..count).map(|at| Worker::new(id(at), at >= setup.prefills, &setup.hardware)).collect();
        let member = |at: usize| Member {
            id: id(at),
            role: if at < setup.prefills { Role::Prefill } else { Role::Decode },
            grpc: "http://127.0.0.1:1".into(),
            admin: "http://127.0.0.1:2".into(),
            model: "m".into(),
            layout: 1,
            blocks: setup.hardware.blocks,
            block_size: BLOCK,
            window_tokens: 0,
            max_running: 512,
            context_tokens: 1 << 20,
            draining: false,
            late_targets: true,
            exchanges: 0,
            kv_secret: 0,
        };
        let view = Arc::new(View { members: (0..count).map(member).collect(), ..View::default() });
        let router = |number: usize| {
            let placement: Box<dyn Placement> = match setup.policy {
                Policy::RoundRobin => Box::<RoundRobin>::default(),
                Policy::LeastLoaded | Policy::Affinity | Policy::Held => Box::<LeastLoaded>::default(),
                Policy::Predicted => Box::new(Predicted::new(setup.local)),
                Policy::PresentLoad => Box::new(PresentLoad(Predicted::new(setup.local))),
            };
            let mut fleet = Fleet::new("m", placement, (number as u64) << 32);
            fleet.update(Arc::clone(&view));
            Router { fleet, index: KvIndex::new(10_000_000) }
        };
        let routers = (0..setup.routers.max(1)).map(router).collect();
        // Only differences of instants matter.
        #[allow(clippy::disallowed_methods)]
        let begin = Instant::now();
        let mut cluster = Cluster {
            setup,
            prompts,
            begin,
            now: 0,
            planned: BTreeMap::new(),
            numbers: 0,
            routers,
            workers,
            flights: BTreeMap::new(),
            arrived: 0,
            outcome: Outcome::default(),
        };
        for (at, prompt) in prompts.iter().enumerate() {
            cluster.plan(prompt.at * 1000, Happens::Arrives(at));
        }
        cluster.plan(0, Happens::Tells);
        cluster.plan(SECOND, Happens::Counted);
        cluster
    }

    pub fn play(mut self) -> Outcome {
        while let Some(((at, _), happens)) = self.planned.pop_first() {
            self.now = at;
            match happens {
                Happens::Arrives(request) => self.arrives(request),
                Happens::Opens(request) => self.opens(request),
                Happens::Prefills(request) => self.prefills(request),
                Happens::Transferred(request) => self.transferred(request),
                Happens::Stepped(worker) => {
                    self.workers[worker].end();
                    self.heard(worker);
                    self.go_on(worker);
                }
                Happens::Tells => self.tells(),
                Happens::Counted => self.counted(),
            }
        }
        self.outcome.seconds = self.prompts.last().map_or(0.0, |prompt| prompt.at as f64 / 1e6);
        self.outcome
    }

    fn plan(&mut self, at: u64, happens: Happens) {
        self.numbers += 1;
        self.planned.insert((at, self.numbers), happens);
    }

    fn clock(&self) -> Instant {
        self.begin + Duration::from_nanos(self.now)
    }

    fn over(&self) -> bool {
        self.arrived == self.prompts.len() && self.flights.is_empty()
    }

    fn arrives(&mut self, request: usize) {
        self.arrived += 1;
        let (prompt, clock) = (&self.prompts[request], self.clock());
        let knows = !matches!(self.setup.policy, Policy::RoundRobin | Policy::LeastLoaded);
        let names: Arc<[BlockName]> = if knows {
            Prefixes::names(BlockName::root("", BLOCK), BLOCK, &[], &prompt.tokens()).into()
        } else {
            Vec::new().into()
        };
        let at = request % self.routers.len();
        let router = &mut self.routers[at];
        let held = match self.setup.policy {
            Policy::Held | Policy::Predicted | Policy::PresentLoad => router.index.find(&names, 64, request),
            _ => Vec::new(),
        };
        let ask = Ask {
            split: true,
            handed_over: false,
            before: None,
            decode: None,
            avoid: Vec::new(),
            names: Arc::clone(&names),
            tokens: prompt.input,
            most: 1 << 14,
            slo: self.setup.slo,
            class: Default::default(),
        };
        let Ok(chosen) = router.fleet.place(&ask, held.as_slice(), clock) else {
            self.outcome.rejected += 1;
            return;
        };
        let predicted = chosen.why.map(|why| (why.terms.first_token, why.terms.token));
        let served = Served { input: prompt.input, predicted, ..Served::default() };
        let placed = chosen.placed;
        let leases = vec![router.fleet.lease(placed.decode)].into_iter().flatten().collect();
        router.fleet.opened(placed.decode, chosen.number, clock);
        let flight = Flight {
            router: at,
            placed: Some(placed),
            chosen: Some(chosen),
            leases,
            names,
            began: self.now,
            served,
            ..Flight::default()
        };
        self.flights.insert(request, flight);
        self.plan(self.now + WIRE, Happens::Opens(request));
    }

    fn opens(&mut self, request: usize) {
        let prompt = &self.prompts[request];
        let Some(placed) = self.flights.get(&request).and_then(|flight| flight.placed) else { return };
        let start = if placed.prefill.is_some() { Start::Receive } else { Start::Compute };
        let worker = place_of(placed.decode);
        let seq = self.workers[worker].submit(request, prompt.tokens(), prompt.output, start);
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.seqs[1] = Some(seq);
        }
        self.go_on(worker);
    }

    fn prefills(&mut self, request: usize) {
        let (prompt, clock) = (&self.prompts[request], self.clock());
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(prefill) = flight.placed.and_then(|placed| placed.prefill) else { return };
        let fleet = &mut self.routers[flight.router].fleet;
        flight.leases.extend(fleet.lease(prefill));
        flight.chosen.iter().for_each(|chosen| fleet.opened(prefill, chosen.number, clock));
        let worker = place_of(prefill);
        let seq = self.workers[worker].submit(request, prompt.tokens(), prompt.output, Start::ComputeAndHold);
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.seqs[0] = Some(seq);
        }
        self.go_on(worker);
    }

    /// Has a worker begin the next step, if it can.
    fn go_on(&mut self, worker: usize) {
        let begun = self.workers[worker].begin(self.now, &self.setup.hardware);
        self.heard(worker);
        if let Some(took) = begun {
            self.plan(self.now + took, Happens::Stepped(worker));
        }
    }

    /// Takes in what a worker's engine says.
    fn heard(&mut self, worker: usize) {
        for event in std::mem::take(&mut self.workers[worker].events) {
            match event {
                Event::Reserved { request_id, .. } => {
                    let request = number(&request_id.0);
                    self.plan(self.now + 2 * WIRE, Happens::Prefills(request));
                }
                Event::Prefilled { request_id, token, finish, cached_tokens, seq } => {
                    let request = number(&request_id.0);
                    self.token(request, token.index, cached_tokens);
                    self.hands_over(request, worker, seq, token, finish.is_some());
                }
                Event::Token { request_id, token, cached_tokens, .. } => {
                    self.token(number(&request_id.0), token.index, cached_tokens);
                }
                Event::Finished { request_id, .. } => self.finished(number(&request_id.0)),
                Event::Failed { request_id, error, .. } => panic!("request {} failed: {error}", request_id.0),
                Event::Scored { .. } | Event::Due { .. } => {}
            }
        }
    }

    /// A prompt is computed: what is left of its KV travels.
    fn hands_over(&mut self, request: usize, worker: usize, seq: SeqId, token: TokenOut, ended: bool) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(placed) = flight.placed else { return };
        if ended {
            let _ = self.workers[worker].engine.release(seq);
            if let Some(receives) = flight.seqs[1] {
                let decode = place_of(placed.decode);
                let _ = self.workers[decode].engine.abort(receives, false);
                self.go_on(decode);
            }
            return self.finished(request);
        }
        flight.sampled = Some(token);
        let lent = flight.seqs[1].and_then(|seq| {
            let engine = &self.workers[place_of(placed.decode)].engine;
            engine.lent_from(seq)
        });
        let tokens = flight.served.input.saturating_sub(lent.unwrap_or(0) * BLOCK);
        let decode = place_of(placed.decode);
        // Layers travel as they are computed, and so the transfer began with the prompt; the link is shared by all that come here.
        let takes = (self.setup.hardware.transfer(tokens) * 1e9) as u64;
        let free = &mut self.workers[decode].link_free;
        let done = self.now.max(*free + takes) + TAIL;
        *free = (*free).max(self.now.saturating_sub(takes)) + takes;
        self.plan(done, Happens::Transferred(request));
    }

    fn transferred(&mut self, request: usize) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let (Some(placed), [Some(held), Some(receives)]) = (flight.placed, flight.seqs) else { return };
        let (token, decode) = (flight.sampled.take().unwrap_or_default(), place_of(placed.decode));
        flight.leases.truncate(1);
        if let Some(prefill) = placed.prefill {
            let prefill = place_of(prefill);
            let _ = self.workers[prefill].engine.release(held);
            self.go_on(prefill);
        }
        let worker = &mut self.workers[decode];
        let taken = worker.engine.kv_arrived(receives, &token, &mut worker.events);
        taken.unwrap_or_else(|error| panic!("it waits for this KV: {error}"));
        self.heard(decode);
        self.go_on(decode);
    }

    fn token(&mut self, request: usize, index: u32, cached: u32) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let now = self.now + WIRE;
        if index == 0 {
            (flight.first, flight.served.cached) = (now, cached);
            flight.served.ttft = (now - flight.began) as f64 / 1e9;
            let fleet = &mut self.routers[flight.router].fleet;
            flight.chosen.iter().for_each(|chosen| fleet.begun(chosen));
            if let Some(why) = flight.chosen.and_then(|chosen| chosen.why) {
                fleet.measured(&why.terms, Some(flight.served.ttft), None);
            }
        } else {
            flight.served.longest = flight.served.longest.max((now - flight.last) as f64 / 1e9);
        }
        (flight.last, flight.tokens) = (now, index + 1);
    }

    fn finished(&mut self, request: usize) {
        let clock = self.clock();
        let Some(mut flight) = self.flights.remove(&request) else { return };
        if flight.tokens > 1 {
            flight.served.itl = (flight.last - flight.first) as f64 / 1e9 / f64::from(flight.tokens - 1);
        }
        if let Some(why) = flight.chosen.and_then(|chosen| chosen.why) {
            let token = Some(flight.served.itl).filter(|_| flight.tokens > 8);
            self.routers[flight.router].fleet.measured(&why.terms, None, token);
        }
        if let Some(placed) = flight.placed {
            self.routers[flight.router].fleet.note(placed, &flight.names, flight.tokens, clock);
        }
        self.outcome.served.push(flight.served);
    }

    fn tells(&mut self) {
        let (clock, routers) = (self.clock(), self.routers.len() as u32);
        for worker in &mut self.workers {
            let (change, load) = worker.news();
            if let Some(load) = load {
                self.routers.iter_mut().for_each(|router| router.fleet.told(worker.id, load, routers, clock));
            }
            let Some(change) = change else { continue };
            let short = |names: &[baton_engine::BlockName]| names.iter().map(|name| name.short()).collect();
            let (number, afresh) = (worker.number, worker.number == 1);
            worker.number += 1;
            let tally = Some(change.tally);
            let change =
                KvChange { number, afresh, stored: short(&change.stored), removed: short(&change.removed), tally };
            for router in &mut self.routers {
                let followed = router.index.follow(worker.id, &change);
                assert_eq!(followed, Followed::Yes, "no news is lost here");
            }
        }
        if !self.over() {
            self.plan(self.now + NEWS, Happens::Tells);
        }
    }

    fn counted(&mut self) {
        let (prefills, decodes) = self.workers.split_at_mut(self.setup.prefills);
        let busy: f64 = prefills.iter_mut().map(Worker::take_busy).sum();
        self.outcome.prefill_load.push(busy / self.setup.prefills.max(1) as f64);
        self.outcome.decode_load.push(decodes.iter().map(|worker| worker.in_progress() as f64).sum());
        if self.arrived < self.prompts.len() {
            self.plan(self.now + SECOND, Happens::Counted);
        }
    }
}

fn number(id: &str) -> usize {
    id.parse().unwrap_or_else(|_| panic!("ids are numbers: {id}"))
}

/// Where a worker stands in the list.
fn place_of(worker: WorkerId) -> usize {
    (worker.0 - 1000) as usize
}
