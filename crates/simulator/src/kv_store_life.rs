//! KV stores join, are replaced at their address, and are struck by faults of their own.

use baton_types::mix;
use baton_types::testing::Random;

use crate::events::{Event, Place, Process};
use crate::faults::Fault;
use crate::kv_store::KvStore;
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
    /// This one keeps another kind of KV than the workers have.
    pub other: Option<Place>,
}

impl KvStorePlan {
    /// The seed chooses: a third of the runs have stores. Scenarios have those that they name.
    pub(crate) fn new(seed: u64, options: &Options) -> KvStorePlan {
        let mut random = Random(mix(seed ^ 0x6b76_2d73_746f));
        let (has, more, late) = (random.chance(333), random.chance(300), random.chance(400));
        let joins = random.within(500_000, 3_000_000);
        let tiers = random.chance(500);
        let other = random.chance(300).then_some(1);
        let plain = options.faults.is_some();
        let by_seed = (has && !plain).then_some(1 + u32::from(more));
        let first = options.sizes.stores.map_or(by_seed, |stores| (stores > 0).then_some(stores));
        let late = late && !plain && !options.without.contains(&Fault::Join);
        let other = other.filter(|_| !plain);
        KvStorePlan { random, first, joins: late.then_some(joins), tiers: tiers && !plain, other }
    }
}

impl World {
    /// Whether there are KV stores in this run, now or at another time.
    pub(crate) fn has_kv_stores(&self) -> bool {
        self.kv_store_plan.first.is_some()
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
        let (place, what) = (random.below(self.kv_stores.len() as u64) as Place, random.below(12));
        let (long, other) = (random.within(1_000, 3_000_000), random.below(8) as Place);
        self.events.plan(next, Event::StrikeKvStore);
        let process = Process::KvStore(place);
        if !self.is_alive(process) {
            return;
        }
        self.faults.count(Fault::KvStore);
        match what {
            0..5 => self.kill(process, true),
            5 => self.kill(process, false),
            6 => self.drain(process, 2 * long),
            7 | 8 => self.freeze(process, self.now + long),
            9 => self.cut_lines(|connection| [connection.from, connection.to].contains(&process), false),
            _ => {
                let others = [Process::Decode(other % self.decodes.len()), Process::Router(other % self.routers.len())];
                self.partition(process, others[other % 2], self.now + long);
            }
        }
    }
}
