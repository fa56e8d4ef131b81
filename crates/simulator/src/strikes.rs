//! Faults of connections and processes, at random times. Faults of single frames are in the outbox.

use baton_policy::Broken;

use crate::Violation;
use crate::events::{Event, Line, Place, Process};
use crate::faults::Fault;
use crate::stream::Micros;
use crate::world::{Connection, World};

impl World {
    /// A random line, if there is one.
    fn any_line(&mut self) -> Option<Line> {
        let open = |connection: &Connection| connection.up.is_open() && connection.down.is_open();
        let alive: Vec<Line> = self.lines.iter().filter(|(_, c)| open(c)).map(|(line, _)| *line).collect();
        (!alive.is_empty()).then(|| alive[self.random.below(alive.len() as u64) as usize])
    }

    /// A random worker that lives, and is no KV store.
    pub(crate) fn any_worker(&mut self) -> Option<Process> {
        let computes = |process: &Process| !matches!(process, Process::KvStore(_));
        let alive: Vec<Process> = self.workers().filter(computes).filter(|process| self.is_alive(*process)).collect();
        (!alive.is_empty()).then(|| alive[self.random.below(alive.len() as u64) as usize])
    }

    pub(crate) fn strike(&mut self) -> Result<(), Violation> {
        if self.healed {
            return Ok(());
        }
        let next = self.now + self.random.within(1, self.faults.pause);
        self.events.plan(next, Event::Strike);
        match self.faults.strike(&mut self.random) {
            Some(Fault::Corrupt) => self.corrupt(),
            Some(Fault::Stall) => self.stall(),
            Some(Fault::Cut) => {
                if let Some(line) = self.any_line() {
                    self.faults.count(Fault::Cut);
                    self.cut(line);
                }
            }
            Some(Fault::Stranger) => self.stranger(),
            Some(Fault::Restart) if self.random.chance(200) => {
                if let Some(process) = self.any_worker() {
                    self.faults.count(Fault::Restart);
                    self.kill(process, true);
                }
            }
            Some(Fault::Freeze) if self.random.chance(300) => self.freeze_some(),
            Some(Fault::Partition) if self.random.chance(300) => self.partition_some(),
            Some(Fault::Break) if self.random.chance(300) => self.break_some()?,
            Some(Fault::RouterRestart) if self.random.chance(100) => {
                self.faults.count(Fault::RouterRestart);
                let place = self.random.below(self.routers.len() as u64) as Place;
                self.kill(Process::Router(place), true);
            }
            Some(fault @ (Fault::RegistryDown | Fault::RegistryEmptied))
                if self.registry.is_up() && self.random.chance(200) =>
            {
                let back = self.registry_fails(fault);
                if self.random.chance(400) {
                    let again = back + self.random.within(1_000, 400_000);
                    self.events.plan(again, Event::RegistryFails { fault });
                }
            }
            Some(Fault::Drain) if self.random.chance(200) => self.drain_some(),
            Some(Fault::Join) if self.random.chance(200) => self.join_some()?,
            _ => {}
        }
        Ok(())
    }

    /// The registry fails again soon after it was back.
    pub(crate) fn registry_fails_again(&mut self, fault: Fault) {
        if !self.healed && self.registry.is_up() {
            self.registry_fails(fault);
        }
    }

    /// Takes the registry down. Returns when it is back.
    fn registry_fails(&mut self, fault: Fault) -> Micros {
        self.faults.count(fault);
        let until = self.now + self.random.within(10_000, 15_000_000);
        self.lose_registry(until, fault == Fault::RegistryEmptied);
        until
    }

    fn corrupt(&mut self) {
        let Some(line) = self.any_line() else { return };
        let up = self.random.chance(700);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        let stream = if up { &mut connection.up } else { &mut connection.down };
        if stream.corrupt(&mut self.random) {
            self.faults.count(Fault::Corrupt);
        }
    }

    fn stall(&mut self) {
        let Some(line) = self.any_line() else { return };
        let until = self.now + self.random.within(1_000, 400_000);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        let stream = if self.random.chance(500) { &mut connection.up } else { &mut connection.down };
        let last = stream.stall(until).unwrap_or(until);
        self.faults.count(Fault::Stall);
        self.wake_both(line, last);
    }

    /// Cuts a connection. Each end learns of it after a delay of its own.
    pub(crate) fn cut(&mut self, line: Line) {
        let (a, b) = (self.random.within(1, 50_000), self.random.within(1, 50_000));
        let now = self.now;
        let Some(connection) = self.lines.get_mut(&line) else { return };
        connection.up.cut(now, now + a);
        connection.down.cut(now, now + b);
        self.wake_both(line, now + a);
        self.wake_both(line, now + b);
    }

    fn freeze_some(&mut self) {
        self.faults.count(Fault::Freeze);
        let until = self.now + self.random.within(1_000, 4_000_000);
        let process = match self.random.chance(150) {
            true => Some(Process::Router(self.random.below(self.routers.len() as u64) as Place)),
            false => self.any_worker(),
        };
        process.into_iter().for_each(|process| self.freeze(process, until));
    }

    pub(crate) fn freeze(&mut self, process: Process, until: u64) {
        self.shaken |= !matches!(process, Process::KvStore(_));
        self.note(|| format!("{process} stands still until {until}"));
        let now = self.now;
        let frozen = match process {
            Process::Router(place) => &mut self.routers[place].frozen,
            Process::Prefill(place) => &mut self.prefills[place].frozen,
            Process::Decode(place) => &mut self.decodes[place].frozen,
            Process::KvStore(place) => &mut self.kv_stores[place].frozen,
            Process::Registry => return,
        };
        let since = frozen.filter(|(_, until)| *until >= now).map_or(now, |(since, _)| since);
        *frozen = Some((since, until.max(frozen.map_or(0, |(_, until)| until))));
    }

    /// Partitions two random processes that talk to each other.
    fn partition_some(&mut self) {
        let Some(worker) = self.any_worker() else { return };
        let other = match self.random.below(3) {
            0 => Process::Registry,
            1 => Process::Router(self.random.below(self.routers.len() as u64) as Place),
            _ => match worker {
                Process::Prefill(_) => Process::Decode(self.random.below(self.decodes.len() as u64) as Place),
                _ if self.prefills.is_empty() => return,
                _ => Process::Prefill(self.random.below(self.prefills.len() as u64) as Place),
            },
        };
        self.faults.count(Fault::Partition);
        let until = self.now + self.random.within(10_000, 5_000_000);
        self.partition(worker, other, until);
    }

    pub(crate) fn partition(&mut self, a: Process, b: Process, until: u64) {
        self.shaken |= ![a, b].iter().any(|process| matches!(process, Process::KvStore(_)));
        self.note(|| format!("{a} and {b} cannot reach each other until {until}"));
        self.set_apart(a, b, until);
        let between = |c: &Connection| [(a, b), (b, a)].contains(&(c.from, c.to));
        let lines: Vec<Line> = self.lines.iter().filter(|(_, c)| between(c)).map(|(line, _)| *line).collect();
        for line in lines {
            let Some(connection) = self.lines.get_mut(&line) else { continue };
            let last = [connection.up.stall(until), connection.down.stall(until)].into_iter().flatten().max();
            self.wake_both(line, last.unwrap_or(until));
        }
    }

    fn break_some(&mut self) -> Result<(), Violation> {
        let links: Vec<_> = self.links.iter().filter(|(_, c)| !c.calls.is_empty()).map(|(l, c)| (*l, c.made)).collect();
        if links.is_empty() {
            return Ok(());
        }
        let (link, made) = links[self.random.below(links.len() as u64) as usize];
        self.faults.count(Fault::Break);
        self.note(|| format!("the connection of router {} to {} breaks", link.0, link.1));
        self.break_link(link, made, Broken::Closed)
    }
}
