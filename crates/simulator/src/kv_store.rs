//! A KV store that is a process of its own: the real role, over a pool and no model. This file adds its streams to routers, how it joins, and
//! what strikes it. It computes nothing and no prompt is placed on it; what it keeps, `router/keeping.rs` has it take.

use std::collections::VecDeque;
use std::convert::Infallible;

use baton_engine::{CacheConfig, Engine, EngineConfig, NewSequence};
use baton_handoff::TransferError;
use baton_roles::{Drain, Input, KvStore as Role, StepLaunch, WorkerCore};
use baton_types::testing::Random;
use baton_types::{ErrorKind, PoolGeometry, WorkerId, mix};

use crate::control::{Down, Link, Up};
use crate::decode::{Caller, answered};
use crate::ends::{Receiver, Sender};
use crate::engine::{Host, Thread};
use crate::events::{Event, Life, Place, Process};
use crate::exchange::Exchanging;
use crate::faults::Fault;
use crate::kept::Kept;
use crate::membership::Registration;
use crate::pool::{Blocks, Bytes, Memory};
use crate::stream::Micros;
use crate::world::World;
use crate::{Options, Violation};

/// Most KV stores of a run.
const MOST: usize = 3;

/// The KV stores of a run. Its random numbers are its own, so that faults elsewhere strike as they would without stores.
#[derive(Debug)]
pub(crate) struct KvStorePlan {
    pub random: Random,
    /// How many there are at the beginning. `None`: none at any time.
    pub first: Option<u32>,
    /// When another one joins.
    joins: Option<Micros>,
    /// They have tiers below their pools.
    pub tiers: bool,
}

impl KvStorePlan {
    /// The seed chooses: a third of the runs have stores. Scenarios have those that they name.
    pub(crate) fn new(seed: u64, options: &Options) -> KvStorePlan {
        let mut random = Random(mix(seed ^ 0x6b76_2d73_746f));
        let (has, more, late) = (random.chance(333), random.chance(300), random.chance(400));
        let joins = random.within(500_000, 3_000_000);
        let tiers = random.chance(500);
        let plain = options.faults.is_some();
        let by_seed = (has && !plain).then_some(1 + u32::from(more));
        let first = options.sizes.stores.map_or(by_seed, |stores| (stores > 0).then_some(stores));
        let late = late && !plain && !options.without.contains(&Fault::Join);
        KvStorePlan { random, first, joins: late.then_some(joins), tiers: tiers && !plain }
    }
}

/// One incarnation of a KV store.
pub(crate) struct KvStore {
    pub life: Life,
    pub id: WorkerId,
    pub alive: bool,
    pub thread: Option<Thread<Role>>,
    pub inbox: VecDeque<Input<Infallible>>,
    pub registration: Option<Registration>,
    pub exchanging: Exchanging,
    /// The tiers below its pool.
    pub kept: Option<Kept>,
    pub frozen: Option<(Micros, Micros)>,
    pub drain: Drain,
}

impl KvStore {
    /// A store and its ends. `before`: the tiers of the process before it at this place.
    fn new(world: &World, life: Life, before: Option<Kept>) -> Result<(KvStore, Receiver, Sender), Violation> {
        let memory = Memory::new(world.geometry.clone());
        let cache = CacheConfig { max_blocks: u32::MAX, ..CacheConfig::default() };
        let config = EngineConfig { cache, ..world.engine };
        let mut engine = Engine::new(config, &world.geometry).map_err(|e| world.violation("set-up", e.to_string()))?;
        engine.note_cache_changes();
        if world.kv_store_plan.tiers {
            engine.note_ended();
            engine.note_fetched();
        }
        let layout = world.geometry.layout.clone();
        let layers = layout.layers() as u32;
        let core = WorkerCore::new(engine, Role, layout.into(), world.lease, false);
        let store = KvStore {
            life,
            id: WorkerId(life),
            alive: true,
            thread: Some(Thread::new(core, world.model(&memory.bytes), layers)),
            inbox: VecDeque::new(),
            registration: None,
            exchanging: Exchanging::default(),
            kept: world.tiers_for(world.kv_store_plan.tiers, life, before),
            frozen: None,
            drain: Drain::default(),
        };
        let sender = Sender::new(life, memory.shared());
        Ok((store, Receiver::new(life, memory, world.limits.clone()), sender))
    }

    /// Whether every block is free, cached or in quarantine.
    pub(crate) fn is_quiet(&self) -> bool {
        let Some(thread) = &self.thread else { return !self.alive };
        let snapshot = thread.core.snapshot();
        let aside = snapshot.blocks.quarantined + snapshot.blocks.free + snapshot.blocks.cached;
        self.inbox.is_empty() && snapshot.running + snapshot.waiting == 0 && aside == snapshot.blocks.total
    }

    /// I6 at the end of a run: nothing is held.
    pub(crate) fn check_free(&self, receiver: &Receiver, sender: &Sender) -> Result<(), String> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let (snapshot, exchange) = (thread.core.snapshot(), thread.core.exchange());
        let reservations = receiver.ledger.stats().reservations;
        let held = (exchange.streams(), exchange.epochs(), reservations, self.exchanging.callers.len());
        match snapshot.idle && held == (0, (0, 0), 0, 0) && sender.is_free() {
            true => Ok(()),
            false => Err(format!(
                "{}: {snapshot:?}; prefixes, their epochs, reservations, callers: {held:?}; handoffs, jobs: {}, {}",
                self.id,
                sender.handoffs.len(),
                sender.jobs.len()
            )),
        }
    }
}

pub(crate) struct KvStoreHost;

impl Host for KvStoreHost {
    type Role = Role;

    fn process(place: Place) -> Process {
        Process::KvStore(place)
    }

    fn thread(world: &mut World, place: Place) -> &mut Option<Thread<Role>> {
        &mut world.kv_stores[place].thread
    }

    fn inbox(world: &mut World, place: Place) -> &mut VecDeque<Input<Infallible>> {
        &mut world.kv_stores[place].inbox
    }

    fn perform(_: &mut World, _: Place, effect: Infallible) -> Result<Option<Infallible>, Violation> {
        match effect {}
    }

    fn kept(world: &mut World, place: Place) -> &mut Option<Kept> {
        &mut world.kv_stores[place].kept
    }

    fn pool(world: &World, place: Place) -> (Bytes, PoolGeometry) {
        let memory = &world.receivers[Process::KvStore(place)].memory;
        (memory.bytes.clone(), memory.geometry.clone())
    }

    fn compare(world: &World, place: Place, tokens: &[u32], first: &[u32], blocks: &Blocks) -> Result<(), String> {
        world.receivers[Process::KvStore(place)].memory.compare(tokens, first, blocks)
    }

    fn brings(command: &Infallible) -> Option<&NewSequence> {
        match *command {}
    }

    fn exchanging(world: &mut World, place: Place) -> &mut Exchanging {
        &mut world.kv_stores[place].exchanging
    }

    fn stored(_: &mut World, _: Place, launch: &mut StepLaunch, layer: u32) -> Result<bool, Violation> {
        launch.stored(layer, |_| Err(TransferError::Closed));
        Ok(true)
    }

    fn inspect(world: &mut World, place: Place, _: &mut WorkerCore<Role>, _: u64) -> Result<(), Violation> {
        Err(world.violation("delivery", format!("kv-store {place} computes")))
    }
}

impl World {
    /// Handles a router's message.
    pub(crate) fn kv_store_asked(
        &mut self,
        place: Place,
        (link, made): (Link, u64),
        message: Up,
    ) -> Result<(), Violation> {
        match message {
            Up::Fetch { call, prefix } => self.asked_to_fetch::<KvStoreHost>(place, (link, made), call, prefix),
            Up::Serve { call, prefix, target } => {
                self.asked_to_serve::<KvStoreHost>(place, (link, made), call, prefix, &target);
            }
            Up::Cancel { call } => self.hang_up_kv_store(place, |caller| caller.call == call),
            Up::Decode { call, .. } | Up::Prefill { call, .. } => {
                let id = self.kv_stores[place].id;
                // A process that has another one's address is asked what that one was to do.
                if link.1 == id {
                    return Err(self.violation("delivery", format!("a prompt is placed on {id}, a KV store")));
                }
                self.send_down(link, made, Down::Ended(call, answered(ErrorKind::InvalidArgument, "a store".into())));
            }
            Up::Target { .. } | Up::Probe => {}
        }
        self.wake_engine(Process::KvStore(place));
        Ok(())
    }

    pub(crate) fn hang_up_kv_store(&mut self, place: Place, gone: impl Fn(&Caller) -> bool) {
        self.hang_up_exchanges::<KvStoreHost>(place, gone);
        self.wake_engine(Process::KvStore(place));
    }

    /// The stores of the beginning join, and what comes later is planned.
    pub(crate) fn plan_kv_stores(&mut self) -> Result<(), Violation> {
        let Some(first) = self.kv_store_plan.first else { return Ok(()) };
        (0..first).try_for_each(|_| self.join_kv_store())?;
        if let Some(at) = self.kv_store_plan.joins {
            self.events.plan(at, Event::JoinKvStore);
        }
        if self.faults.kv_store > 0 {
            self.events.plan(self.kv_store_plan.random.within(1, self.faults.kv_store), Event::StrikeKvStore);
        }
        Ok(())
    }

    pub(crate) fn join_kv_store(&mut self) -> Result<(), Violation> {
        if self.healed || self.kv_stores.len() >= MOST {
            return Ok(());
        }
        let (life, process) = (self.life(), Process::KvStore(self.kv_stores.len()));
        let (store, receiver, sender) = KvStore::new(self, life, None)?;
        self.kv_stores.push(store);
        self.receivers.set(process, receiver);
        self.senders.set(process, sender);
        self.give_clock(process);
        self.note(|| format!("{process} joins"));
        self.register(process)
    }

    /// Another process takes a store's place. It finds what the one before had on its disk.
    pub(crate) fn restart_kv_store(&mut self, place: Place, again: bool) -> Result<(), Violation> {
        let (life, process) = (self.life(), Process::KvStore(place));
        let kept = self.kv_stores[place].kept.take();
        let (next, receiver, sender) = KvStore::new(self, life, kept)?;
        let before = std::mem::replace(&mut self.kv_stores[place], next);
        self.receivers.set(process, receiver);
        self.senders.set(process, sender);
        self.cut_ends(before.life);
        self.begin_life(process, again)
    }

    /// A fault of a store, which costs no request.
    pub(crate) fn strike_kv_store(&mut self) {
        if self.healed || self.faults.kv_store == 0 {
            return;
        }
        let random = &mut self.kv_store_plan.random;
        let next = self.now + random.within(1, self.faults.kv_store);
        let (place, what) = (random.below(self.kv_stores.len() as u64) as Place, random.below(6));
        let (long, other) = (random.within(1_000, 3_000_000), random.below(8) as Place);
        self.events.plan(next, Event::StrikeKvStore);
        let process = Process::KvStore(place);
        if !self.is_alive(process) {
            return;
        }
        self.faults.count(Fault::KvStore);
        match what {
            0 => self.kill(process, true),
            1 => self.kill(process, false),
            2 => self.drain(process, 2 * long),
            3 => self.freeze(process, self.now + long),
            4 => self.cut_lines(|connection| [connection.from, connection.to].contains(&process), false),
            _ => {
                let others = [Process::Decode(other % self.decodes.len()), Process::Router(other % self.routers.len())];
                self.partition(process, others[other % 2], self.now + long);
            }
        }
    }
}
