//! What a decode worker lends: the real ledger, and beside it the checker's own record (I2, I3).

use baton_handoff::{Descriptor, FenceState, Host as Machine, ReceiverEvent, TransferError};
use baton_roles::decode::Command;
use baton_roles::{Input, Loan};
use baton_types::Epoch;

use crate::decode::Lent;
use crate::events::{Event, Place, Process};
use crate::fetched::forget;
use crate::pool::each;
use crate::stream::Micros;
use crate::world::World;
use crate::{Sabotage, Violation};

impl World {
    /// Makes a reservation, as the receiving end of handoffs does: enters it in the ledger and returns its descriptor.
    pub(crate) fn lend_out(&mut self, place: Place, loan: Loan) -> Result<Result<Vec<u8>, TransferError>, Violation> {
        let Loan { seq, epoch, tokens, first, blocks, lease } = loan;
        // I3: what comes for an earlier loan must not be taken for this one's.
        if self.decodes[place].lends.values().any(|other| *other == epoch) {
            return Err(self.violation("I3", format!("decode {place} lends blocks under {epoch} again")));
        }
        self.decodes[place].lends.insert(seq, epoch);
        let sequence = self.decodes[place].sequences.get(&seq).cloned().unwrap_or_default();
        let (key, at) = (self.random.bits(), self.clock_now(Process::Decode(place)) + lease);
        let decode = &mut self.decodes[place];
        if let Err(error) = decode.ledger.reserve(epoch, key, &blocks, at) {
            return Ok(Err(error));
        }
        // I3, by the checker's own record.
        let taken = decode.memory.take_alone(&blocks, epoch);
        each(&blocks).for_each(|block| forget(&mut decode.fetched, block));
        let target = Descriptor {
            worker: decode.id,
            epoch,
            key,
            tokens,
            first: first.clone(),
            counts: blocks.iter().map(|list| list.len() as u32).collect(),
            layout: decode.memory.geometry.layout.clone(),
            device: false,
            host: Machine { boot: [1; 16], place: 1 },
            unix: b"simulated".to_vec(),
            address: place.to_string(),
            port: 1,
        };
        decode.books.insert(epoch, Lent { tokens: sequence, first, blocks });
        taken.map_err(|what| self.violation("I3", what))?;
        self.summary.handoffs += 1;
        self.milestone("lent", Process::Decode(place));
        self.after(place)?;
        Ok(Ok(target.encode()))
    }

    /// Ends the lease of verified blocks.
    pub(crate) fn release(&mut self, place: Place, epoch: Epoch) -> Result<(), Violation> {
        self.decodes[place].ledger.release(epoch);
        self.after(place)
    }

    /// Takes a reservation back.
    pub(crate) fn fence(&mut self, place: Place, epoch: Epoch) -> Result<FenceState, Violation> {
        self.summary.withdrawn += 1;
        let state = self.decodes[place].ledger.fence(epoch);
        if state == FenceState::Clear {
            self.unlend(place, epoch);
        }
        self.after(place)?;
        Ok(state)
    }

    /// Ends a loan: nobody may write under this epoch any more.
    pub(crate) fn unlend(&mut self, place: Place, epoch: Epoch) {
        self.decodes[place].memory.give_back(epoch);
        self.decodes[place].books.remove(&epoch);
    }

    /// Passes on the ledger's events and fences, and plans the next look at leases.
    pub(crate) fn after(&mut self, place: Place) -> Result<(), Violation> {
        let mut news = false;
        while let Some(event) = self.decodes[place].ledger.next_event() {
            news = true;
            self.received(place, &event)?;
            if self.broken(Sabotage::AnnounceTwice) && matches!(event, ReceiverEvent::Verified { .. }) {
                self.received(place, &event)?;
            }
            self.decodes[place].inbox.push_back(Input::Command(Command::Received(event)));
        }
        if news {
            self.wake_engine(Process::Decode(place));
        }
        for (line, epoch) in self.decodes[place].ledger.take_fences() {
            if self.broken(Sabotage::LoseFences) {
                continue;
            }
            if let Some(session) = self.decodes[place].sessions.get_mut(&line) {
                session.fences.push(epoch);
                self.wake_decode(line);
            }
        }
        if let Some(at) = self.decodes[place].ledger.next_expiry() {
            let at = self.micros(Process::Decode(place), at).max(self.now) + self.random.below(crate::world::LAZINESS);
            self.plan_desk(place, at);
        }
        Ok(())
    }

    fn plan_desk(&mut self, decode: Place, at: Micros) {
        let life = self.decodes[decode].life;
        if self.decodes[decode].desk.set(at.max(self.now + 1), self.now) {
            self.events.plan(at.max(self.now + 1), Event::Desk { decode, life });
        }
    }

    /// Ends reservations whose lease has expired.
    pub(crate) fn desk(&mut self, place: Place) -> Result<(), Violation> {
        if self.broken(Sabotage::IgnoreLeases) {
            return Ok(());
        }
        let now = self.clock_now(Process::Decode(place));
        self.decodes[place].ledger.expire(now);
        self.after(place)
    }

    /// Checks an event of the ledger against the checker's own record.
    fn received(&mut self, place: Place, event: &ReceiverEvent) -> Result<(), Violation> {
        match event {
            ReceiverEvent::Verified { epoch, .. } => {
                let decode = &mut self.decodes[place];
                let Some(lent) = decode.books.get(epoch) else {
                    return Err(self.violation("reported once", format!("{epoch} is verified after its end")));
                };
                decode.verified.insert(*epoch);
                *self.summary.looked.entry("I2").or_default() += 1;
                // I2: the checker computes the KV of these tokens; the code under test only compares digests.
                let right = decode.memory.compare(&lent.tokens, &lent.first, &lent.blocks);
                right.map_err(|what| self.violation("I2", format!("{epoch}: {what}")))?;
                self.prefix_is_here(place, *epoch);
                self.unlend(place, *epoch);
                self.summary.verified += 1;
                self.note(|| format!("decode {place} has verified {epoch}"));
                self.milestone("verified", Process::Decode(place));
            }
            ReceiverEvent::Failed { epoch, error, .. } => {
                if !self.decodes[place].books.contains_key(epoch) {
                    return Err(self.violation("reported once", format!("{epoch} fails after its end: {error}")));
                }
                self.note(|| format!("decode {place}: {epoch} fails: {error}"));
                if matches!(error, TransferError::Expired { .. }) {
                    self.milestone("lease-expired", Process::Decode(place));
                }
                *self.summary.handoffs_failed.entry(error.cause()).or_default() += 1;
                let changed =
                    matches!(error.cause(), "corruption" | "incomplete" | "protocol" | "refused" | "peer_lost");
                if self.options.calm && changed {
                    return Err(self.violation("delivery", format!("{epoch} fails though nothing goes wrong: {error}")));
                }
            }
            ReceiverEvent::Fenced { epoch } => self.unlend(place, *epoch),
        }
        Ok(())
    }
}
