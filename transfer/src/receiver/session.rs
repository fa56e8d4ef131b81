//! One prefill worker's session at the decode end, on its own thread: moves frames and payload between the socket and
//! [`Inbound`], which knows what they mean.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use baton_types::WorkerId;

use super::hub::{Hub, Mail};
use super::inbound::Inbound;
use super::ledger::Ledger;
use super::payload::Target;
use super::table::SessionId;
use crate::device::{DeviceError, DeviceQueue, Pool, Reach};
use crate::error::TransferError;
use crate::handshake::{self, Patience};
use crate::link::{Got, Link, MAX_QUEUED, Range, Socket};
use crate::options::TransportKind;
use crate::ucx::Worker;
use crate::wake::{Interest, wait, wait_awake};
use crate::wire::{Access, Frame, FrameLimits};

/// Bytes that go through staging memory at once.
const STAGE_BYTES: usize = 1 << 20;
/// Steps of UCX's progress before frames get their turn.
const PUTS_A_TURN: usize = 64;

/// Runs a session until either side ends it.
pub(crate) fn run(hub: Arc<Hub>, id: SessionId, mail: Arc<Mail>, socket: Socket) {
    let limits = FrameLimits::new(&hub.options.limits, hub.options.geometry.layout.groups.len());
    let mut link = Link::new(socket, hub.options.pool.clone(), limits);
    match welcome(&hub, id, &mail, &mut link) {
        Ok(Welcomed { peer, kind, ucx, reach, process }) => {
            let inbound = Inbound::new(id, peer, kind, hub.options.geometry.clone(), &hub.options.limits);
            let inbound = if hub.options.verify { inbound } else { inbound.unverified() };
            let mut session = Session { hub: hub.clone(), mail, link, kind, ucx, reach, inbound, pool_given: false };
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

struct Welcomed {
    peer: WorkerId,
    kind: TransportKind,
    ucx: Option<Worker>,
    reach: Reach,
    process: Option<OwnedFd>,
}

fn welcome(hub: &Hub, id: SessionId, mail: &Mail, link: &mut Link) -> Result<Welcomed, TransferError> {
    let patience =
        Patience { wake: &mail.wake, until: Instant::now() + hub.options.limits.handshake, stopped: &|| hub.stopped() };
    let geometry = &hub.options.geometry;
    let guest = handshake::receive(link, hub.options.worker, geometry.layout.fingerprint(), &patience)?;
    let kind = TransportKind::of(link.is_unix(), guest.over);
    let reachable = serves(&hub.options.pool, kind, link.is_unix());
    let reach = reachable.and_then(|()| hub.options.pool.reach().map_err(|error| error.to_string()));
    let reach = reach.map_err(|reason| handshake::turn_away(link, &reason))?;
    let made = (kind == TransportKind::Ucx).then(|| hub.ucx().and_then(|engine| Worker::new(&engine))).transpose();
    let ucx = made.map_err(|error| handshake::turn_away(link, &error.to_string()))?;
    hub.introduce(id, guest.worker);
    link.push(&Frame::Welcome { blocks: geometry.blocks.clone() });
    tracing::debug!(peer = %guest.worker, transport = kind.as_str(), "session begun");
    Ok(Welcomed { peer: guest.worker, kind, ucx, reach, process: guest.process })
}

/// Whether a peer may come for this; it should have known by the target descriptor.
fn serves(pool: &Pool, kind: TransportKind, unix: bool) -> Result<(), String> {
    let refused = match (kind, pool.is_device()) {
        (TransportKind::CudaIpc, false) => "its pool is not in a GPU's memory",
        // I3: only there it learns when its peer's process has ended, whose copies it cannot cut off.
        (TransportKind::CudaIpc, true) if !unix => "copies from GPU to GPU need a unix socket",
        (TransportKind::Shm | TransportKind::Ucx, true) => "its pool is in a GPU's memory",
        _ => return Ok(()),
    };
    Err(refused.to_owned())
}

struct Session {
    hub: Arc<Hub>,
    mail: Arc<Mail>,
    link: Link,
    /// What blocks travel over.
    kind: TransportKind,
    /// Applies what the peer puts, over UCX.
    ucx: Option<Worker>,
    /// This session's way to the pool.
    reach: Reach,
    inbound: Inbound,
    /// Whether the pool's descriptor, or its key, was handed out.
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
        self.obey_fences()?;
        let now = Instant::now();
        let next_beat = self.inbound.beat(now, !self.link.has_output());
        self.answer()?;
        let was_full = self.is_full();
        self.link.flush().map_err(|e| self.lost(e))?;
        let interest = match (self.is_full(), self.link.has_output()) {
            // Frames may wait in the inbox.
            (false, _) if was_full => return Ok(()),
            (true, _) => Interest::Write,
            (false, true) => Interest::ReadWrite,
            (false, false) => Interest::Read,
        };
        let wait = if self.inbound.is_busy() { wait_awake } else { wait };
        let mut fds = vec![(self.link.as_fd(), interest)];
        if let Some(worker) = &self.ucx {
            // What arrives there moves by nobody else's doing.
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
        self.link.queued() >= MAX_QUEUED
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
        self.obey_fences()?;
        if self.inbound.payload().is_some() {
            return self.read_payload();
        }
        if let Some(frame) = self.link.next_frame().map_err(|m| self.inbound.broken(m))? {
            let now = Instant::now();
            self.with(|inbound, ledger| inbound.frame(frame, now, ledger))??;
            self.link.flush().map_err(|e| self.lost(e))?;
            return Ok(true);
        }
        match self.link.fill().map_err(|e| self.lost(e))? {
            Got::Bytes(_) => {
                self.heard()?;
                Ok(true)
            }
            Got::Blocked => Ok(false),
            Got::Ended => Err(self.lost("it closed the connection")),
        }
    }

    fn read_payload(&mut self) -> Result<bool, TransferError> {
        if let Some(payload) = self.inbound.payload().filter(|payload| !payload.is_done()) {
            let got = match payload.target() {
                Target::Nowhere(bytes) => self.link.discard_payload(bytes),
                Target::Pool(ranges) => match &mut self.reach {
                    // SAFETY: the ranges are those of an accepted write of a handoff this session alone was let in for. When
                    // it is fenced, `obey_fences`, on this same thread, turns them away before saying so.
                    Reach::Host(_) => unsafe { self.link.read_payload(ranges) },
                    Reach::Device(queue) => stage(&mut self.link, &mut **queue, ranges)?,
                },
            };
            match got {
                Ok(Got::Bytes(count)) => {
                    payload.advance(count);
                    self.heard()?;
                }
                Ok(Got::Blocked) => return Ok(false),
                Ok(Got::Ended) => return Err(self.lost("it closed the connection in the middle of a block")),
                Err(error) => return Err(self.lost(error)),
            }
        }
        // SAFETY: this thread has read what it counted; lent blocks are the peer's and this session's only.
        unsafe { self.inbound.landed(&mut self.reach) }?;
        Ok(true)
    }

    /// Whatever arrives shows that the peer is alive; now and then it is told the same, however much there is to read.
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

    /// Fences what other threads asked to be fenced.
    fn obey_fences(&mut self) -> Result<(), TransferError> {
        for epoch in self.mail.take_fences() {
            self.with(|inbound, ledger| inbound.fence(epoch, ledger))?;
        }
        Ok(())
    }

    /// Does something with the reservations, and queues what is to be answered.
    fn with<T>(&mut self, act: impl FnOnce(&mut Inbound, &mut Ledger) -> T) -> Result<T, TransferError> {
        let inbound = &mut self.inbound;
        let done = self.hub.with(|ledger| act(inbound, ledger));
        self.answer()?;
        Ok(done)
    }

    fn answer(&mut self) -> Result<(), TransferError> {
        while let Some(answer) = self.inbound.next_answer() {
            // The pool goes to whoever was let in, once.
            if matches!(answer, Frame::Granted { .. }) && self.kind.is_one_sided() && !self.pool_given {
                self.give_pool()?;
                self.pool_given = true;
            }
            self.link.push(&answer);
        }
        Ok(())
    }

    fn give_pool(&mut self) -> Result<(), TransferError> {
        let pool = match self.hub.options.pool.host() {
            Ok(segment) => segment,
            Err(memory) => {
                let handle = memory.export().map_err(|e| e.while_doing("let a peer into the pool"))?;
                self.link.push(&Frame::Handle { bytes: memory.bytes() as u64, handle });
                return Ok(());
            }
        };
        if let Some(worker) = &self.ucx {
            let (base, bytes) = (pool.as_ptr() as u64, pool.len() as u64);
            let (worker, key) = (worker.address()?, self.hub.ucx()?.pack_key()?);
            self.link.push(&Frame::Access(Access { base, bytes, worker, key }));
            return Ok(());
        }
        let fd = pool.fd().try_clone_to_owned();
        self.link.push_fd(fd.map_err(|e| TransferError::os("duplicate the pool's descriptor", e))?);
        Ok(())
    }

    /// Fails what is still under way. Its blocks are free once the peer provably cannot write: over TCP at once, on one
    /// host when its process is gone or has come back with a new session. Over UCX this end's worker goes first, and
    /// with it all that applies what the peer put; from another host nothing else can write.
    fn wind_up(self, process: Option<OwnedFd>, end: TransferError) {
        let Session { hub, mail, link, ucx, mut inbound, pool_given, .. } = self;
        if hub.stopped() {
            return;
        }
        hub.with(|ledger| inbound.lost(ledger, &end));
        drop((link, ucx));
        if let Some(process) = process.filter(|_| pool_given) {
            let over = || hub.stopped() || mail.superseded() || !hub.with(|ledger| inbound.holds_any(ledger));
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
        hub.with(|ledger| inbound.severed(ledger, &end));
    }

    fn lost(&self, cause: impl ToString) -> TransferError {
        TransferError::PeerLost { peer: self.inbound.peer(), cause: cause.to_string() }
    }
}

/// Reads payload for a device's pool through host memory, as much as is there.
fn stage(
    link: &mut Link,
    queue: &mut dyn DeviceQueue,
    ranges: &[Range],
) -> Result<Result<Got, std::io::Error>, TransferError> {
    let failed = |e: DeviceError| e.while_doing("take in blocks");
    let bytes = ranges.iter().map(|(_, len)| len).sum::<usize>().min(STAGE_BYTES);
    let got = link.read_staged(&mut queue.stage(bytes).map_err(failed)?[..bytes]);
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
