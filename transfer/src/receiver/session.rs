//! One prefill worker's session at the decode end, on its own thread: lets it in under an epoch, puts its blocks into
//! the pool (TCP) or lets it do so (shm), verifies, and stops it when told.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use baton_types::{Epoch, WorkerId};

use super::ReceiverEvent;
use super::hub::{Hub, Mail};
use super::incoming::Incoming;
use super::table::SessionId;
use crate::codec::Malformed;
use crate::error::TransferError;
use crate::handshake::{self, Patience};
use crate::link::{Got, Link, Range, Socket};
use crate::options::TransportKind;
use crate::state::Input;
use crate::tcp::Payload;
use crate::wake::{Interest, wait};
use crate::wire::{Frame, FrameLimits, MAX_WRITE_BLOCKS, Refusal, WriteHead};

/// Answers queued for a peer that does not read them; beyond it nothing more is read from it.
const MAX_ANSWERS: usize = 256;

/// Runs a session until either side ends it.
pub(crate) fn run(hub: Arc<Hub>, id: SessionId, mail: Arc<Mail>, socket: Socket) {
    let limits = FrameLimits::new(&hub.options.limits, hub.options.geometry.layout.groups.len());
    let mut link = Link::new(socket, hub.options.segment.clone(), limits);
    match welcome(&hub, id, &mail, &mut link) {
        Ok((peer, process)) => {
            let landing = None;
            let mut session = Session {
                hub: hub.clone(),
                id,
                mail,
                link,
                peer,
                incoming: HashMap::new(),
                landing,
                pool_given: false,
            };
            let end = catch_unwind(AssertUnwindSafe(|| session.serve()))
                .unwrap_or_else(|_| TransferError::os("serve a prefill worker", "the session's thread panicked"));
            tracing::debug!(%peer, reason = %end, "session over");
            session.wind_up(process, end);
        }
        Err(TransferError::Closed) => {}
        Err(error) => tracing::warn!(%error, "a prefill worker was turned away"),
    }
    hub.dismiss(id);
}

fn welcome(
    hub: &Hub,
    id: SessionId,
    mail: &Mail,
    link: &mut Link,
) -> Result<(WorkerId, Option<OwnedFd>), TransferError> {
    let patience =
        Patience { wake: &mail.wake, until: Instant::now() + hub.options.limits.handshake, stopped: &|| hub.stopped() };
    let geometry = &hub.options.geometry;
    let guest = handshake::receive(link, hub.options.worker, geometry.layout.fingerprint(), &patience)?;
    hub.introduce(id, guest.worker);
    link.push(&Frame::Welcome { blocks: geometry.blocks.clone() });
    tracing::debug!(peer = %guest.worker, transport = link.kind().as_str(), "session begun");
    Ok((guest.worker, guest.process))
}

/// Payload under way, and the write it belongs to unless it is dropped.
struct Landing {
    payload: Payload,
    head: Option<WriteHead>,
}

struct Session {
    hub: Arc<Hub>,
    id: SessionId,
    mail: Arc<Mail>,
    link: Link,
    peer: WorkerId,
    /// Handoffs this session was let in for and that it has not ended.
    incoming: HashMap<Epoch, Incoming>,
    landing: Option<Landing>,
    /// Whether the pool's descriptor was handed out.
    pool_given: bool,
}

impl Session {
    /// Serves until the session ends; answers why.
    fn serve(&mut self) -> TransferError {
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    /// Everything that can be done now, then a wait.
    fn turn(&mut self) -> Result<(), TransferError> {
        self.may_go_on()?;
        while !self.is_full() && self.read_some()? {}
        self.obey_fences();
        let was_full = self.is_full();
        self.link.flush().map_err(|e| self.lost(e))?;
        let interest = match (self.is_full(), self.link.has_output()) {
            // Frames may wait in the inbox.
            (false, _) if was_full => return Ok(()),
            (true, _) => Interest::Write,
            (false, true) => Interest::ReadWrite,
            (false, false) => Interest::Read,
        };
        wait(&self.mail.wake, &[(self.link.as_fd(), interest)], None)?;
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.link.queued() >= MAX_ANSWERS
    }

    fn may_go_on(&self) -> Result<(), TransferError> {
        match (self.hub.stopped(), self.mail.superseded()) {
            (true, _) => Err(TransferError::Closed),
            (_, true) => Err(self.lost("it started another session")),
            _ => Ok(()),
        }
    }

    /// One step of reading. False when nothing is there now.
    fn read_some(&mut self) -> Result<bool, TransferError> {
        self.may_go_on()?;
        self.obey_fences();
        if self.landing.is_some() {
            return self.read_payload();
        }
        if let Some(frame) = self.link.next_frame().map_err(|m| self.broken(m))? {
            self.handle(frame)?;
            self.link.flush().map_err(|e| self.lost(e))?;
            return Ok(true);
        }
        match self.link.fill().map_err(|e| self.lost(e))? {
            Got::Bytes(_) => Ok(true),
            Got::Blocked => Ok(false),
            Got::Ended => Err(self.lost("it closed the connection")),
        }
    }

    fn read_payload(&mut self) -> Result<bool, TransferError> {
        let Some(landing) = &mut self.landing else { return Ok(true) };
        if !landing.payload.is_done() {
            // SAFETY: the ranges are those of an accepted write of a handoff this session alone was let in for. When it
            // is fenced, `obey_fences`, on this same thread, turns them away before saying so.
            let got = unsafe { landing.payload.read(&mut self.link) };
            match got.map_err(|e| self.lost(e))? {
                Got::Bytes(_) => {}
                Got::Blocked => return Ok(false),
                Got::Ended => return Err(self.lost("it closed the connection in the middle of a block")),
            }
        }
        if let Some(landing) = self.landing.take_if(|l| l.payload.is_done())
            && let Some(head) = landing.head
            && let Some(incoming) = self.incoming.get_mut(&head.epoch)
        {
            let options = &self.hub.options;
            // SAFETY: the blocks are lent to this handoff. Over TCP this thread alone writes to them; over shared memory
            // the peer has said that it is done with this layer, and it may not write it twice.
            unsafe { incoming.landed(&options.geometry, &options.segment, &head) };
        }
        Ok(true)
    }

    /// Fences what other threads asked to be fenced. Over TCP this thread is the only one that writes, so its word is
    /// enough; over shared memory the peer's is needed.
    fn obey_fences(&mut self) {
        for epoch in self.mail.take_fences() {
            self.forget(epoch);
            self.link.push(&Frame::Fence { epoch });
            if self.link.kind() == TransportKind::Tcp {
                self.hub.step_as(self.id, epoch, Input::Fenced, || TransferError::Aborted { epoch });
            }
        }
    }

    /// From now on nothing that arrives under this epoch reaches the pool.
    fn forget(&mut self, epoch: Epoch) {
        self.incoming.remove(&epoch);
        if let Some(landing) = &mut self.landing
            && landing.head.take_if(|head| head.epoch == epoch).is_some()
        {
            landing.payload.turn_to_discard();
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), TransferError> {
        match frame {
            Frame::Begin { epoch, key } => self.begin(epoch, key),
            Frame::Write(head) => self.write(head),
            Frame::Complete { epoch, writes, digests, tail } => self.complete(epoch, writes, &digests, tail),
            Frame::Abort { epoch } => {
                self.forget(epoch);
                self.hub.step_as(self.id, epoch, Input::Fenced, || TransferError::Aborted { epoch });
                Ok(())
            }
            Frame::FenceAck { epoch } => {
                self.hub.step_as(self.id, epoch, Input::Fenced, || TransferError::Aborted { epoch });
                Ok(())
            }
            other => Err(self.broken(Malformed::new("kind", format!("{other:?} is not for a decode worker")))),
        }
    }

    fn begin(&mut self, epoch: Epoch, key: u64) -> Result<(), TransferError> {
        match self.hub.grant(epoch, key, self.id) {
            Ok(blocks) => {
                if self.link.kind() == TransportKind::Shm && !self.pool_given {
                    let fd = self.hub.options.segment.fd().try_clone_to_owned();
                    self.link.push_fd(fd.map_err(|e| TransferError::os("duplicate the pool's descriptor", e))?);
                    self.pool_given = true;
                }
                self.link.push(&Frame::Granted { epoch, blocks: blocks.to_vec() });
                self.incoming.insert(epoch, Incoming::new(&self.hub.options.geometry, blocks, Instant::now()));
            }
            Err(reason) => self.refuse(epoch, Refusal::NoReservation(reason)),
        }
        Ok(())
    }

    fn refuse(&mut self, epoch: Epoch, refusal: Refusal) {
        self.link.push(&Frame::Failed { epoch, refusal });
    }

    fn write(&mut self, head: WriteHead) -> Result<(), TransferError> {
        let (epoch, bytes) = (head.epoch, head.payload as usize);
        let layout = &self.hub.options.geometry.layout;
        let largest = (0..layout.groups.len()).map(|g| layout.block_bytes(g)).max().unwrap_or(0);
        if bytes > largest * MAX_WRITE_BLOCKS {
            return Err(self.broken(Malformed::new("payload", format!("{bytes} bytes in one write"))));
        }
        self.landing = Some(match self.accept(&head) {
            Ok(ranges) => Landing { payload: Payload::apply(ranges), head: Some(head) },
            Err(refusal) => {
                refusal.into_iter().for_each(|refusal| self.fail(epoch, refusal));
                Landing { payload: Payload::discard(bytes), head: None }
            }
        });
        Ok(())
    }

    /// Where a write's payload goes; over shared memory there is none. Nowhere, and without an answer, when the owner
    /// has taken the blocks back: the fence is on its way to the peer.
    fn accept(&mut self, head: &WriteHead) -> Result<VecDeque<Range>, Option<Refusal>> {
        let epoch = head.epoch;
        let Some(incoming) = self.incoming.get_mut(&epoch) else {
            return Err(Some(Refusal::NoReservation("nothing may be written under it".into())));
        };
        if !self.hub.step_as(self.id, epoch, Input::Write, || TransferError::Aborted { epoch }) {
            return Err(None);
        }
        let bad = |problem| Some(Refusal::BadWrite(problem));
        let ranges = incoming.accept(&self.hub.options.geometry, head).map_err(bad)?;
        let expected = match self.link.kind() {
            TransportKind::Tcp => ranges.iter().map(|r| r.1).sum(),
            TransportKind::Shm => 0,
        };
        if head.payload as usize != expected {
            return Err(bad(format!("{} bytes instead of {expected}", head.payload)));
        }
        Ok(if expected == 0 { VecDeque::new() } else { ranges })
    }

    fn complete(
        &mut self,
        epoch: Epoch,
        writes: u64,
        digests: &[Vec<u64>],
        tail: Vec<u8>,
    ) -> Result<(), TransferError> {
        let Some(incoming) = self.incoming.remove(&epoch) else {
            self.refuse(epoch, Refusal::NoReservation("nothing may be completed under it".into()));
            return Ok(());
        };
        let options = &self.hub.options;
        // I2
        if let Err(refusal) = incoming.verify(writes, digests) {
            self.fail(epoch, refusal);
            return Ok(());
        }
        let bytes = incoming.bytes(&options.geometry);
        let seconds = incoming.began.elapsed().as_secs_f64();
        let event = ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport: self.link.kind() };
        if self.hub.verified(self.id, event) {
            self.link.push(&Frame::Verified { epoch });
        }
        Ok(())
    }

    /// Ends a handoff that cannot be verified, and says so to both sides.
    fn fail(&mut self, epoch: Epoch, refusal: Refusal) {
        self.incoming.remove(&epoch);
        let peer = self.peer;
        let error = match &refusal {
            Refusal::NoReservation(reason) => TransferError::Refused { epoch, peer, reason: reason.clone() },
            Refusal::BadWrite(problem) => TransferError::Protocol { peer, field: "write", problem: problem.clone() },
            Refusal::Incomplete { written, expected } => {
                TransferError::Incomplete { epoch, peer, written: *written, expected: *expected }
            }
            Refusal::Verify { group, index, block, want, got } => {
                let (group, index, block, want, got) = (*group, *index, *block, *want, *got);
                TransferError::Verify { epoch, peer, group, index, block, want, got }
            }
        };
        let input = match (&refusal, self.link.kind()) {
            // I3: a peer that errs in the middle may go on copying until it says that it has stopped.
            (Refusal::BadWrite(_), TransportKind::Shm) => Input::Lost,
            _ => Input::Refute,
        };
        self.hub.step_as(self.id, epoch, input, || error);
        self.refuse(epoch, refusal);
    }

    /// Fails what is still under way. Its blocks are free once the peer provably cannot write: over TCP at once, over
    /// shared memory when its process is gone or has come back with a new session.
    fn wind_up(self, process: Option<OwnedFd>, end: TransferError) {
        let Session { hub, id, mail, link, pool_given, .. } = self;
        if hub.stopped() {
            return;
        }
        for epoch in hub.held_by(id) {
            hub.step_as(id, epoch, Input::Lost, || end.clone());
        }
        drop(link);
        if let Some(process) = process.filter(|_| pool_given) {
            let over = || hub.stopped() || mail.superseded() || hub.held_by(id).is_empty();
            while !over() {
                match wait(&mail.wake, &[(process.as_fd(), Interest::Read)], None) {
                    Ok(0) => {}
                    Ok(_) => break,
                    Err(error) => {
                        // I3: better lost to this process than reused under a writer.
                        tracing::error!(%error, %end, "cannot tell when the peer is gone; its blocks stay aside");
                        return;
                    }
                }
            }
        }
        for epoch in hub.held_by(id) {
            hub.step_as(id, epoch, Input::Severed, || end.clone());
        }
    }

    fn lost(&self, cause: impl ToString) -> TransferError {
        TransferError::PeerLost { peer: self.peer, cause: cause.to_string() }
    }

    fn broken(&self, Malformed { field, problem }: Malformed) -> TransferError {
        TransferError::Protocol { peer: self.peer, field, problem }
    }
}
