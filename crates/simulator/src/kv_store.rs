//! A KV store that is a process of its own: the real role, over a pool and no model. This file adds its streams to routers. It
//! computes nothing and no prompt is placed on it. What it keeps, `router/keeping.rs` has it take.

use std::collections::VecDeque;
use std::convert::Infallible;

use baton_engine::{CacheConfig, Engine, EngineConfig, NewSequence};
use baton_handoff::TransferError;
use baton_roles::{Drain, Input, KvStore as Role, StepLaunch, WorkerCore};
use baton_types::{ErrorKind, PoolGeometry, WorkerId};

use crate::Violation;
use crate::control::{Down, Link, Up};
use crate::decode::{Caller, answered};
use crate::ends::{Receiver, Sender};
use crate::engine::{Host, Thread};
use crate::events::{Life, Place, Process};
use crate::exchange::Exchanging;
use crate::kept::Kept;
use crate::membership::Registration;
use crate::pool::{Blocks, Bytes, Memory};
use crate::stream::Micros;
use crate::world::World;

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
    pub(crate) fn new(
        world: &World,
        life: Life,
        before: Option<Kept>,
    ) -> Result<(KvStore, Receiver, Sender), Violation> {
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
}
