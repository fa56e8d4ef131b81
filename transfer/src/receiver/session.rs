//! The decode end's session with one prefill worker, on its own thread. It moves frames and payload between its sockets and
//! [`Inbound`], which knows what they mean.
//!
//! This one thread reads all connections of the session. So a handoff that is stopped is stopped on every connection before anyone is
//! told (I3). The session ends when its own connection breaks, or a further one that has carried something.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use super::hub::{Hub, Mail};
use crate::device::{DeviceQueue, Reach, while_doing};
use crate::link::{Got, Link, MAX_QUEUED};
use crate::ucx::Worker;
use crate::wake::{Interest, wait, wait_awake};
use baton_handoff::{Access, Frame, Inbound, Ledger, PayloadTarget, PeerReach, Range, TransferError, TransportKind};
use baton_types::Courtesy;

/// Most bytes that go through staging memory at once.
const STAGE_BYTES: usize = 1 << 20;
/// Most steps of UCX's progress before frames get their turn.
const PUTS_A_TURN: usize = 64;

/// What the handshake has made ready for a session.
pub(crate) struct Welcomed {
    /// What blocks travel over.
    pub kind: TransportKind,
    /// Over UCX: the worker that applies what the peer puts.
    pub ucx: Option<Worker>,
    /// Its access to the pool.
    pub reach: Reach,
}

/// A session, from its Welcome frame on.
pub(crate) struct Session {
    hub: Arc<Hub>,
    mail: Arc<Mail>,
    /// Its own connection.
    link: Link,
    /// Further connections that have joined, with their numbers.
    more: Vec<(usize, Link)>,
    /// What blocks travel over.
    kind: TransportKind,
    /// Over UCX: the worker that applies what the peer puts.
    ucx: Option<Worker>,
    /// This session's access to the pool.
    reach: Reach,
    /// Whether staged bytes may still be on their way into the pool.
    staged: bool,
    inbound: Inbound,
    /// Whether the pool's descriptor, handle or key was handed out.
    pool_given: bool,
    /// When this thread gives way.
    courtesy: Courtesy,
}

impl Session {
    pub(crate) fn new(hub: Arc<Hub>, mail: Arc<Mail>, link: Link, inbound: Inbound, welcomed: Welcomed) -> Session {
        let Welcomed { kind, ucx, reach } = welcomed;
        let (more, courtesy) = (Vec::new(), hub.options.courtesy.clone());
        Session { hub, mail, link, more, kind, ucx, reach, staged: false, inbound, pool_given: false, courtesy }
    }

    /// Serves until the session ends; returns why.
    pub(crate) fn serve(&mut self) -> TransferError {
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    /// Does everything that can be done now, then waits.
    fn turn(&mut self) -> Result<(), TransferError> {
        self.may_go_on()?;
        while !self.is_full() && self.read_round()? {}
        self.obey_fences()?;
        let now = Instant::now();
        let next_beat = self.inbound.beat(now, !self.link.has_output());
        self.answer()?;
        let was_full = self.is_full();
        self.link.flush().map_err(|e| self.lost(e))?;
        self.open_more()?;
        let interest = match (self.is_full(), self.link.has_output()) {
            // Frames may wait in the inbox.
            (false, _) if was_full => return Ok(()),
            (true, _) => Interest::Write,
            (false, true) => Interest::ReadWrite,
            (false, false) => Interest::Read,
        };
        let wait = if self.inbound.is_arriving() { wait_awake } else { wait };
        let mut fds = vec![(self.link.as_fd(), interest)];
        let heard = self.more.iter().filter(|_| interest != Interest::Write);
        fds.extend(heard.map(|(_, link)| match link.has_output() {
            true => (link.as_fd(), Interest::ReadWrite),
            false => (link.as_fd(), Interest::Read),
        }));
        if let Some(worker) = &self.ucx {
            // UCX applies what arrives only while this thread drives it.
            if (0..PUTS_A_TURN).all(|_| worker.progress()) || !worker.arm()? {
                return Ok(());
            }
            fds.push((worker.fd(), Interest::Read));
        }
        let timeout = next_beat.map(|at| at.saturating_duration_since(now));
        wait(&self.mail.wake, &fds, timeout)?;
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.link.frames_queued() >= MAX_QUEUED
    }

    fn may_go_on(&self) -> Result<(), TransferError> {
        match (self.hub.stopped(), self.mail.superseded()) {
            (true, _) => Err(TransferError::Closed),
            (_, true) => Err(self.lost("it started another session")),
            _ => Ok(()),
        }
    }

    /// Sends what waits on further connections. One that fails is dropped if it has carried nothing; else the session ends.
    fn open_more(&mut self) -> Result<(), TransferError> {
        let (inbound, mut failed) = (&self.inbound, None);
        self.more.retain_mut(|(number, link)| {
            let flushed = if link.has_output() { link.flush() } else { Ok(()) };
            let keeps = flushed.is_ok() || !inbound.is_unused(*number);
            failed = failed.take().or(flushed.err().filter(|_| keeps));
            keeps
        });
        failed.map_or(Ok(()), |error| Err(self.lost(error)))
    }

    /// One step of reading on each connection. False when nothing is there now.
    fn read_round(&mut self) -> Result<bool, TransferError> {
        self.more.extend(self.mail.take_joined().into_iter().map(|(number, link)| (number.into(), link)));
        let mut moved = self.read_some(None)?;
        let mut at = 0;
        while let Some(&(number, _)) = self.more.get(at) {
            let read = self.read_some(Some(at))?;
            moved |= read;
            // `read_some` may have removed it.
            at += usize::from(self.more.get(at).is_some_and(|(of, _)| *of == number));
        }
        Ok(moved)
    }

    /// One step of reading, on the session's own connection or the further one at `joined`. False when nothing is there now.
    fn read_some(&mut self, joined: Option<usize>) -> Result<bool, TransferError> {
        self.may_go_on()?;
        self.obey_fences()?;
        let (stream, link) = match joined.and_then(|at| self.more.get_mut(at)) {
            Some((number, link)) => (*number, link),
            None => (0, &mut self.link),
        };
        if self.inbound.payload(stream).is_some() {
            return self.read_payload(joined);
        }
        if let Some(frame) = link.next_frame().map_err(|m| self.inbound.broken(m))? {
            self.take_in(stream, frame)?;
            return Ok(true);
        }
        match link.fill() {
            Ok(Got::Bytes(_)) => {
                self.heard()?;
                Ok(true)
            }
            Ok(Got::Blocked) => Ok(false),
            // The peer may have stopped waiting to be told that it joined. No data is lost.
            Ok(Got::Ended) | Err(_) if self.inbound.is_unused(stream) => {
                joined.into_iter().for_each(|at| drop(self.more.remove(at)));
                Ok(true)
            }
            Ok(Got::Ended) => Err(self.lost("it closed the connection")),
            Err(error) => Err(self.lost(error)),
        }
    }

    fn take_in(&mut self, stream: usize, frame: Frame) -> Result<(), TransferError> {
        // Any frame may end a handoff.
        self.settle()?;
        if let Frame::Write(head) = &frame
            && self.kind != TransportKind::Tcp
        {
            self.give_way(head.group.into(), head.indexes.len());
        }
        let now = Instant::now();
        self.with(|inbound, ledger| inbound.frame(stream, frame, now, ledger))??;
        self.link.flush().map_err(|e| self.lost(e))
    }

    /// Gives way now and then, before so many blocks of a layer are taken in. Over TCP, it does so as their bytes come.
    fn give_way(&mut self, group: usize, blocks: usize) {
        let layout = &self.hub.options.geometry.layout;
        let bytes = layout.groups.get(group).map_or(0, |_| layout.block_bytes(group));
        self.courtesy.copied(bytes * blocks);
    }

    fn read_payload(&mut self, joined: Option<usize>) -> Result<bool, TransferError> {
        let (stream, link) = match joined.and_then(|at| self.more.get_mut(at)) {
            Some((number, link)) => (*number, link),
            None => (0, &mut self.link),
        };
        if let Some(payload) = self.inbound.payload(stream).filter(|payload| !payload.is_done()) {
            let got = match payload.target() {
                PayloadTarget::Nowhere(bytes) => link.discard_payload(bytes),
                PayloadTarget::Pool(ranges) => match &mut self.reach {
                    // SAFETY: the ranges are those of an accepted write, of a handoff that only this session was let in for. When the
                    // handoff is fenced, `obey_fences`, on this same thread, discards its payload on every connection before saying so.
                    Reach::Host(_) => unsafe { link.read_payload(ranges) },
                    Reach::Device(queue) => {
                        self.staged = true;
                        stage(link, &mut **queue, ranges)?
                    }
                },
            };
            match got {
                Ok(Got::Bytes(count)) => {
                    payload.advance(count);
                    self.courtesy.copied(count);
                    self.heard()?;
                }
                Ok(Got::Blocked) => return Ok(false),
                Ok(Got::Ended) => return Err(self.lost("it closed the connection in the middle of a block")),
                Err(error) => return Err(self.lost(error)),
            }
        }
        // SAFETY: this thread has finished reading the payload it counted; only the peer and this session use lent blocks.
        let mut pool = unsafe { self.reach.still() };
        self.inbound.landed(stream, &mut pool)?;
        while let Some(complete) = self.inbound.next_due() {
            self.take_in(0, complete)?;
        }
        Ok(true)
    }

    /// Notes that the peer is alive. Now and then renews its leases and sends it a beat, however much there is to read.
    fn heard(&mut self) -> Result<(), TransferError> {
        let now = Instant::now();
        if self.inbound.heard(now) {
            self.with(|inbound, ledger| inbound.renew(now, ledger))?;
            self.inbound.beat(now, !self.link.has_output());
            self.answer()?;
            self.link.flush().map_err(|e| self.lost(e))?;
        }
        Ok(())
    }

    /// Fences the epochs that other threads asked to fence.
    fn obey_fences(&mut self) -> Result<(), TransferError> {
        for epoch in self.mail.take_fences() {
            self.settle()?;
            self.with(|inbound, ledger| inbound.fence(epoch, ledger))?;
        }
        Ok(())
    }

    /// Waits until what arrived is in the pool. Nothing may still be on its way into blocks that are given back, since another sequence
    /// may get them at once, or into blocks that are announced, since they are read (I2, I3). Called without the ledger's lock, since a
    /// device may take its time.
    fn settle(&mut self) -> Result<(), TransferError> {
        if self.staged {
            self.reach.settle()?;
            self.staged = false;
        }
        Ok(())
    }

    /// Runs `act` on the reservations, then queues the answers.
    fn with<T>(&mut self, act: impl FnOnce(&mut Inbound, &mut Ledger) -> T) -> Result<T, TransferError> {
        let inbound = &mut self.inbound;
        let done = self.hub.with(|ledger| act(inbound, ledger));
        self.answer()?;
        Ok(done)
    }

    fn answer(&mut self) -> Result<(), TransferError> {
        while let Some(answer) = self.inbound.next_answer() {
            // The pool is handed out once, before the first grant.
            if matches!(answer, Frame::Granted { .. }) && self.kind.is_one_sided() && !self.pool_given {
                self.give_pool()?;
                self.pool_given = true;
            }
            self.link.push(&answer);
        }
        Ok(())
    }

    fn give_pool(&mut self) -> Result<(), TransferError> {
        if let Some(worker) = &self.ucx {
            let (engine, worker) = (self.hub.ucx()?, worker.address()?);
            let (base, bytes, key) = (engine.base(), engine.pool().bytes() as u64, engine.pack_key()?);
            self.link.push(&Frame::Access(Access { base, bytes, worker, key }));
            return Ok(());
        }
        let pool = match self.hub.options.pool.host() {
            Ok(segment) => segment,
            Err(memory) => {
                let handle = memory.export().map_err(while_doing("let a peer into the pool"))?;
                handle.descriptor.into_iter().for_each(|fd| self.link.push_fd(fd));
                self.link.push(&Frame::Handle { bytes: memory.bytes() as u64, handle: handle.bytes });
                return Ok(());
            }
        };
        let fd = pool.fd().try_clone_to_owned();
        self.link.push_fd(fd.map_err(|e| TransferError::os("duplicate the pool's descriptor", e))?);
        Ok(())
    }

    /// Fails what is still under way. Its blocks are free once the peer provably cannot write:
    /// - Over TCP, that is at once.
    /// - On one host, it is when the peer's process is gone or has come back with a new session.
    /// - Over UCX, this end's worker is dropped first, and with it all that applies the peer's puts. From another host nothing else can
    ///   write.
    pub(crate) fn wind_up(self, process: Option<OwnedFd>, end: TransferError) {
        let Session { hub, mail, link, more, ucx, mut reach, mut inbound, pool_given, .. } = self;
        if hub.stopped() {
            return;
        }
        // Before anyone is told, as in `settle`.
        let settled = reach.settle();
        hub.with(|ledger| inbound.lost(ledger, &end));
        if let Err(error) = settled {
            // I3: these blocks are better lost to this process than reused while a copy may be under way.
            tracing::error!(%error, %end, "cannot tell when what has arrived is in the pool; its blocks stay aside");
            return;
        }
        drop((link, more, ucx));
        let process = process.filter(|_| pool_given);
        let mut reach = PeerReach { has_pool: process.is_some(), ..PeerReach::default() };
        loop {
            reach.superseded = mail.superseded();
            if hub.with(|ledger| inbound.let_go(reach, ledger, &end)) || hub.stopped() {
                return;
            }
            let Some(process) = &process else { return };
            match wait(&mail.wake, &[(process.as_fd(), Interest::Read)], None) {
                Ok(events) => reach.gone = events > 0,
                Err(error) => {
                    // I3: these blocks are better lost to this process than reused while the peer may still write.
                    tracing::error!(%error, %end, "cannot tell when the peer is gone; its blocks stay aside");
                    return;
                }
            }
        }
    }

    fn lost(&self, cause: impl ToString) -> TransferError {
        TransferError::PeerLost { peer: self.inbound.peer(), cause: cause.to_string() }
    }
}

/// Reads payload into a device's pool through host memory, as much as is there.
fn stage(
    link: &mut Link,
    queue: &mut dyn DeviceQueue,
    ranges: &[Range],
) -> Result<Result<Got, std::io::Error>, TransferError> {
    let failed = while_doing("take in blocks");
    let bytes = ranges.iter().map(|(_, len)| len).sum::<usize>().min(STAGE_BYTES);
    let got = link.read_staged(&mut queue.stage(bytes).map_err(&failed)?[..bytes]);
    if let Ok(Got::Bytes(mut count)) = got {
        let mut filled = Vec::new();
        for &(offset, len) in ranges {
            let part = len.min(count);
            filled.extend((part > 0).then_some((offset, part)));
            count -= part;
        }
        queue.write(&filled).map_err(failed)?;
    }
    Ok(got)
}

#[cfg(test)]
mod tests;
