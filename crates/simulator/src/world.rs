//! The run: its processes, the network between them, and its events. Each kind of process has a file of its own. This one has the
//! clock, the event loop, and what concerns all processes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_engine::EngineConfig;
use baton_engine::fake::{FakeModel, sinks_layout, tiny_layout};
use baton_handoff::{TransferLimits, TransportKind};
use baton_membership::{FollowInput, RenewalInput};
use baton_roles::DrainInput;
use baton_types::testing::Random;
use baton_types::{PoolGeometry, mix};

use crate::cache_news::Follows;
use crate::client::{Client, Shape, VOCAB};
use crate::clocks::Clock;
use crate::control::{self, Link};
use crate::decode::{Decode, DecodeHost};
use crate::ends::{Ends, Receiver, Sender};
use crate::events::{Event, Events, Life, Line, Place, Process, Serial};
use crate::faults::Faults;
use crate::kv_store::{KvStore, KvStoreHost};
use crate::kv_store_life::KvStorePlan;
use crate::membership::Registry;
use crate::pool::Bytes;
use crate::prefill::{Prefill, PrefillHost};
use crate::receiver_session::ReceiverSession;
use crate::router::{FetchPlan, Router};
use crate::stages::Stage;
use crate::stream::{Micros, Stream};
use crate::{Options, Sabotage, Summary, Violation, settings};

/// How late a thread may be with work that it can do now, microseconds.
pub(crate) const LAZINESS: Micros = 300;
/// Events after which a run counts as endless.
const MOST_EVENTS: u64 = 20_000_000;
/// Time after which an event for a frozen process is looked at again.
const PATIENCE: Micros = 20_000;
/// Time from one keep-alive check to the next.
const LOOK: Micros = 250_000;

/// A connection between two workers.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The worker that gives KV, and the one that takes it.
    pub from: Process,
    pub from_life: Life,
    pub to: Process,
    pub to_life: Life,
    /// The session that opened it.
    pub session: Serial,
    /// What the giver says.
    pub up: Stream,
    /// What the taker says.
    pub down: Stream,
    /// The caller is a stranger, no worker.
    pub is_strangers: bool,
}

impl Connection {
    /// A turn of the session at the giver.
    pub(crate) fn sender_turn(&self) -> Event {
        Event::SenderTurn { process: self.from, life: self.from_life, session: self.session }
    }
}

/// How long models take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    base: Micros,
    token: Micros,
}

impl Pace {
    pub(crate) fn step(self, tokens: u32, random: &mut Random) -> Micros {
        random.within(1, self.base) + self.token * u64::from(tokens)
    }

    pub(crate) fn layer(self, random: &mut Random) -> Micros {
        random.within(1, self.base / 2 + 1)
    }
}

pub(crate) struct World {
    pub random: Random,
    pub now: Micros,
    pub seed: u64,
    /// The instant of virtual time 0.
    pub base: Instant,
    /// Clocks that differ from the world's time.
    pub clocks: BTreeMap<Process, Clock>,
    pub events: Events,
    pub faults: Faults,
    pub options: Options,
    pub limits: TransferLimits,
    pub engine: EngineConfig,
    pub geometry: PoolGeometry,
    pub overlaps: bool,
    /// Pools have room for little more than the longest request, answers are long, and requests arrive close together.
    pressed: bool,
    /// Workers have stores of their own.
    pub stores: bool,
    pub lease: Duration,
    pub pace: Pace,
    pub routers: Vec<Router>,
    pub decodes: Vec<Decode>,
    pub prefills: Vec<Prefill>,
    pub kv_stores: Vec<KvStore>,
    /// The ends of workers that take KV, and those that give it.
    pub receivers: Ends<Receiver>,
    pub senders: Ends<Sender>,
    pub registry: Registry,
    pub clients: Vec<Client>,
    pub links: BTreeMap<Link, control::Connection>,
    pub follows: Follows,
    pub fetch_plan: FetchPlan,
    pub kv_store_plan: KvStorePlan,
    pub lines: BTreeMap<Line, Connection>,
    pub apart: BTreeMap<(Process, Process), (Micros, Micros)>,
    /// Workers that drain, and when they must begin to leave, for the checker of drains.
    pub leaving: BTreeMap<Process, (Life, Micros)>,
    next_line: Line,
    next_life: Life,
    pub next_session: Serial,
    pub next_call: u64,
    pub summary: Summary,
    pub healed: bool,
    /// Processes were frozen or partitioned, so that registrations may have expired.
    pub shaken: bool,
    /// The engine thread whose turn it is has ended its process.
    pub ended: bool,
    pub broken_by: Option<Violation>,
    pub stage: Stage,
    /// When the stage began.
    pub since: Micros,
    /// How often each event has happened that a rule may wait for.
    pub passed: BTreeMap<&'static str, u64>,
    trace: Vec<String>,
}

impl World {
    pub(crate) fn new(seed: u64, options: &Options) -> Result<World, Violation> {
        let mut random = Random(seed);
        let faults = match (&options.faults, options.calm) {
            (Some(faults), _) => faults.clone(),
            (None, true) => Faults::calm(&mut random).with_clocks(seed, &options.without),
            (None, false) => {
                let faults = Faults::random(&mut random, &options.without).with_clocks(seed, &options.without);
                faults.with_stores(seed, &options.without).with_kv_stores(seed, &options.without)
            }
        };
        let idle = match options.calm || options.faults.is_some() {
            true => TransferLimits::default().idle,
            false => Duration::from_millis(20 + mix(seed ^ 29) % 2000),
        };
        let limits = TransferLimits {
            handshake: Duration::from_millis(200),
            handoffs: 64,
            queued_blocks: random.within(4, 24) as usize,
            room: Duration::from_millis(100),
            heartbeat: Duration::from_millis(20),
            silence: Duration::from_millis(100),
            idle,
            ..TransferLimits::default()
        };
        let block_size = random.within(1, 4) as u32;
        let layout = if random.chance(250) { sinks_layout(block_size) } else { tiny_layout(block_size) };
        let stores = options.faults.is_none() && mix(seed ^ 37).is_multiple_of(3);
        // Of a window's layers, another prompt seldom finds the blocks that its window sees.
        let kv_store_plan = KvStorePlan::new(seed, options);
        let unwindowed = (stores || kv_store_plan.first.is_some()) && !mix(seed ^ 47).is_multiple_of(3);
        let layout = if unwindowed { settings::unwindowed(layout) } else { layout };
        // Room for the longest request, and little more in some runs.
        let most = 30u32.div_ceil(block_size) + 3;
        let blocks = most + random.below(u64::from(most) * 3) as u32;
        let plain = options.calm || options.faults.is_some();
        let pressed = !plain && mix(seed ^ 2).is_multiple_of(2);
        let blocks = if pressed { settings::few_blocks(block_size, seed) } else { blocks };
        let geometry = settings::pools(layout, blocks, (!plain).then_some(seed));
        let engine = settings::engine(&mut random);
        let engine = if plain { engine } else { settings::vary(engine, seed) };
        let engine = if unwindowed { settings::forgetful(engine, seed) } else { engine };
        let pace = Pace { base: [20, 500, 5_000][random.below(3) as usize], token: random.below(200) };
        // Only differences of instants matter, so the run does not depend on when it is played.
        #[allow(clippy::disallowed_methods)]
        let base = Instant::now();
        let mut world = World {
            overlaps: random.chance(500),
            pressed,
            stores,
            lease: lease(options, &mut random),
            random,
            now: 0,
            seed,
            base,
            clocks: BTreeMap::new(),
            events: Events::default(),
            faults,
            options: options.clone(),
            limits,
            engine,
            geometry,
            pace,
            routers: Vec::new(),
            decodes: Vec::new(),
            prefills: Vec::new(),
            kv_stores: Vec::new(),
            receivers: Ends::default(),
            senders: Ends::default(),
            registry: Registry::new(base),
            clients: Vec::new(),
            links: BTreeMap::new(),
            follows: Follows::new(seed),
            fetch_plan: FetchPlan::new(seed, options, kv_store_plan.first.is_some()),
            kv_store_plan,
            lines: BTreeMap::new(),
            apart: BTreeMap::new(),
            leaving: BTreeMap::new(),
            next_line: 0,
            next_life: 0,
            next_session: 0,
            next_call: 0,
            summary: Summary::default(),
            healed: false,
            shaken: false,
            ended: false,
            broken_by: None,
            stage: Stage::Stormy,
            since: 0,
            passed: BTreeMap::new(),
            trace: Vec::new(),
        };
        world.populate()?;
        Ok(world)
    }

    fn populate(&mut self) -> Result<(), Violation> {
        let sizes = self.options.sizes;
        let routers = sizes.routers.unwrap_or(self.random.within(1, 2) as u32);
        let prefills = sizes.prefills.unwrap_or(self.random.within(0, 3) as u32);
        let decodes = sizes.decodes.unwrap_or(self.random.within(1, 3) as u32);
        self.give_clock(Process::Registry);
        for place in 0..routers as Place {
            self.give_clock(Process::Router(place));
            let life = self.life();
            let router = Router::new(self, place, life);
            self.routers.push(router);
        }
        (0..prefills).try_for_each(|_| self.join(false))?;
        (0..decodes).try_for_each(|_| self.join(true))?;
        self.plan_kv_stores()?;
        let longer = if self.pressed { 3 } else { 1 };
        let shape = Shape {
            prompt: self.random.within(1, 20),
            answer: self.random.within(1, 8) * longer,
            families: self.random.within(1, 4),
            sampled: self.random.chance(500),
        };
        // With KV stores, prompts have more in common.
        let shape = match self.kv_store_plan.first {
            Some(_) => Shape { prompt: shape.prompt.max(12), families: 1, ..shape },
            None => shape,
        };
        // Workers register first.
        let mut at = 500_000;
        let between = [1_000, 30_000, 300_000, 2_000_000][self.random.below(4) as usize];
        let between = if self.pressed { between / 100 } else { between };
        let between = self.options.every.unwrap_or(between).max(1);
        for request in 0..u64::from(self.options.requests) {
            at += self.random.below(between);
            let client = Client::new(&mut self.random, shape);
            self.clients.push(client);
            self.events.plan(at, Event::Arrive { request });
        }
        for (at, number) in self.rule_times() {
            self.events.plan(at, Event::Rule { number, it: None });
        }
        let heals = at + self.random.below(3_000_000) + if self.options.rules.is_empty() { 0 } else { 30_000_000 };
        self.events.plan(heals, Event::Heal);
        self.events.plan(self.random.within(1, 600_000), Event::Strike);
        self.events.plan(LOOK, Event::KeepAlive);
        self.plan_any_prefix();
        Ok(())
    }

    pub(crate) fn life(&mut self) -> Life {
        self.next_life += 1;
        self.next_life
    }

    pub(crate) fn model(&self, bytes: &Bytes) -> FakeModel<Bytes> {
        FakeModel::with_memory(self.geometry.clone(), VOCAB, bytes.clone())
    }

    /// The model of a decode worker. In some runs it computes a step only when the step is collected, as a GPU may.
    pub(crate) fn last_model(&self, bytes: &Bytes) -> FakeModel<Bytes> {
        let late = self.overlaps && mix(self.seed ^ 1).is_multiple_of(2);
        if late { self.model(bytes).late() } else { self.model(bytes) }
    }

    pub(crate) fn violation(&self, invariant: &'static str, what: impl Into<String>) -> Violation {
        Violation { invariant, at_micros: self.now, what: what.into(), trace: self.trace.clone() }
    }

    pub(crate) fn broken(&self, sabotage: Sabotage) -> bool {
        self.options.sabotage == Some(sabotage)
    }

    /// Counts a check.
    pub(crate) fn look_at(&mut self, invariant: &'static str) {
        *self.summary.looked.entry(invariant).or_default() += 1;
    }

    /// Adds a line to the run's trace, if one is recorded.
    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.options.trace {
            let line = format!("{:>12} µs  {}", self.now, line());
            self.trace.push(line);
        }
    }

    /// Longest time for a handshake.
    pub(crate) fn handshake(&self) -> Micros {
        self.limits.handshake.as_micros() as Micros
    }

    /// A random time soon after now, when a woken thread runs.
    pub(crate) fn soon(&mut self) -> Micros {
        self.now + self.random.within(1, LAZINESS)
    }

    /// Plays until the run is over or an invariant is violated.
    pub(crate) fn play(mut self) -> Result<Summary, Violation> {
        while let Some((at, event)) = self.events.next() {
            self.now = self.now.max(at);
            self.summary.events += 1;
            if self.summary.events > MOST_EVENTS {
                return Err(self.violation("I5", "the run does not end"));
            }
            if let Some((process, life)) = event.process() {
                if life.is_some_and(|life| life != self.life_of(process)) {
                    continue;
                }
                if let Some(until) = self.frozen_until(process) {
                    self.events.plan(self.later(until), event);
                    continue;
                }
            }
            if let Some(until) = self.line_frozen(&event) {
                self.events.plan(self.later(until), event);
                continue;
            }
            self.happen(event)?;
            if let Some(violation) = self.broken_by.take() {
                return Err(violation);
            }
            if self.advance()? {
                break;
            }
        }
        self.count_engines();
        self.summary.faults = self.faults.counts.clone();
        self.summary.milestones = std::mem::take(&mut self.passed);
        self.summary.micros = self.now;
        Ok(self.summary)
    }

    /// When to look again at an event that waits until `until`. It may be looked at earlier, because the end of faults ends every wait.
    pub(crate) fn later(&self, until: Micros) -> Micros {
        (until + 1).min(self.now + PATIENCE)
    }

    fn line_frozen(&self, event: &Event) -> Option<Micros> {
        let (Event::ReceiverTurn { line } | Event::Died { line }) = event else { return None };
        self.lines.get(line).and_then(|line| self.frozen_until(line.to))
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Arrive { request } => return self.arrive(request),
            Event::Leave { request } => return self.leave(request),
            Event::Taken { router, request, .. } => return self.taken(router, request),
            Event::Wake { router, request, .. } => return self.wake(router, request),
            Event::Probe { router, worker, .. } => return self.probe(router, worker),
            Event::ProbeOver { router, worker, .. } => return self.probed((router, worker), false),
            Event::PrefixOver { router, prefix, serves, .. } => {
                return self.prefix_is_late(router, prefix, serves);
            }
            Event::PrefixBegins { router, prefix, .. } => self.let_go(router, prefix),
            Event::AnyPrefix => self.any_prefix(),
            Event::Keep { router, keep, .. } => self.look_to_keep(router, keep)?,
            Event::JoinKvStore => return self.join_kv_store(),
            Event::StrikeKvStore => self.strike_kv_store(),
            Event::News { link, change, load, .. } => self.news(link, &change, load),
            Event::Up { link, made } => return self.up(link, made),
            Event::Down { link, made } => return self.down(link, made),
            Event::Broken { link, made, broken } => return self.break_link(link, made, broken),
            Event::Hangup { process, link, made, .. } => self.hangup(process, link, made),
            Event::KeepAlive => {
                self.events.plan(self.now + LOOK, Event::KeepAlive);
                self.check_bounds()?;
                self.tell_news();
                return self.keep_alive();
            }
            Event::Renewal { process, .. } => self.renew(process, RenewalInput::Wake),
            Event::ToRegistry { process, life, attempt, request } => self.asked(process, life, attempt, request),
            Event::FromRegistry { process, attempt, answer, .. } => self.answered(process, attempt, answer),
            Event::Expiry => self.expiry(),
            Event::Follow { router, life, action } => self.follow(router, life, action),
            Event::FollowWake { router, .. } => self.follow_on(router, FollowInput::Wake),
            Event::Watch { router, life, feed } => self.watch(router, life, feed),
            Event::Listed { router, feed, sent, .. } => return self.listed(router, feed, sent),
            Event::ListDue { router, feed } => self.list_due(router, feed),
            Event::RegistryBack => self.registry_back(),
            Event::RegistryFails { fault } => self.registry_fails_again(fault),
            Event::EngineTurn { process: Process::Prefill(place), .. } => {
                return self.engine_turn::<PrefillHost>(place);
            }
            Event::EngineTurn { process: Process::Decode(place), .. } => return self.engine_turn::<DecodeHost>(place),
            Event::EngineStep { process: Process::Prefill(place), .. } => {
                return self.engine_step::<PrefillHost>(place);
            }
            Event::EngineStep { process: Process::Decode(place), .. } => return self.engine_step::<DecodeHost>(place),
            Event::EngineTurn { process: Process::KvStore(place), .. } => {
                return self.engine_turn::<KvStoreHost>(place);
            }
            Event::EngineStep { process: Process::KvStore(place), .. } => {
                return self.engine_step::<KvStoreHost>(place);
            }
            Event::StoreTurn { process: Process::KvStore(place), .. } => return self.store_turn::<KvStoreHost>(place),
            Event::StoreTurn { process: Process::Prefill(place), .. } => return self.store_turn::<PrefillHost>(place),
            Event::StoreTurn { process: Process::Decode(place), .. } => return self.store_turn::<DecodeHost>(place),
            Event::EngineTurn { .. } | Event::EngineStep { .. } | Event::StoreTurn { .. } => {}
            Event::ReceiverTurn { line } => return self.receiver_turn(line),
            Event::SenderTurn { process, life, session } => return self.sender_turn(process, life, session),
            Event::Desk { process, .. } => return self.desk(process),
            Event::Died { line } => return self.died(line),
            Event::WritePrefix { process, .. } => return self.write_prefix(process),
            Event::MustHaveEnded { process, handoff, .. } => return self.must_have_ended(process, handoff),
            Event::Cut { line } => self.cut(line),
            Event::DrainOver { process, .. } => self.drain_on(process, DrainInput::Wake),
            Event::Rule { number, it } => return self.obey(number, it),
            Event::Strike => return self.strike(),
            Event::Heal => self.heal(),
        }
        Ok(())
    }

    /// A worker learns that a connection has ended, and drops its streams.
    fn hangup(&mut self, process: Process, link: Link, made: u64) {
        match process {
            Process::Decode(place) => {
                self.hang_up_decode(place, |caller| caller.link == link && caller.made <= made);
            }
            Process::Prefill(place) => {
                self.hang_up_prefill(place, |caller| caller.link == link && caller.made <= made);
            }
            Process::KvStore(place) => {
                self.hang_up_kv_store(place, |caller| caller.link == link && caller.made <= made);
            }
            _ => {}
        }
    }

    /// Opens a connection between workers. Whichever process is at the taker's address now answers.
    pub(crate) fn connect(&mut self, from: Process, to: Process, session: Serial, kind: TransportKind) -> Line {
        self.next_line += 1;
        let line = self.next_line;
        let room = self.random.within(40, 2_000) as usize;
        let connection = Connection {
            from,
            from_life: self.life_of(from),
            to,
            to_life: self.life_of(to),
            session,
            up: Stream::new(room),
            down: Stream::new(room),
            is_strangers: false,
        };
        self.lines.insert(line, connection);
        if let Some(until) = self.apart(from, to)
            && let Some(connection) = self.lines.get_mut(&line)
        {
            connection.up.stall(until);
            connection.down.stall(until);
        }
        if self.is_alive(to) && self.receivers[to].members.admit(line, line) {
            self.receivers[to].sessions.insert(line, ReceiverSession::new(line, kind));
            self.wake_receiver(line);
        } else {
            self.close_up(line);
        }
        line
    }

    /// Plans a turn at both ends of a connection.
    pub(crate) fn wake_both(&mut self, line: Line, at: Micros) {
        let Some(connection) = self.lines.get(&line) else { return };
        let turn = connection.sender_turn();
        self.events.plan(at, Event::ReceiverTurn { line });
        self.events.plan(at, turn);
    }
}

/// How long decode workers lend blocks. In runs without faults it is long enough for any queue.
fn lease(options: &Options, random: &mut Random) -> Duration {
    let chosen = if options.calm { 10_000 } else { random.within(200, 5_000) };
    options.lease.map_or(Duration::from_millis(chosen), Duration::from_micros)
}
