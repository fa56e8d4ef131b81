//! What happens to connections and processes from outside, at random times. What becomes of frames is the outbox's.

use baton_membership::RenewalInput;
use baton_roles::Input;

use crate::Violation;
use crate::events::{Event, Life, Line, Place, Process};
use crate::faults::Fault;
use crate::world::{Connection, World};

impl World {
    /// A random line, if there is one.
    fn any_line(&mut self) -> Option<Line> {
        let open = |connection: &Connection| connection.up.is_open() && connection.down.is_open();
        let alive: Vec<Line> = self.lines.iter().filter(|(_, c)| open(c)).map(|(line, _)| *line).collect();
        (!alive.is_empty()).then(|| alive[self.random.below(alive.len() as u64) as usize])
    }

    /// A random worker that lives.
    fn any_worker(&mut self) -> Option<Process> {
        let prefills = (0..self.prefills.len()).map(Process::Prefill);
        let decodes = (0..self.decodes.len()).map(Process::Decode);
        let alive: Vec<Process> = prefills.chain(decodes).filter(|process| self.is_alive(*process)).collect();
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
                self.faults.count(fault);
                let until = self.now + self.random.within(10_000, 15_000_000);
                self.lose_registry(until, fault == Fault::RegistryEmptied);
            }
            Some(Fault::Drain) if self.random.chance(200) => self.drain_some(),
            Some(Fault::Join) if self.random.chance(200) => self.join_some()?,
            _ => {}
        }
        Ok(())
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

    /// Ends a connection; either end learns of it in its time.
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
        self.shaken = true;
        self.note(|| format!("{process} stands still until {until}"));
        let now = self.now;
        let frozen = match process {
            Process::Router(place) => &mut self.routers[place].frozen,
            Process::Prefill(place) => &mut self.prefills[place].frozen,
            Process::Decode(place) => &mut self.decodes[place].frozen,
            Process::Registry => return,
        };
        let since = frozen.filter(|(_, until)| *until >= now).map_or(now, |(since, _)| since);
        *frozen = Some((since, until.max(frozen.map_or(0, |(_, until)| until))));
    }

    /// Two processes that talk to each other.
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
        self.shaken = true;
        self.note(|| format!("{a} and {b} cannot reach each other until {until}"));
        self.set_apart(a, b, until);
        let (prefill, decode) = match (a, b) {
            (Process::Prefill(prefill), Process::Decode(decode))
            | (Process::Decode(decode), Process::Prefill(prefill)) => (prefill, decode),
            _ => return,
        };
        let between = |c: &Connection| c.prefill == prefill && c.decode == decode;
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
        self.break_link(link, made, false)
    }

    /// The process dies with everything in it. `again`: another takes its place and address.
    pub(crate) fn kill(&mut self, process: Process, again: bool) {
        self.note(|| format!("{process} dies"));
        if !matches!(process, Process::Router(_)) {
            self.break_links_of(process);
        }
        let outcome = match process {
            Process::Router(place) => {
                self.orphans(place);
                self.forget_links(place);
                let life = self.life();
                let router = crate::router::Router::new(self, place, life);
                self.routers[place] = router;
                Ok(())
            }
            Process::Prefill(place) => self.restart_prefill(place, again),
            Process::Decode(place) => self.restart_decode(place, again),
            Process::Registry => Ok(()),
        };
        if let Err(violation) = outcome {
            self.broken_by.get_or_insert(violation);
        }
    }

    fn restart_decode(&mut self, place: Place, again: bool) -> Result<(), Violation> {
        let life = self.life();
        let next = crate::decode::Decode::new(self, life, self.limits.clone())?;
        let before = std::mem::replace(&mut self.decodes[place], next);
        self.cut_lines(|connection| connection.decode_life == before.life, false);
        self.begin_life(Process::Decode(place), again)
    }

    pub(crate) fn restart_prefill(&mut self, place: Place, again: bool) -> Result<(), Violation> {
        let life = self.life();
        let next = crate::prefill::Prefill::new(self, life)?;
        let before = std::mem::replace(&mut self.prefills[place], next);
        self.cut_lines(|connection| connection.prefill_life == before.life, true);
        self.begin_life(Process::Prefill(place), again)
    }

    /// `died`: the peer's system tells that the process is gone.
    fn cut_lines(&mut self, of: impl Fn(&Connection) -> bool, died: bool) {
        let lines: Vec<Line> = self.lines.iter().filter(|(_, c)| of(c)).map(|(line, _)| *line).collect();
        for line in lines {
            self.cut(line);
            if died {
                let at = self.now + self.random.within(1, 50_000);
                self.events.plan(at, Event::Died { line });
            }
        }
    }

    fn begin_life(&mut self, process: Process, again: bool) -> Result<(), Violation> {
        if again {
            return self.register(process);
        }
        match process {
            Process::Prefill(place) => self.prefills[place].alive = false,
            Process::Decode(place) => self.decodes[place].alive = false,
            _ => {}
        }
        Ok(())
    }

    /// A worker takes nothing new, ends what it has, and leaves.
    fn drain_some(&mut self) {
        let Some(process) = self.any_worker() else { return };
        // Somebody must be left to decode.
        let decodes = (0..self.decodes.len()).filter(|place| self.serves(Process::Decode(*place))).count();
        if matches!(process, Process::Decode(_)) && decodes < 2 || !self.serves(process) {
            return;
        }
        self.faults.count(Fault::Drain);
        self.drain(process);
    }

    pub(crate) fn drain(&mut self, process: Process) {
        self.note(|| format!("{process} drains"));
        let mut member = self.member(process);
        member.draining = true;
        self.renew(process, RenewalInput::Changed(member));
        match process {
            Process::Prefill(place) => {
                self.prefills[place].drains = true;
                self.prefills[place].inbox.push_back(Input::Drain);
            }
            Process::Decode(place) => {
                self.decodes[place].drains = true;
                self.decodes[place].inbox.push_back(Input::Drain);
            }
            _ => {}
        }
        self.wake_engine(process);
        let (at, life) = (self.now + 20_000, self.life_of(process));
        self.events.plan(at, Event::DrainOver { process, life });
    }

    /// A draining worker looks whether it is idle; then it deregisters.
    pub(crate) fn drain_over(&mut self, process: Process, life: Life) {
        let idle = match process {
            Process::Prefill(place) => {
                self.prefills[place].thread.as_ref().is_some_and(|thread| drained(&thread.core.snapshot()))
            }
            Process::Decode(place) => {
                self.decodes[place].thread.as_ref().is_some_and(|thread| drained(&thread.core.snapshot()))
            }
            _ => return,
        };
        match idle {
            true => self.renew(process, RenewalInput::Revoke),
            false => self.events.plan(self.now + 50_000, Event::DrainOver { process, life }),
        }
    }

    /// A worker that has drained and is deregistered ends.
    pub(crate) fn deregistered(&mut self, process: Process) {
        self.kill(process, false);
    }

    fn join_some(&mut self) -> Result<(), Violation> {
        if self.prefills.len() + self.decodes.len() >= 8 {
            return Ok(());
        }
        self.faults.count(Fault::Join);
        let decode = self.random.chance(500);
        self.join(decode)
    }

    pub(crate) fn join(&mut self, decode: bool) -> Result<(), Violation> {
        let life = self.life();
        let process = match decode {
            true => {
                let next = crate::decode::Decode::new(self, life, self.limits.clone())?;
                self.decodes.push(next);
                Process::Decode(self.decodes.len() - 1)
            }
            false => {
                let next = crate::prefill::Prefill::new(self, life)?;
                self.prefills.push(next);
                Process::Prefill(self.prefills.len() - 1)
            }
        };
        self.note(|| format!("{process} joins"));
        self.register(process)
    }
}

fn drained(snapshot: &baton_roles::Snapshot) -> bool {
    snapshot.draining && snapshot.idle
}
