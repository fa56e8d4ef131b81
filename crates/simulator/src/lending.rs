//! What a worker lends to others: the real ledger, and beside it the checker's own record (I2, I3).

use baton_handoff::{Descriptor, FenceState, Host as Machine, ReceiverEvent, TransferError};
use baton_roles::Loan;
use baton_types::Epoch;

use crate::ends::Lent;
use crate::events::{Event, Process};
use crate::fetched::forget;
use crate::pool::each;
use crate::stream::Micros;
use crate::world::World;
use crate::{Sabotage, Violation};

impl World {
    /// Makes a reservation, as the receiving end of handoffs does: enters it in the ledger and returns its descriptor.
    pub(crate) fn lend_out(&mut self, here: Process, loan: Loan) -> Result<Result<Vec<u8>, TransferError>, Violation> {
        let Loan { seq, epoch, tokens, first, blocks, lease } = loan;
        // I3: what comes for an earlier loan must not be taken for this one's.
        if self.receivers[here].lends.values().any(|other| *other == epoch) {
            return Err(self.violation("I3", format!("{here} lends blocks under {epoch} again")));
        }
        self.receivers[here].lends.insert(seq, epoch);
        let sequence = self.receivers[here].sequences.get(&seq).cloned().unwrap_or_default();
        let (key, at) = (self.random.bits(), self.clock_now(here) + lease);
        let receiver = &mut self.receivers[here];
        if let Err(error) = receiver.ledger.reserve(epoch, key, &blocks, at) {
            return Ok(Err(error));
        }
        // I3, by the checker's own record.
        let taken = receiver.memory.take_alone(&blocks, epoch);
        forget(&mut receiver.fetched, each(&blocks));
        let target = Descriptor {
            worker: receiver.id,
            epoch,
            key,
            tokens,
            first: first.clone(),
            counts: blocks.iter().map(|list| list.len() as u32).collect(),
            layout: receiver.memory.geometry.layout.clone(),
            device: false,
            host: Machine { boot: [1; 16], place: 1 },
            unix: b"simulated".to_vec(),
            address: here.address(),
            port: 1,
        };
        receiver.books.insert(epoch, Lent { tokens: sequence, first, blocks });
        taken.map_err(|what| self.violation("I3", what))?;
        self.summary.handoffs += 1;
        self.milestone("lent", here);
        self.after(here)?;
        Ok(Ok(target.encode()))
    }

    /// Ends the lease of verified blocks.
    pub(crate) fn release(&mut self, here: Process, epoch: Epoch) -> Result<(), Violation> {
        self.receivers[here].ledger.release(epoch);
        self.after(here)
    }

    /// Takes a reservation back.
    pub(crate) fn fence(&mut self, here: Process, epoch: Epoch) -> Result<FenceState, Violation> {
        self.summary.withdrawn += 1;
        let state = self.receivers[here].ledger.fence(epoch);
        if state == FenceState::Clear {
            self.unlend(here, epoch);
        }
        self.after(here)?;
        Ok(state)
    }

    /// Ends a loan: nobody may write under this epoch any more.
    pub(crate) fn unlend(&mut self, here: Process, epoch: Epoch) {
        self.receivers[here].memory.give_back(epoch);
        self.receivers[here].books.remove(&epoch);
    }

    /// Passes on the ledger's events and fences, and plans the next look at leases.
    pub(crate) fn after(&mut self, here: Process) -> Result<(), Violation> {
        let mut news = false;
        while let Some(event) = self.receivers[here].ledger.next_event() {
            news = true;
            self.received(here, &event)?;
            if self.broken(Sabotage::AnnounceTwice) && matches!(event, ReceiverEvent::Verified { .. }) {
                self.received(here, &event)?;
            }
            self.pass_on(here, event);
        }
        if news {
            self.wake_engine(here);
        }
        for (line, epoch) in self.receivers[here].ledger.take_fences() {
            if self.broken(Sabotage::LoseFences) {
                continue;
            }
            if let Some(session) = self.receivers[here].sessions.get_mut(&line) {
                session.fences.push(epoch);
                self.wake_receiver(line);
            }
        }
        if let Some(at) = self.receivers[here].ledger.next_expiry() {
            let at = self.micros(here, at).max(self.now) + self.random.below(crate::world::LAZINESS);
            self.plan_desk(here, at);
        }
        Ok(())
    }

    fn plan_desk(&mut self, process: Process, at: Micros) {
        let life = self.life_of(process);
        if self.receivers[process].desk.set(at.max(self.now + 1), self.now) {
            self.events.plan(at.max(self.now + 1), Event::Desk { process, life });
        }
    }

    /// Ends reservations whose lease has expired.
    pub(crate) fn desk(&mut self, here: Process) -> Result<(), Violation> {
        if self.broken(Sabotage::IgnoreLeases) {
            return Ok(());
        }
        let now = self.clock_now(here);
        self.receivers[here].ledger.expire(now);
        self.after(here)
    }

    /// Checks an event of the ledger against the checker's own record.
    fn received(&mut self, here: Process, event: &ReceiverEvent) -> Result<(), Violation> {
        match event {
            ReceiverEvent::Verified { epoch, .. } => {
                let receiver = &mut self.receivers[here];
                let Some(lent) = receiver.books.get(epoch) else {
                    return Err(self.violation("reported once", format!("{epoch} is verified after its end")));
                };
                receiver.verified.insert(*epoch);
                *self.summary.looked.entry("I2").or_default() += 1;
                // I2: the checker computes the KV of these tokens; the code under test only compares digests.
                let right = receiver.memory.compare(&lent.tokens, &lent.first, &lent.blocks);
                right.map_err(|what| self.violation("I2", format!("{epoch}: {what}")))?;
                self.prefix_is_here(here, *epoch);
                self.unlend(here, *epoch);
                self.summary.verified += 1;
                self.note(|| format!("{here} has verified {epoch}"));
                self.milestone("verified", here);
            }
            ReceiverEvent::Failed { epoch, error, .. } => {
                if !self.receivers[here].books.contains_key(epoch) {
                    return Err(self.violation("reported once", format!("{epoch} fails after its end: {error}")));
                }
                self.note(|| format!("{here}: {epoch} fails: {error}"));
                if matches!(error, TransferError::Expired { .. }) {
                    self.milestone("lease-expired", here);
                }
                *self.summary.handoffs_failed.entry(error.cause()).or_default() += 1;
                let changed =
                    matches!(error.cause(), "corruption" | "incomplete" | "protocol" | "refused" | "peer_lost");
                if self.options.calm && changed {
                    return Err(self.violation("delivery", format!("{epoch} fails though nothing goes wrong: {error}")));
                }
            }
            ReceiverEvent::Fenced { epoch } => self.unlend(here, *epoch),
        }
        Ok(())
    }
}
