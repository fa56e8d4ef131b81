//! How requests end and how long things take, and whether that is right (I1, I5, I7, leases).

use baton_policy::State;
use baton_types::ErrorKind;

use crate::Violation;
use crate::client::End;
use crate::events::{Place, Process};
use crate::stream::Micros;
use crate::world::World;

/// How late a router may answer that a deadline has passed, and a decode worker may end a lease that has run out (I5).
const LATE: Micros = 100_000;
/// Longest time from a failure to the next attempt, or to the error that the client gets (I5).
const RECOVERY: Micros = 2_000_000;

impl World {
    /// I7: while the registry is down, a router must not forget a worker that it knew and that still serves.
    pub(crate) fn check_outage(&self, place: Place) -> Result<(), Violation> {
        if !self.registry.in_outage() || self.shaken {
            return Ok(());
        }
        let serves = |process: &Process| matches!(process, Process::Decode(_)) && self.serves(*process);
        let router = &self.routers[place];
        match router.knew.iter().find(|(id, process)| serves(process) && self.id_of(**process) == Some(**id)) {
            Some((id, _)) => Err(self.violation("I7", format!("router {place} has forgotten {id}, which serves"))),
            None => Ok(()),
        }
    }

    /// While some worker serves, no request fails because the registry is down (I7), nor because workers come and go.
    fn check_cause(&self, request: u64, kind: ErrorKind, message: &str) -> Result<(), Violation> {
        let mild = self.faults.counts.keys().all(|fault| fault.costs_nothing());
        if kind != ErrorKind::Unavailable || !mild || self.is_impatient(request) {
            return Ok(());
        }
        let serves = |process: &Process| matches!(process, Process::Decode(_)) && self.serves(*process);
        let router = &self.routers[self.clients[request as usize].router];
        match router.knew.values().any(serves) {
            true => Err(self.violation("I7", format!("request {request} fails though somebody serves: {message}"))),
            false => Ok(()),
        }
    }

    /// I5: what has a bound in time keeps it. Looked at again and again.
    pub(crate) fn check_bounds(&mut self) -> Result<(), Violation> {
        self.check_routers()?;
        self.check_expiries()?;
        self.check_drains()?;
        self.check_recoveries()
    }

    /// I5: after a failure, a request goes on elsewhere or ends within `RECOVERY`, unless its router is frozen.
    fn check_recoveries(&mut self) -> Result<(), Violation> {
        let bound = self.by_any_clock(RECOVERY);
        let recovering = self.routers.iter().flat_map(|router| {
            let awake = router.frozen.map_or(0, |(_, until)| until);
            router.choices.iter().filter_map(move |(request, flight)| Some((*request, flight.recovering?.max(awake))))
        });
        let recovering: Vec<(u64, Micros)> = recovering.collect();
        recovering.iter().for_each(|_| self.look_at("I5"));
        match recovering.into_iter().find(|(_, since)| since + bound < self.now) {
            Some((request, since)) => {
                let what = format!("nothing was begun for request {request} since its leg failed at {since} µs");
                Err(self.violation("I5", what))
            }
            None => Ok(()),
        }
    }

    /// I5: a router ends requests at their deadlines, and asks lost workers whether they are back.
    fn check_routers(&mut self) -> Result<(), Violation> {
        for place in 0..self.routers.len() {
            self.look_at("I5");
            self.check_deadlines(place)?;
            let router = &self.routers[place];
            let lost =
                router.fleet.members().find(|worker| worker.lost && !router.probes.contains_key(&worker.member.id));
            if let Some(worker) = lost {
                let what = format!("router {place} has lost {} and does not ask whether it is back", worker.member.id);
                return Err(self.violation("I5", what));
            }
        }
        Ok(())
    }

    /// I5: a request ends at its deadline, unless its router is frozen.
    fn check_deadlines(&self, place: Place) -> Result<(), Violation> {
        let router = &self.routers[place];
        let awake = router.frozen.map_or(0, |(_, until)| until);
        let due = |request: &u64| {
            let client = &self.clients[*request as usize];
            (client.began + self.by_any_clock(client.deadline)).max(awake) + LATE
        };
        match router.choices.keys().find(|request| due(request) < self.now) {
            Some(request) => Err(self.violation("I5", format!("request {request} goes on after its deadline"))),
            None => Ok(()),
        }
    }

    /// I5: a lease that has run out ends, unless its worker is frozen.
    fn check_expiries(&self) -> Result<(), Violation> {
        for (here, receiver) in self.receivers.iter() {
            let awake = self.thawed_at(here);
            let due = receiver.ledger.next_expiry().map(|at| self.micros(here, at).max(awake) + LATE);
            if due.is_some_and(|due| due < self.now) {
                return Err(self.violation("I5", format!("{here} does not end a lease that has run out")));
            }
        }
        Ok(())
    }

    /// I5: a worker begins to leave soon after its drain's deadline, unless it is frozen.
    fn check_drains(&self) -> Result<(), Violation> {
        for (process, (life, due)) in &self.leaving {
            let (process, awake) = (*process, self.thawed_at(*process));
            let waits =
                self.is_alive(process) && self.life_of(process) == *life && self.frozen_until(process).is_none();
            if waits && (*due).max(awake) + LATE < self.now {
                return Err(self.violation("I5", format!("{process} drains for longer than it may")));
            }
        }
        Ok(())
    }

    /// A request that waits for a worker has dropped its streams, so that no worker goes on with it.
    pub(crate) fn check_streams(&self, place: Place, request: u64) -> Result<(), Violation> {
        let Some(flight) = self.routers[place].choices.get(&request) else { return Ok(()) };
        match flight.choice.state() == State::BackingOff && flight.has_streams() {
            true => {
                Err(self
                    .violation("leases", format!("request {request} waits for a worker, and a stream of it is open")))
            }
            false => Ok(()),
        }
    }

    /// At the end of a run no router counts a request as running.
    pub(crate) fn check_leases(&self) -> Result<(), Violation> {
        for (place, router) in self.routers.iter().enumerate().filter(|(_, router)| router.choices.is_empty()) {
            if let Some(worker) = router.fleet.members().find(|worker| worker.in_flight > 0) {
                let what = format!("router {place} counts {} requests on {}", worker.in_flight, worker.member.id);
                return Err(self.violation("leases", what));
            }
        }
        Ok(())
    }

    /// Checks a request that has ended.
    pub(crate) fn check_end(&mut self, request: u64) -> Result<(), Violation> {
        self.look_at("I1");
        if self.registry.in_outage() {
            self.look_at("I7");
        }
        let layout = &self.geometry.layout;
        let client = &self.clients[request as usize];
        if let Err(wrong) = client.check(layout) {
            return Err(self.violation("I1", format!("request {request}: {wrong}")));
        }
        match &client.end {
            Some(End::Finished(_)) => {
                self.summary.finished += 1;
                let router = Process::Router(client.router);
                if !self.registry.is_up() {
                    self.milestone("finished-in-outage", router);
                }
            }
            Some(End::Failed(kind, message)) => {
                let (kind, message) = (*kind, message.clone());
                let late = kind == ErrorKind::DeadlineExceeded;
                let by_a_fast_clock = self.now + self.by_any_clock(client.deadline) - client.deadline;
                if late && by_a_fast_clock < client.began + client.deadline {
                    let what =
                        format!("request {request} is told that its deadline has passed, and it has not: {message}");
                    return Err(self.violation("I5", what));
                }
                if self.options.calm && !late && kind != ErrorKind::ResourceExhausted {
                    let what = format!("request {request} fails though nothing goes wrong: {message}");
                    return Err(self.violation("delivery", what));
                }
                // Every request is valid.
                if matches!(kind, ErrorKind::InvalidArgument | ErrorKind::NotFound | ErrorKind::TooLarge) {
                    return Err(
                        self.violation("delivery", format!("request {request} is refused as a bad one: {message}"))
                    );
                }
                self.check_cause(request, kind, &message)?;
                *self.summary.failed.entry(format!("{kind:?}")).or_default() += 1;
            }
            _ => self.summary.left += 1,
        }
        Ok(())
    }
}
