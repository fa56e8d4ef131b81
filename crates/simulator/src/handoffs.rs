//! A prefill worker's handoffs: writes that wait for room, completions, aborts, and the reports of their ends.

use std::sync::PoisonError;

use baton_handoff::{Done, Quiet, TransferError};
use baton_roles::prefill::Command;
use baton_roles::{Input, StepLaunch, exchange};
use baton_types::SeqId;

use crate::Violation;
use crate::events::{Place, Process};
use crate::prefill::{Told, Waiting};
use crate::world::World;

impl World {
    pub(crate) fn layer_stored(
        &mut self,
        place: Place,
        launch: &mut StepLaunch,
        layer: u32,
    ) -> Result<bool, Violation> {
        if self.prefills[place].waiting.is_empty() {
            let patience = self.clock_now(Process::Prefill(place)) + self.limits.room;
            let mut writes = Vec::new();
            launch.stored(layer, |write| {
                writes.push((write.seq, write.group, write.layer, write.pairs.to_vec()));
                Ok(())
            });
            for (seq, group, layer, pairs) in writes {
                let prefill = &mut self.prefills[place];
                let Some(id) = prefill.of(seq) else { continue };
                for (block, _) in &pairs {
                    prefill.memory.keep(group, *block, id);
                }
                let Some(handoff) = prefill.handoffs.get_mut(&id) else { continue };
                let ops = handoff.writes.write(group, layer, &pairs, 0);
                let ops = ops.map_err(|error| self.violation("I8", format!("prefill {place}: {error}")))?;
                let waiting = |op| Waiting { handoff: id, op, patience };
                self.prefills[place].waiting.extend(ops.into_iter().map(waiting));
            }
        }
        let now = self.clock_now(Process::Prefill(place));
        while let Some(waiting) = self.prefills[place].waiting.pop_front() {
            let prefill = &mut self.prefills[place];
            let Some(handoff) = prefill.handoffs.get_mut(&waiting.handoff) else { continue };
            let (serial, seq, blocks) = (handoff.session, handoff.seq, waiting.op.blocks());
            let session = prefill.sessions.get_mut(&serial);
            let outcome = match session {
                None => Err(handoff.failed().unwrap_or(TransferError::Closed)),
                Some(session) => match session.line.room(handoff.writes.core(), blocks, waiting.patience, now) {
                    Ok(None) => {
                        handoff.writes.queued(blocks);
                        session.line.write(waiting.op);
                        Ok(())
                    }
                    Ok(Some(_)) => {
                        prefill.waiting.push_front(waiting);
                        return Ok(false);
                    }
                    Err(error) => Err(error),
                },
            };
            if let (Err(error), Some(seq)) = (outcome, seq) {
                launch.refuse(seq, error);
            }
            self.wake_prefill(place, serial);
        }
        Ok(true)
    }

    pub(crate) fn complete_handoff(&mut self, place: Place, seq: SeqId, tail: Vec<u8>) {
        let now = self.now;
        let prefill = &mut self.prefills[place];
        let Some(id) = prefill.of(seq) else { return };
        let reports = prefill.reports.clone();
        let Some(handoff) = prefill.handoffs.get_mut(&id) else { return };
        (handoff.ended, handoff.completed) = (true, Some(now));
        let done = Done::new(Box::new(move |outcome| {
            reports.lock().unwrap_or_else(PoisonError::into_inner).push((id, Told::Done(outcome)));
        }));
        let (epoch, serial) = (handoff.epoch(), handoff.session);
        match prefill.sessions.get_mut(&serial) {
            Some(session) => match handoff.writes.completable(&session.line, &tail) {
                Ok(()) => {
                    if let Err((done, error)) = session.line.complete(epoch, tail, done) {
                        done.report(Err(error));
                    }
                }
                // Like a real handoff that cannot be completed, it is aborted. It has ended when the abort has.
                Err(error) => {
                    let report = move || done.report(Err(error));
                    drop(session.line.abort(epoch, Quiet(Some(Box::new(report)))));
                }
            },
            None => done.report(Err(handoff.failed().unwrap_or(TransferError::Closed))),
        }
        self.wake_prefill(place, serial);
    }

    pub(crate) fn abort_handoff(&mut self, place: Place, id: u64, quarantined: bool) {
        let reports = self.prefills[place].reports.clone();
        let tell = move || reports.lock().unwrap_or_else(PoisonError::into_inner).push((id, Told::Quiet));
        self.end_handoff(place, id, quarantined, Box::new(tell));
    }

    /// Aborts a handoff. `tell` is called once nothing reads its blocks.
    pub(crate) fn end_handoff(&mut self, place: Place, id: u64, quarantined: bool, tell: Box<dyn FnOnce() + Send>) {
        let prefill = &mut self.prefills[place];
        let Some(handoff) = prefill.handoffs.get_mut(&id).filter(|handoff| !handoff.ended) else { return };
        (handoff.ended, handoff.quarantined) = (true, quarantined);
        let quiet = Quiet(Some(tell));
        let (epoch, serial) = (handoff.epoch(), handoff.session);
        match prefill.sessions.get_mut(&serial) {
            Some(session) => drop(session.line.abort(epoch, quiet)),
            // The handoff's session is over: nothing reads its blocks any more.
            None => drop(quiet),
        }
        self.wake_prefill(place, serial);
    }

    /// Handles the ends of handoffs that callbacks reported since the last call. Each handoff must end once.
    pub(crate) fn reported(&mut self, place: Place) -> Result<(), Violation> {
        let told = std::mem::take(&mut *self.prefills[place].reports.lock().unwrap_or_else(PoisonError::into_inner));
        let any = !told.is_empty();
        for (id, told) in told {
            let prefill = &mut self.prefills[place];
            prefill.memory.give_back(id);
            let Some(handoff) = prefill.handoffs.remove(&id) else {
                return Err(self.violation("reported once", format!("handoff {id} ends again: {told:?}")));
            };
            let Some(seq) = handoff.seq else { continue };
            self.check_delivery(&handoff, &told)?;
            self.check_due(&handoff, &told)?;
            let prefill = &mut self.prefills[place];
            match told {
                Told::Done(outcome) => {
                    let verified = outcome.is_ok();
                    let transport = handoff.writes.core().transport();
                    prefill.inbox.push_back(match handoff.prefix {
                        true => Input::Exchange(exchange::Command::Ended { seq, outcome, transport }),
                        false => Input::Command(Command::Ended { seq, outcome, transport }),
                    });
                    let (decode, epoch) = (&self.decodes[handoff.decode], handoff.epoch());
                    if verified && decode.id == handoff.peer && !decode.has_verified(epoch) {
                        let what = format!("{} was told that {epoch} is verified, and it is not", handoff.peer);
                        return Err(self.violation("agreement", what));
                    }
                }
                Told::Quiet if handoff.quarantined => prefill.inbox.push_back(Input::Command(Command::Quiet(seq))),
                Told::Quiet => {}
            }
        }
        if any {
            self.wake_engine(Process::Prefill(place));
        }
        Ok(())
    }
}
