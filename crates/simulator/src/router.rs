//! A router: the real fleet and the real choices. What surrounds them is added here: its view and probes in this file, its requests and
//! clients in `choice.rs`, its streams to workers in `streams.rs`.

mod choice;
mod fetching;
mod keeping;
mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_membership::Follow;
use baton_policy::{Ask, Chosen, Failure, Fleet, KvIndex, LeastLoaded, Placement, Predicted, Probe, RoundRobin};
use baton_types::{WorkerId, mix};

pub(crate) use choice::InFlight;
pub(crate) use fetching::FetchPlan;
use fetching::Fetching;
use keeping::Keeps;
use streams::Leg;

use crate::Violation;
use crate::client::End;
use crate::control::{Call, Connection, Link, Up};
use crate::events::{Event, Life, Place, Process};
use crate::stream::{Micros, Timer};
use crate::world::World;

/// One incarnation of a router.
pub(crate) struct Router {
    pub life: Life,
    pub fleet: Fleet,
    /// What each worker holds.
    pub index: KvIndex,
    pub follow: Follow,
    pub follower: Timer,
    pub follow_until: Option<Instant>,
    /// Number of the watch that is open or being opened.
    pub feed: u64,
    pub choices: BTreeMap<u64, InFlight>,
    calls: BTreeMap<Call, (u64, Leg)>,
    /// Prefixes that it has moved now, and the calls for each.
    fetching: BTreeMap<u64, Fetching>,
    fetch_calls: BTreeMap<Call, u64>,
    /// What KV stores are to take.
    pub keeps: Keeps,
    pub probes: BTreeMap<WorkerId, Probe>,
    /// Workers that the fleet has told it to connect to, and not yet to let go of.
    pub connected: BTreeSet<WorkerId>,
    pub frozen: Option<(Micros, Micros)>,
    /// Every worker it has ever known.
    pub knew: BTreeMap<WorkerId, Process>,
}

impl Router {
    pub(crate) fn new(world: &mut World, place: Place, life: Life) -> Router {
        let placement: Box<dyn Placement> = match life % 3 {
            0 => Box::<RoundRobin>::default(),
            1 => Box::<LeastLoaded>::default(),
            _ => Box::new(Predicted::new(16)),
        };
        let mut fleet = Fleet::new("m", placement, life);
        // Some reserve decode blocks early, some late, and some as the queue is.
        let late = [None, Some(Duration::ZERO), Some(Duration::from_millis(2))];
        fleet.reserve_late(late[(mix(world.seed ^ 41) + life) as usize % late.len()]);
        let (least_uses, sizes) = world.keep_settings();
        fleet.keep_from(least_uses);
        fleet.keep_sizes(sizes);
        let (from, percent) = world.hot_settings();
        fleet.copy_hot(from, percent);
        let (follow, first) = Follow::start(life, world.clock_now(Process::Router(place)));
        let router = Router {
            life,
            fleet,
            // Some forget much of it.
            index: KvIndex::new(if life.is_multiple_of(3) { 8 } else { 1000 }),
            follow,
            follower: Timer::default(),
            follow_until: None,
            feed: 0,
            choices: BTreeMap::new(),
            calls: BTreeMap::new(),
            fetching: BTreeMap::new(),
            fetch_calls: BTreeMap::new(),
            keeps: Keeps::default(),
            probes: BTreeMap::new(),
            connected: BTreeSet::new(),
            frozen: None,
            knew: BTreeMap::new(),
        };
        world.events.plan(world.now, Event::Follow { router: place, life, action: first });
        router
    }
}

impl Router {
    /// Places a request by what each worker holds.
    fn place_held(&mut self, ask: &Ask, request: u64, now: Instant) -> Result<Chosen, Failure> {
        let held = self.index.find(&ask.names, 4, request as usize);
        self.index.mention(&ask.names);
        self.fleet.place(ask, held.as_slice(), now)
    }
}

impl World {
    pub(super) fn plan_probe(&mut self, place: Place, probe: Probe) {
        let (life, worker, at) =
            (self.routers[place].life, probe.worker(), self.micros(Process::Router(place), probe.at()));
        self.routers[place].probes.insert(worker, probe);
        self.events.plan(at.max(self.now + 1), Event::Probe { router: place, life, worker });
    }

    /// Asks a lost worker whether it is back. A probe that is not answered within a second has failed.
    pub(crate) fn probe(&mut self, place: Place, worker: WorkerId) -> Result<(), Violation> {
        if self.routers[place].probes.contains_key(&worker) {
            self.send_up((place, worker), Up::Probe);
            let (life, at) = (self.routers[place].life, self.now + 1_000_000);
            self.events.plan(at, Event::ProbeOver { router: place, life, worker });
        }
        Ok(())
    }

    pub(crate) fn probed(&mut self, link: Link, answered: bool) -> Result<(), Violation> {
        let (place, worker) = link;
        let at = self.clock_now(Process::Router(place));
        let Some(probe) = self.routers[place].probes.remove(&worker) else { return Ok(()) };
        match self.routers[place].fleet.probed(probe, answered, at) {
            Some(_) if answered => {
                Err(self.violation("I5", format!("router {place} is answered by {worker}, which stays lost")))
            }
            Some(next) => {
                self.plan_probe(place, next);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Passes the router's view to its fleet, and adds a connection for each new worker.
    pub(crate) fn viewed(&mut self, place: Place) {
        let view = Arc::new(self.routers[place].follow.view());
        for member in &view.members {
            if let Some(process) = self.process_at(&member.grpc) {
                self.routers[place].knew.insert(member.id, process);
            }
        }
        let changes = self.routers[place].fleet.update(Arc::clone(&view));
        let connected = &mut self.routers[place].connected;
        connected.extend(changes.joined.iter().map(|member| member.id));
        connected.retain(|worker| !changes.left.contains(worker));
        for worker in &changes.left {
            self.routers[place].index.leave(*worker);
            self.routers[place].keeps.left(*worker);
            self.follows.end((place, *worker));
        }
        let connected = &self.routers[place].connected;
        // I5: only with workers in the view, so that connections are bounded.
        let gone = connected.iter().find(|worker| view.get(**worker).is_none()).copied();
        if let Some(worker) = gone {
            let violation = self.violation("I5", format!("router {place} stays connected to {worker}, which has left"));
            self.broken_by.get_or_insert(violation);
        }
        for member in changes.joined {
            if let Some(process) = self.process_at(&member.grpc) {
                self.links.entry((place, member.id)).or_insert_with(|| Connection::new(process));
            }
        }
    }

    /// Ends the requests of a router that has died.
    pub(crate) fn orphans(&mut self, place: Place) -> Result<(), Violation> {
        for request in self.routers[place].choices.keys().copied().collect::<Vec<_>>() {
            let client = &mut self.clients[request as usize];
            client.end.get_or_insert(End::Broken);
            self.check_end(request)?;
        }
        Ok(())
    }
}
