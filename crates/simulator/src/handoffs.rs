//! A worker's outgoing handoffs: writes that wait for room, completions, aborts, and the reports of their ends.

use std::sync::PoisonError;

use baton_handoff::{Done, Quiet, TransferError};
use baton_roles::prefill::Command;
use baton_roles::{StepLaunch, exchange};
use baton_types::SeqId;

use crate::Violation;
use crate::ends::{Told, Waiting};
use crate::events::Process;
use crate::world::World;

impl World {
    pub(crate) fn layer_stored(
        &mut self,
        here: Process,
        launch: &mut StepLaunch,
        layer: u32,
    ) -> Result<bool, Violation> {
        if self.senders[here].waiting.is_empty() {
            let patience = self.clock_now(here) + self.limits.room;
            let mut writes = Vec::new();
            launch.stored(layer, |write| {
                writes.push((write.seq, write.group, write.layer, write.pairs.to_vec()));
                Ok(())
            });
            for (seq, group, layer, pairs) in writes {
                let sender = &mut self.senders[here];
                let Some(id) = sender.of(seq) else { continue };
                for (block, _) in &pairs {
                    sender.memory.keep(group, *block, id);
                }
                let Some(handoff) = sender.handoffs.get_mut(&id) else { continue };
                let ops = handoff.writes.write(group, layer, &pairs, 0);
                let ops = ops.map_err(|error| self.violation("I8", format!("{here}: {error}")))?;
                let waiting = |op| Waiting { handoff: id, op, patience };
                self.senders[here].waiting.extend(ops.into_iter().map(waiting));
            }
        }
        let now = self.clock_now(here);
        while let Some(waiting) = self.senders[here].waiting.pop_front() {
            let sender = &mut self.senders[here];
            let Some(handoff) = sender.handoffs.get_mut(&waiting.handoff) else { continue };
            let (serial, seq, blocks) = (handoff.session, handoff.seq, waiting.op.blocks());
            let session = sender.sessions.get_mut(&serial);
            let outcome = match session {
                None => Err(handoff.failed().unwrap_or(TransferError::Closed)),
                Some(session) => match session.line.room(handoff.writes.core(), blocks, waiting.patience, now) {
                    Ok(None) => {
                        handoff.writes.queued(blocks);
                        session.line.write(waiting.op);
                        Ok(())
                    }
                    Ok(Some(_)) => {
                        sender.waiting.push_front(waiting);
                        return Ok(false);
                    }
                    Err(error) => Err(error),
                },
            };
            if let (Err(error), Some(seq)) = (outcome, seq) {
                launch.refuse(seq, error);
            }
            self.wake_sender(here, serial);
        }
        Ok(true)
    }

    pub(crate) fn complete_handoff(&mut self, here: Process, seq: SeqId, tail: Vec<u8>) {
        let now = self.now;
        let sender = &mut self.senders[here];
        let Some(id) = sender.of(seq) else { return };
        let reports = sender.reports.clone();
        let Some(handoff) = sender.handoffs.get_mut(&id) else { return };
        (handoff.ended, handoff.completed) = (true, Some(now));
        let done = Done::new(Box::new(move |outcome| {
            reports.lock().unwrap_or_else(PoisonError::into_inner).push((id, Told::Done(outcome)));
        }));
        let (epoch, serial) = (handoff.epoch(), handoff.session);
        match sender.sessions.get_mut(&serial) {
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
        self.wake_sender(here, serial);
    }

    pub(crate) fn abort_handoff(&mut self, here: Process, id: u64, quarantined: bool) {
        let reports = self.senders[here].reports.clone();
        let tell = move || reports.lock().unwrap_or_else(PoisonError::into_inner).push((id, Told::Quiet));
        self.end_handoff(here, id, quarantined, Box::new(tell));
    }

    /// Aborts a handoff. `tell` is called once nothing reads its blocks.
    pub(crate) fn end_handoff(&mut self, here: Process, id: u64, quarantined: bool, tell: Box<dyn FnOnce() + Send>) {
        let sender = &mut self.senders[here];
        let Some(handoff) = sender.handoffs.get_mut(&id).filter(|handoff| !handoff.ended) else { return };
        (handoff.ended, handoff.quarantined) = (true, quarantined);
        let quiet = Quiet(Some(tell));
        let (epoch, serial) = (handoff.epoch(), handoff.session);
        match sender.sessions.get_mut(&serial) {
            Some(session) => drop(session.line.abort(epoch, quiet)),
            // The handoff's session is over: nothing reads its blocks any more.
            None => drop(quiet),
        }
        self.wake_sender(here, serial);
    }

    /// Handles the ends of handoffs that callbacks reported since the last call. Each handoff must end once.
    pub(crate) fn reported(&mut self, here: Process) -> Result<(), Violation> {
        let told = std::mem::take(&mut *self.senders[here].reports.lock().unwrap_or_else(PoisonError::into_inner));
        let any = !told.is_empty();
        for (id, told) in told {
            let sender = &mut self.senders[here];
            sender.memory.give_back(id);
            let Some(handoff) = sender.handoffs.remove(&id) else {
                return Err(self.violation("reported once", format!("handoff {id} ends again: {told:?}")));
            };
            let Some(seq) = handoff.seq else { continue };
            self.check_delivery(&handoff, &told)?;
            self.check_due(&handoff, &told)?;
            match told {
                Told::Done(outcome) => {
                    let verified = outcome.is_ok();
                    let transport = handoff.writes.core().transport();
                    match handoff.prefix {
                        true => self.exchange_told(here, exchange::Command::Ended { seq, outcome, transport }),
                        false => self.prefill_told(here, Command::Ended { seq, outcome, transport }),
                    }
                    let (receiver, epoch) = (&self.receivers[handoff.to], handoff.epoch());
                    if verified && receiver.id == handoff.peer && !receiver.has_verified(epoch) {
                        let what = format!("{} was told that {epoch} is verified, and it is not", handoff.peer);
                        return Err(self.violation("agreement", what));
                    }
                }
                Told::Quiet if handoff.quarantined => self.prefill_told(here, Command::Quiet(seq)),
                Told::Quiet => {}
            }
        }
        if any {
            self.wake_engine(here);
        }
        Ok(())
    }
}
