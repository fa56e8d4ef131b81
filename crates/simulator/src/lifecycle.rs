//! Processes die, are replaced at their address, drain and join.

use std::time::Duration;

use baton_membership::{Member, RenewalInput};
use baton_roles::{Drain, DrainEffect, DrainInput, Input};

use crate::Violation;
use crate::events::{Event, Life, Line, Place, Process};
use crate::faults::Fault;
use crate::stream::Micros;
use crate::world::{Connection, World};

/// How long a drain may take unless somebody is in a hurry.
pub(crate) const DRAIN: Micros = 30_000_000;

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
            Process::KvStore(place) => self.restart_kv_store(place, again),
            Process::Registry => Ok(()),
        };
        if let Err(violation) = outcome {
            self.broken_by.get_or_insert(violation);
        }
    }

    fn restart_decode(&mut self, place: Place, again: bool) -> Result<(), Violation> {
        let life = self.life();
        let kept = self.decodes[place].kept.take();
        let (next, receiver, sender) = crate::decode::Decode::new(self, life, kept)?;
        let before = std::mem::replace(&mut self.decodes[place], next);
        self.receivers.set(Process::Decode(place), receiver);
        self.senders.set(Process::Decode(place), sender);
        self.cut_ends(before.life);
        self.begin_life(Process::Decode(place), again)
    }

    pub(crate) fn restart_prefill(&mut self, place: Place, again: bool) -> Result<(), Violation> {
        let life = self.life();
        let kept = self.prefills[place].kept.take();
        let (next, receiver, sender) = crate::prefill::Prefill::new(self, life, kept)?;
        let before = std::mem::replace(&mut self.prefills[place], next);
        self.receivers.set(Process::Prefill(place), receiver);
        self.senders.set(Process::Prefill(place), sender);
        self.cut_ends(before.life);
        self.begin_life(Process::Prefill(place), again)
    }

    /// Cuts the connections for which `of` holds. `died`: the operating system also tells the peer that the process is gone.
    pub(crate) fn cut_lines(&mut self, of: impl Fn(&Connection) -> bool, died: bool) {
        let lines: Vec<Line> = self.lines.iter().filter(|(_, c)| of(c)).map(|(line, _)| *line).collect();
        for line in lines {
            self.cut(line);
            if died {
                let at = self.now + self.random.within(1, 50_000);
                self.events.plan(at, Event::Died { line });
            }
        }
    }

    /// Cuts the connections of a process that has died.
    pub(crate) fn cut_ends(&mut self, life: Life) {
        self.cut_lines(|connection| connection.to_life == life, false);
        self.cut_lines(|connection| connection.from_life == life, true);
    }

    pub(crate) fn begin_life(&mut self, process: Process, again: bool) -> Result<(), Violation> {
        if again {
            return self.register(process);
        }
        match process {
            Process::Prefill(place) => self.prefills[place].alive = false,
            Process::Decode(place) => self.decodes[place].alive = false,
            Process::KvStore(place) => self.kv_stores[place].alive = false,
            _ => {}
        }
        Ok(())
    }

    /// Drains a random worker: it takes no new requests, finishes those it has, and leaves. A worker that drains already may be
    /// told to leave at once.
    pub(crate) fn drain_some(&mut self) {
        let Some(process) = self.any_worker() else { return };
        let cuts = self.faults.may_cut_drains() && !self.options.without.contains(&Fault::DrainCut);
        if !self.serves(process) {
            if cuts && self.random.chance(500) {
                self.drain_on(process, DrainInput::Forced);
            }
            return;
        }
        // Somebody must be left to decode.
        let decodes = (0..self.decodes.len()).filter(|place| self.serves(Process::Decode(*place))).count();
        if matches!(process, Process::Decode(_)) && decodes < 2 {
            return;
        }
        self.faults.count(Fault::Drain);
        let short = cuts && self.random.chance(500);
        let patience = if short { self.random.within(1_000, 50_000) } else { DRAIN };
        self.drain(process, patience);
    }

    /// Drains a worker. It leaves after `patience` at the latest.
    pub(crate) fn drain(&mut self, process: Process, patience: Micros) {
        self.note(|| format!("{process} drains, for {patience} µs at most"));
        let until = self.clock_now(process) + Duration::from_micros(patience);
        let life = self.life_of(process);
        if self.drain_of(process).is_some_and(|drain| drain.serves()) {
            self.leaving.insert(process, (life, self.micros(process, until)));
        }
        self.drain_on(process, DrainInput::Asked { until });
        if let Some(at) = self.drain_of(process).and_then(|drain| drain.next_wake()) {
            let at = self.micros(process, at);
            self.events.plan(at, Event::DrainOver { process, life });
        }
    }

    /// Feeds an input to a worker's drain and carries out what follows.
    pub(crate) fn drain_on(&mut self, process: Process, input: DrainInput) {
        let now = self.clock_now(process);
        let Some(drain) = self.drain_of(process) else { return };
        drain.feed(input, now);
        while let Some(effect) = self.drain_of(process).and_then(Drain::next_effect) {
            self.drain_effect(process, effect);
        }
    }

    fn drain_effect(&mut self, process: Process, effect: DrainEffect) {
        match effect {
            DrainEffect::Announce => {
                let member = Member { draining: true, ..self.member(process) };
                self.renew(process, RenewalInput::Changed(member));
            }
            // Nobody in the simulation asks for its health.
            DrainEffect::Refuse => {}
            DrainEffect::DrainEngine => {
                match process {
                    Process::Prefill(place) => self.prefills[place].inbox.push_back(Input::Drain),
                    Process::Decode(place) => self.decodes[place].inbox.push_back(Input::Drain),
                    Process::KvStore(place) => self.kv_stores[place].inbox.push_back(Input::Drain),
                    _ => {}
                }
                self.wake_engine(process);
            }
            DrainEffect::CutOff(sequences) => {
                self.note(|| format!("{process} leaves with {sequences} sequences"));
                if !matches!(process, Process::KvStore(_)) {
                    self.faults.count(Fault::DrainCut);
                }
                self.milestone("drain-cut", process);
            }
            DrainEffect::Revoke => {
                self.leaving.remove(&process);
                self.renew(process, RenewalInput::Revoke);
            }
            DrainEffect::Close => self.kill(process, false),
        }
    }

    /// A worker's registration has ended.
    pub(crate) fn deregistered(&mut self, process: Process) {
        match self.serves(process) {
            // The registry has refused it.
            true => self.kill(process, false),
            false => self.drain_on(process, DrainInput::Revoked),
        }
        if self.is_alive(process) {
            let violation = self.violation("I5", format!("{process} has left the registry and stays"));
            self.broken_by.get_or_insert(violation);
        }
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
                let (next, receiver, sender) = crate::decode::Decode::new(self, life, None)?;
                self.decodes.push(next);
                let process = Process::Decode(self.decodes.len() - 1);
                self.receivers.set(process, receiver);
                self.senders.set(process, sender);
                process
            }
            false => {
                let (next, receiver, sender) = crate::prefill::Prefill::new(self, life, None)?;
                self.prefills.push(next);
                let process = Process::Prefill(self.prefills.len() - 1);
                self.receivers.set(process, receiver);
                self.senders.set(process, sender);
                process
            }
        };
        self.give_clock(process);
        self.note(|| format!("{process} joins"));
        self.register(process)
    }
}
