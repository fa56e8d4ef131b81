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
use crate::error::TransferError;
use crate::handshake::{self, Patience};
use crate::link::{Got, Link, MAX_QUEUED, Socket};
use crate::options::TransportKind;
use crate::ucx::Worker;
use crate::wake::{Interest, wait, wait_awake};
use crate::wire::{Access, Frame, FrameLimits};

/// Steps of UCX's progress before frames get their turn.
const PUTS_A_TURN: usize = 64;

/// Runs a session until either side ends it.
pub(crate) fn run(hub: Arc<Hub>, id: SessionId, mail: Arc<Mail>, socket: Socket) {
    let limits = FrameLimits::new(&hub.options.limits, hub.options.geometry.layout.groups.len());
    let mut link = Link::new(socket, hub.options.segment.clone(), limits);
    match welcome(&hub, id, &mail, &mut link) {
        Ok(Welcomed { peer, kind, ucx, process }) => {
            let inbound = Inbound::new(id, peer, kind, hub.options.geometry.clone(), &hub.options.limits);
            let inbound = if hub.options.verify { inbound } else { inbound.unverified() };
            let mut session = Session { hub: hub.clone(), mail, link, kind, ucx, inbound, pool_given: false };
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
    process: Option<OwnedFd>,
}

fn welcome(hub: &Hub, id: SessionId, mail: &Mail, link: &mut Link) -> Result<Welcomed, TransferError> {
    let patience =
        Patience { wake: &mail.wake, until: Instant::now() + hub.options.limits.handshake, stopped: &|| hub.stopped() };
    let geometry = &hub.options.geometry;
    let guest = handshake::receive(link, hub.options.worker, geometry.layout.fingerprint(), &patience)?;
    let made = guest.ucx.then(|| hub.ucx().and_then(|engine| Worker::new(&engine))).transpose();
    let ucx = made.map_err(|error| handshake::turn_away(link, &error.to_string()))?;
    let kind = TransportKind::of(link.is_unix(), guest.ucx);
    hub.introduce(id, guest.worker);
    link.push(&Frame::Welcome { blocks: geometry.blocks.clone() });
    tracing::debug!(peer = %guest.worker, transport = kind.as_str(), "session begun");
    Ok(Welcomed { peer: guest.worker, kind, ucx, process: guest.process })
}

struct Session {
    hub: Arc<Hub>,
    mail: Arc<Mail>,
    link: Link,
    /// What blocks travel over.
    kind: TransportKind,
    /// Applies what the peer puts, over UCX.
    ucx: Option<Worker>,
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
                // SAFETY: the ranges are those of an accepted write of a handoff this session alone was let in for. When
                // it is fenced, `obey_fences`, on this same thread, turns them away before saying so.
                Target::Pool(ranges) => unsafe { self.link.read_payload(ranges) },
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
        unsafe { self.inbound.landed(&self.hub.options.segment) };
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
        let pool = &self.hub.options.segment;
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
