//! How a session of the worker that takes KV reads one of its connections: frames, and the payload of writes. The checker (I3) sees every
//! byte that goes into the pool.

use std::collections::VecDeque;

use baton_handoff::{Frame, FrameLimits, PayloadTarget, Range};
use baton_types::Epoch;

use crate::events::{Line, Process};
use crate::receiver_session::{ReceiverSession, Stop};
use crate::world::World;
use crate::{Sabotage, Violation};

/// The payload that is arriving over a connection.
pub(crate) struct Coming {
    epoch: Epoch,
    /// Pool ranges still to fill, as they were when the payload began. Only `Sabotage::ApplyClosed` writes to them.
    rest: VecDeque<Range>,
}

impl Coming {
    fn advance(&mut self, mut bytes: usize) {
        while let Some((start, len)) = self.rest.front_mut() {
            let part = bytes.min(*len);
            (*start, *len) = (*start + part, *len - part);
            if *len > 0 {
                return;
            }
            bytes -= part;
            self.rest.pop_front();
        }
    }
}

impl World {
    /// Reads a frame, or some payload, from a connection. False when neither is there.
    pub(crate) fn read_some(&mut self, here: Process, session: &mut ReceiverSession, at: usize) -> Result<bool, Stop> {
        let stream = session.ends[at].stream;
        if session.inbound.as_mut().is_some_and(|inbound| inbound.payload(stream).is_some()) {
            return self.read_payload(here, session, at);
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let Some(mut frame) = session.ends[at].next_frame(&limits).map_err(|e| session.lost(e))? else {
            return Ok(false);
        };
        if let Frame::Complete { epoch, after, .. } = &mut frame {
            if self.broken(Sabotage::AckEarly) {
                session.own().outbox.push(&Frame::Verified { epoch: *epoch });
            }
            if self.broken(Sabotage::HurryCompletions) {
                after.clear();
            }
        }
        let epoch = if let Frame::Write(head) = &frame { Some(head.epoch) } else { None };
        let now = self.clock_now(here);
        let Some(inbound) = &mut session.inbound else { return Ok(false) };
        inbound.frame(stream, frame, now, &mut self.receivers[here].ledger).map_err(Stop::Ended)?;
        if let Some((epoch, payload)) = epoch.zip(inbound.payload(stream)) {
            let rest =
                if let PayloadTarget::Pool(ranges) = payload.target() { ranges.to_vec().into() } else { [].into() };
            session.coming.insert(stream, Coming { epoch, rest });
        }
        Ok(true)
    }

    fn read_payload(&mut self, here: Process, session: &mut ReceiverSession, at: usize) -> Result<bool, Stop> {
        let (now, end) = (self.clock_now(here), &mut session.ends[at]);
        let Some((inbound, coming)) = session.inbound.as_mut().zip(session.coming.get_mut(&end.stream)) else {
            return Ok(false);
        };
        let Some(payload) = inbound.payload(end.stream) else { return Ok(false) };
        if !payload.is_done() && end.inbox.is_empty() {
            return Ok(false);
        }
        let (mut offset, mut wanted) = match payload.target() {
            PayloadTarget::Nowhere(bytes) => (None, bytes),
            PayloadTarget::Pool(ranges) => ranges.first().map_or((None, 0), |range| (Some(range.0), range.1)),
        };
        if let Some((start, len)) =
            coming.rest.front().copied().filter(|_| self.options.sabotage == Some(Sabotage::ApplyClosed))
        {
            (offset, wanted) = (Some(start), len);
        }
        let bytes: Vec<u8> = end.inbox.drain(..wanted.min(end.inbox.len())).collect();
        payload.advance(bytes.len());
        coming.advance(bytes.len());
        let (line, stream, epoch) = (end.line, end.stream, coming.epoch);
        if let Some(offset) = offset {
            self.store(here, line, epoch, (offset, &bytes)).map_err(Stop::Broken)?;
        }
        let Some(inbound) = &mut session.inbound else { return Ok(false) };
        let landed = inbound.landed(stream, &mut self.receivers[here].memory.bytes);
        landed.map_err(Stop::Ended)?;
        while let Some(complete) = inbound.next_due() {
            self.summary.overtook += 1;
            inbound.frame(0, complete, now, &mut self.receivers[here].ledger).map_err(Stop::Ended)?;
        }
        Ok(true)
    }

    /// Writes payload to the pool. Checks I3 by the checker's own record, not the ledger's.
    fn store(
        &mut self,
        here: Process,
        line: Line,
        epoch: Epoch,
        (offset, bytes): (usize, &[u8]),
    ) -> Result<(), Violation> {
        self.check_writer(line)?;
        self.look_at("I3");
        let memory = &self.receivers[here].memory;
        match memory.owner_at(offset) {
            Some(owner) if owner == epoch => memory.write(offset, bytes),
            owner => {
                let what = format!("bytes of {epoch} come for {offset} when that block is kept for {owner:?}");
                return Err(self.violation("I3", what));
            }
        }
        Ok(())
    }
}
