//! The processes: their incarnations, ids and addresses, which of them are frozen, and which cannot reach each other.

use baton_engine::Engine;
use baton_roles::Drain;
use baton_types::WorkerId;

use crate::events::{Life, Process};
use crate::membership::Registration;
use crate::stream::Micros;
use crate::world::World;

impl World {
    pub(crate) fn life_of(&self, process: Process) -> Life {
        match process {
            Process::Router(place) => self.routers.get(place).map_or(0, |router| router.life),
            Process::Prefill(place) => self.prefills[place].life,
            Process::Decode(place) => self.decodes[place].life,
            Process::KvStore(place) => self.kv_stores[place].life,
            Process::Registry => 0,
        }
    }

    pub(crate) fn id_of(&self, process: Process) -> Option<WorkerId> {
        match process {
            Process::Prefill(place) => Some(self.prefills[place].id),
            Process::Decode(place) => Some(self.decodes[place].id),
            Process::KvStore(place) => Some(self.kv_stores[place].id),
            _ => None,
        }
    }

    /// All workers that there ever were places for.
    pub(crate) fn workers(&self) -> impl Iterator<Item = Process> + use<> {
        let prefills = (0..self.prefills.len()).map(Process::Prefill);
        let decodes = (0..self.decodes.len()).map(Process::Decode);
        prefills.chain(decodes).chain((0..self.kv_stores.len()).map(Process::KvStore))
    }

    /// A worker's engine, unless its thread has it now.
    pub(crate) fn engine_of(&self, process: Process) -> Option<&Engine> {
        Some(match process {
            Process::Prefill(place) => self.prefills[place].thread.as_ref()?.core.engine(),
            Process::Decode(place) => self.decodes[place].thread.as_ref()?.core.engine(),
            Process::KvStore(place) => self.kv_stores[place].thread.as_ref()?.core.engine(),
            _ => return None,
        })
    }

    pub(crate) fn process_at(&self, address: &str) -> Option<Process> {
        Process::at(address)
    }

    /// Whether somebody listens at the process's address.
    pub(crate) fn is_alive(&self, process: Process) -> bool {
        match process {
            Process::Prefill(place) => self.prefills[place].alive,
            Process::Decode(place) => self.decodes[place].alive,
            Process::KvStore(place) => self.kv_stores[place].alive,
            _ => true,
        }
    }

    /// Whether a worker takes requests.
    pub(crate) fn serves(&self, process: Process) -> bool {
        match process {
            Process::Prefill(place) => self.prefills[place].alive && self.prefills[place].drain.serves(),
            Process::Decode(place) => self.decodes[place].alive && self.decodes[place].drain.serves(),
            Process::KvStore(place) => self.kv_stores[place].alive && self.kv_stores[place].drain.serves(),
            _ => true,
        }
    }

    pub(crate) fn registration(&mut self, process: Process) -> Option<&mut Option<Registration>> {
        match process {
            Process::Prefill(place) => Some(&mut self.prefills[place].registration),
            Process::Decode(place) => Some(&mut self.decodes[place].registration),
            Process::KvStore(place) => Some(&mut self.kv_stores[place].registration),
            _ => None,
        }
    }

    pub(crate) fn drain_of(&mut self, process: Process) -> Option<&mut Drain> {
        match process {
            Process::Prefill(place) => Some(&mut self.prefills[place].drain),
            Process::Decode(place) => Some(&mut self.decodes[place].drain),
            Process::KvStore(place) => Some(&mut self.kv_stores[place].drain),
            _ => None,
        }
    }

    fn frozen(&self, process: Process) -> Option<(Micros, Micros)> {
        let frozen = match process {
            Process::Router(place) => self.routers[place].frozen,
            Process::Prefill(place) => self.prefills[place].frozen,
            Process::Decode(place) => self.decodes[place].frozen,
            Process::KvStore(place) => self.kv_stores[place].frozen,
            Process::Registry => None,
        };
        frozen.filter(|(_, until)| *until > self.now)
    }

    /// When a worker's last freeze ended; 0 if there was none.
    pub(crate) fn thawed_at(&self, process: Process) -> Micros {
        let frozen = match process {
            Process::Prefill(place) => self.prefills[place].frozen,
            Process::Decode(place) => self.decodes[place].frozen,
            Process::KvStore(place) => self.kv_stores[place].frozen,
            _ => None,
        };
        frozen.map_or(0, |(_, until)| until)
    }

    /// Until when a process is frozen, if it is.
    pub(crate) fn frozen_until(&self, process: Process) -> Option<Micros> {
        self.frozen(process).map(|(_, until)| until)
    }

    pub(crate) fn frozen_since(&self, process: Process) -> Option<Micros> {
        self.frozen(process).map(|(since, _)| since)
    }

    pub(crate) fn set_apart(&mut self, a: Process, b: Process, until: Micros) {
        let now = self.now;
        let apart = self.apart.entry((a.min(b), a.max(b))).or_insert((now, until));
        *apart = if apart.1 < now { (now, until) } else { (apart.0, apart.1.max(until)) };
    }

    fn parted(&self, a: Process, b: Process) -> Option<(Micros, Micros)> {
        self.apart.get(&(a.min(b), a.max(b))).copied().filter(|(_, until)| *until > self.now)
    }

    /// Until when two processes cannot reach each other, if they cannot.
    pub(crate) fn apart(&self, a: Process, b: Process) -> Option<Micros> {
        self.parted(a, b).map(|(_, until)| until)
    }

    pub(crate) fn apart_since(&self, a: Process, b: Process) -> Option<Micros> {
        self.parted(a, b).map(|(since, _)| since)
    }
}
