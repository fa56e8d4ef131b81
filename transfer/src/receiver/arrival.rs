//! A new connection at the decode end, from its first byte on. If it opens a session, its thread shakes hands and serves the session.
//! If it joins a session, it is passed on to that session's thread.
//!
//! This module decides who may come in. What a session then does is up to [`super::session`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::hub::{Hub, Mail};
use super::session::{Session, Welcomed};
use crate::device::Pool;
use crate::handshake::{self, Arrival, Guest, HandshakeEnd};
use crate::link::{Link, Socket};
use crate::ucx::Worker;
use baton_handoff::{Frame, FrameLimits, Inbound, JoinTicket, SessionId, TransferError, TransportKind};
use baton_types::random_u64;

/// Lets a connection in, and serves a session until either side ends it.
pub(crate) fn run(hub: Arc<Hub>, id: SessionId, mail: Arc<Mail>, socket: Socket) {
    let _there = There { hub: hub.clone(), id };
    let limits = FrameLimits::new(&hub.options.limits, hub.options.geometry.layout.groups.len());
    let mut link = Link::new(socket, hub.options.pool.clone(), limits);
    let served = receive(&hub, &mail, &mut link).and_then(|arrival| match arrival {
        Arrival::Guest(guest) => serve(&hub, id, mail, link, guest),
        Arrival::Stream { ticket, stream } => join(&hub, link, ticket, stream),
    });
    match served {
        Ok(()) | Err(TransferError::Closed) => {}
        Err(error) => tracing::warn!(%error, "a prefill worker was turned away"),
    }
}

/// Removes the session from the hub when dropped, even in a panic.
struct There {
    hub: Arc<Hub>,
    id: SessionId,
}

impl Drop for There {
    fn drop(&mut self) {
        self.hub.dismiss(self.id);
    }
}

fn receive(hub: &Hub, mail: &Mail, link: &mut Link) -> Result<Arrival, TransferError> {
    let until = Instant::now() + hub.options.limits.handshake;
    let end = HandshakeEnd { wake: &mail.wake, until, stopped: &|| hub.stopped() };
    let fingerprint = hub.options.geometry.layout.fingerprint();
    handshake::receive(link, hub.options.worker, fingerprint, &end)
}

/// Passes the connection to the session whose ticket it shows. Other sessions learn nothing of it, and it learns nothing of them.
fn join(hub: &Hub, mut link: Link, ticket: JoinTicket, stream: u8) -> Result<(), TransferError> {
    let session = hub.join(ticket, stream).map_err(|reason| handshake::turn_away(&mut link, reason))?;
    link.push(&Frame::Joined);
    session.join(stream, link);
    Ok(())
}

fn serve(hub: &Arc<Hub>, id: SessionId, mail: Arc<Mail>, mut link: Link, guest: Guest) -> Result<(), TransferError> {
    let welcomed = welcome(hub, id, &guest, &mut link)?;
    let peer = guest.worker;
    let inbound = Inbound::new(id, peer, welcomed.kind, hub.options.geometry.clone(), &hub.options.limits);
    let inbound = if hub.options.verify { inbound } else { inbound.unverified() };
    let mut session = Session::new(hub.clone(), mail, link, inbound, welcomed);
    let end = catch_unwind(AssertUnwindSafe(|| session.serve()))
        .unwrap_or_else(|_| TransferError::os("serve a prefill worker", "the session's thread panicked"));
    tracing::debug!(%peer, reason = %end, "session over");
    session.wind_up(guest.process, end);
    Ok(())
}

fn welcome(hub: &Hub, id: SessionId, guest: &Guest, link: &mut Link) -> Result<Welcomed, TransferError> {
    let kind = TransportKind::of(link.is_unix(), guest.over);
    let reachable = serves(&hub.options.pool, kind, link.is_unix());
    let reach = reachable.and_then(|()| hub.options.pool.reach().map_err(|error| error.to_string()));
    let reach = reach.map_err(|reason| handshake::turn_away(link, &reason))?;
    let made = (kind == TransportKind::Ucx).then(|| hub.ucx().and_then(|engine| Worker::new(&engine))).transpose();
    let ucx = made.map_err(|error| handshake::turn_away(link, &error.to_string()))?;
    let token = (kind == TransportKind::Tcp).then(random_u64);
    hub.introduce(id, guest.worker, token);
    let ticket = token.map(|token| JoinTicket { session: id, token });
    link.push(&Frame::Welcome { blocks: hub.options.geometry.blocks.clone(), ticket });
    tracing::debug!(peer = %guest.worker, transport = kind.as_str(), "session begun");
    Ok(Welcomed { kind, ucx, reach })
}

const SPREAD: &str = "its pool is spread over several GPUs, which is reached through host memory alone";

/// Whether this pool can be reached over `kind`. Unless the pool is spread, the target descriptor has told the peer already.
fn serves(pool: &Pool, kind: TransportKind, unix: bool) -> Result<(), String> {
    let refused = match (kind, pool.is_device()) {
        (TransportKind::CudaIpc, false) => "its pool is not in a GPU's memory",
        (TransportKind::CudaIpc, true) if pool.is_spread() => SPREAD,
        // I3: this end cannot cut the peer's copies off. Only a unix socket tells it when the peer's process has ended.
        (TransportKind::CudaIpc, true) if !unix => "copies from GPU to GPU need a unix socket",
        (TransportKind::Shm, true) => "its pool is in a GPU's memory",
        _ => return Ok(()),
    };
    Err(refused.to_owned())
}
