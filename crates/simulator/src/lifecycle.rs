//! Processes die, are replaced at their address, drain and join.

use baton_membership::RenewalInput;
use baton_roles::Input;

use crate::Violation;
use crate::events::{Event, Life, Line, Place, Process};
use crate::faults::Fault;
use crate::world::{Connection, World};

impl World {
    /// Kills a process and all its state. `again`: another takes its place and address.
    pub(crate) fn kill(&mut self, process: Process, again: bool) {
        self.note(|| format!("{process} dies"));
        if !matches!(process, Process::Router(_)) {
            self.break_links_of(process);
        }
        let outcome = match process {
            Process::Router(place) => {
                let checked = self.orphans(place);
                self.forget_links(place);
                let life = self.life();
                let router = crate::router::Router::new(self, place, life);
                self.routers[place] = router;
                checked
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

    /// Cuts the connections for which `of` holds. `died`: the operating system also tells the peer that the process is gone.
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

    /// Drains a random worker: it takes no new requests, finishes those it has, and leaves.
    pub(crate) fn drain_some(&mut self) {
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

    /// Deregisters a draining worker once it is idle.
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

    /// Ends a worker that has drained and is deregistered.
    pub(crate) fn deregistered(&mut self, process: Process) {
        self.kill(process, false);
    }

    pub(crate) fn join_some(&mut self) -> Result<(), Violation> {
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
        self.give_clock(process);
        self.note(|| format!("{process} joins"));
        self.register(process)
    }
}

fn drained(snapshot: &baton_roles::Snapshot) -> bool {
    snapshot.draining && snapshot.idle
}
