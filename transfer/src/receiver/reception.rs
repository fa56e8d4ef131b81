//! The decode end's front desk, one thread: accepts prefill workers over TCP and the unix socket, and lets leases expire.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arrival;
use super::hub::{Hub, Mail};
use super::table::SessionId;
use crate::error::TransferError;
use crate::handshake::turn_away;
use crate::link::{Got, Link, Socket};
use crate::tls::Tls;
use crate::wake::{Interest, wait};
use crate::wire::{FrameLimits, Hello};
use crate::{tcp, threads};

/// How long nobody is accepted after the system had no descriptor or memory for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections accepted at a time; then leases have their turn, however many come (I5).
const ACCEPTS: usize = 16;

/// Refused connections kept open a while: one closed at once may take the reason along before the peer has read it.
const KEPT_OPEN: usize = 16;

/// The two doors.
pub(crate) struct Doors {
    pub tcp: TcpListener,
    pub unix: UnixListener,
}

/// Runs until the hub stops, then waits for the sessions.
pub(crate) fn run(hub: Arc<Hub>, doors: Doors) {
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    let mut refused: VecDeque<Link> = VecDeque::new();
    let mut next_id: SessionId = 0;
    while !hub.stopped() {
        let next = hub.with(|ledger| {
            ledger.expire(Instant::now());
            ledger.next_expiry()
        });
        let (mut paused, mut more) = (false, true);
        for round in 0..ACCEPTS {
            let Some(accepted) = accept(&doors, hub.options.tls.as_ref(), round) else {
                more = false;
                break;
            };
            next_id += 1;
            sessions.retain(|session| !session.is_finished());
            match accepted.and_then(|socket| admit(&hub, next_id, socket)) {
                Ok(Admitted::Session(session)) => sessions.push(session),
                Ok(Admitted::Refused(link)) => {
                    refused.push_back(link);
                    refused.drain(..refused.len().saturating_sub(KEPT_OPEN));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a prefill worker");
                    paused = true;
                    break;
                }
            }
        }
        let mut timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
        let opening = refused.iter().filter(|link| link.is_opening()).map(|link| (link.as_fd(), Interest::Read));
        let doors = [(doors.tcp.as_fd(), Interest::Read), (doors.unix.as_fd(), Interest::Read)];
        let fds: Vec<_> = doors.into_iter().chain(opening).collect();
        if more && !paused {
            timeout = Some(Duration::ZERO);
        }
        if paused {
            timeout = Some(timeout.map_or(PAUSE, |t| t.min(PAUSE)));
        }
        if let Err(error) = wait(&hub.wake, if paused { &[] } else { &fds[..] }, timeout) {
            tracing::error!(%error, "accepts nobody any more");
            break;
        }
        refused.retain_mut(|link| !link.is_opening() || open(link));
    }
    for session in sessions {
        if session.join().is_err() {
            tracing::error!("a session's thread panicked");
        }
    }
}

/// Goes on with what must come before a refused peer can be told why. False when it comes to nothing.
fn open(link: &mut Link) -> bool {
    matches!(link.discard_payload(usize::MAX), Ok(Got::Bytes(_) | Got::Blocked)) && link.flush().is_ok()
}

/// A connection that waits at either door, ready for use. The doors take turns, so that a crowd at one does not keep the other shut.
fn accept(doors: &Doors, tls: Option<&Tls>, round: usize) -> Option<Result<Socket, TransferError>> {
    let tcp = || {
        let (stream, _) = doors.tcp.accept()?;
        tcp::tune(&stream)?;
        match tls {
            Some(tls) => tls.accept(stream).map(|stream| Socket::Tls(Box::new(stream))),
            None => Ok(Socket::Tcp(stream)),
        }
    };
    let unix =
        || doors.unix.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| Socket::Unix(stream)));
    let nobody = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
    let either = match round.is_multiple_of(2) {
        true => unix().or_else(|error| if nobody(&error) { tcp() } else { Err(error) }),
        false => tcp().or_else(|error| if nobody(&error) { unix() } else { Err(error) }),
    };
    match either {
        Ok(socket) => Some(Ok(socket)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => Some(Err(TransferError::os("accept a connection", error))),
    }
}

enum Admitted {
    Session(JoinHandle<()>),
    Refused(Link),
}

/// Starts a session, or turns the peer away when there are too many.
fn admit(hub: &Arc<Hub>, id: SessionId, socket: Socket) -> Result<Admitted, TransferError> {
    let mail = Arc::new(Mail::new()?);
    if !hub.admit(id, mail.clone()) {
        let geometry = &hub.options.geometry;
        let limits = FrameLimits::new(&hub.options.limits, geometry.layout.groups.len());
        let mut link = Link::new(socket, hub.options.pool.clone(), limits);
        link.push_bytes(Hello { fingerprint: geometry.layout.fingerprint() }.encode());
        let error = turn_away(&mut link, "it has as many connections as it may have");
        tracing::warn!(%error, "a prefill worker was turned away");
        return Ok(Admitted::Refused(link));
    }
    let session = hub.clone();
    let started = threads::spawn(format!("kv-in-{id}"), move || arrival::run(session, id, mail, socket));
    if started.is_err() {
        hub.dismiss(id);
    }
    started.map(Admitted::Session)
}
