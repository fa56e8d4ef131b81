//! What became of requests, and whether that is right (I1, I5, I7).

use baton_types::ErrorKind;

use crate::Violation;
use crate::client::End;
use crate::events::{Place, Process};
use crate::faults::Fault;
use crate::world::World;

impl World {
    /// I7: while the registry is away, whoever was known and still works is not forgotten.
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

    /// Nothing fails for want of the registry (I7), nor because workers come and go, while somebody serves.
    fn check_cause(&self, request: u64, kind: ErrorKind, message: &str) -> Result<(), Violation> {
        let struck = |fault| self.faults.counts.contains_key(&fault);
        // A drain that no registry can announce costs attempts: routers learn of it by refusals.
        let unannounced = struck(Fault::Drain) && (struck(Fault::RegistryDown) || struck(Fault::RegistryEmptied));
        let mild = self.faults.counts.keys().all(|fault| fault.costs_nothing()) && !unannounced;
        if kind != ErrorKind::Unavailable || !mild {
            return Ok(());
        }
        let serves = |process: &Process| matches!(process, Process::Decode(_)) && self.serves(*process);
        let router = &self.routers[self.clients[request as usize].router];
        match router.knew.values().any(serves) {
            true => Err(self.violation("I7", format!("request {request} fails though somebody serves: {message}"))),
            false => Ok(()),
        }
    }

    /// What ended must have ended rightly.
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
            Some(End::Finished(_)) => self.summary.finished += 1,
            Some(End::Failed(kind, message)) => {
                let (kind, message) = (*kind, message.clone());
                let late = kind == ErrorKind::DeadlineExceeded;
                if late && self.now < client.began + client.deadline {
                    let what =
                        format!("request {request} is told that its deadline has passed, and it has not: {message}");
                    return Err(self.violation("I5", what));
                }
                if self.options.calm && !late && kind != ErrorKind::ResourceExhausted {
                    let what = format!("request {request} fails though nothing goes wrong: {message}");
                    return Err(self.violation("delivery", what));
                }
                // Every request is a good one.
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
        self.unended = self.unended.saturating_sub(1);
        Ok(())
    }
}
