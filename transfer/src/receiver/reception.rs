//! The decode end's accepting thread: accepts prefill workers over TCP and the unix socket, and lets leases expire.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arrival;
use super::hub::{Hub, Mail};
use crate::handshake::turn_away;
use crate::link::{Got, Link, Socket};
use crate::tls::Tls;
use crate::unix::Door;
use crate::wake::{Interest, wait};
use crate::{tcp, threads};
use baton_handoff::{FrameLimits, Hello, SessionId, TransferError};

/// Pause in accepting after the system had no descriptor or memory for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Most connections accepted in a turn. Then leases have theirs, however many connections come (I5).
const ACCEPTS: usize = 16;

/// Most refused connections kept open for a while. One closed at once may lose the reason before the peer has read it.
const KEPT_OPEN: usize = 16;

/// The two listening sockets.
pub(crate) struct Doors {
    pub tcp: TcpListener,
    pub unix: Door,
}

/// Runs until the hub stops, then waits for the sessions.
pub(crate) fn run(hub: Arc<Hub>, doors: Doors) {
    let mut desk = Desk { hub, doors, sessions: Vec::new(), refused: VecDeque::new(), last_id: 0 };
    while !desk.hub.stopped() {
        let next = desk.hub.with(|ledger| {
            ledger.expire(Instant::now());
            ledger.next_expiry()
        });
        let next = next.map(|at| at.saturating_duration_since(Instant::now()));
        let waited = match desk.let_in() {
            Crowd::Gone => desk.wait(next),
            Crowd::Waits => desk.wait(Some(Duration::ZERO)),
            Crowd::Overwhelms => wait(&desk.hub.wake, &[], Some(next.map_or(PAUSE, |next| next.min(PAUSE)))).map(drop),
        };
        if let Err(error) = waited {
            // I5: leases must expire all the same.
            tracing::warn!(%error, "cannot wait for prefill workers");
            std::thread::sleep(PAUSE);
        }
        desk.refused.retain_mut(|link| !link.is_opening() || open(link));
    }
    for session in desk.sessions {
        if session.join().is_err() {
            tracing::error!("a session's thread panicked");
        }
    }
}

/// Whether connections still wait after some were accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Crowd {
    /// None wait.
    Gone,
    /// More may wait.
    Waits,
    /// More than the system has descriptors or memory for.
    Overwhelms,
}

struct Desk {
    hub: Arc<Hub>,
    doors: Doors,
    sessions: Vec<JoinHandle<()>>,
    refused: VecDeque<Link>,
    last_id: SessionId,
}

impl Desk {
    /// Accepts waiting connections, at most `ACCEPTS`.
    fn let_in(&mut self) -> Crowd {
        for round in 0..ACCEPTS {
            let Some(accepted) = accept(&self.doors, self.hub.options.tls.as_ref(), round) else { return Crowd::Gone };
            self.last_id += 1;
            self.sessions.retain(|session| !session.is_finished());
            match accepted.and_then(|socket| admit(&self.hub, self.last_id, socket)) {
                Ok(Admitted::Session(session)) => self.sessions.push(session),
                Ok(Admitted::Refused(link)) => {
                    self.refused.push_back(link);
                    self.refused.drain(..self.refused.len().saturating_sub(KEPT_OPEN));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a prefill worker");
                    return Crowd::Overwhelms;
                }
            }
        }
        Crowd::Waits
    }

    /// Waits for a connection, or for a refused peer to go on with the TLS handshake, which must end before it can be told why.
    fn wait(&self, timeout: Option<Duration>) -> Result<(), TransferError> {
        let opening = self.refused.iter().filter(|link| link.is_opening()).map(|link| (link.as_fd(), Interest::Read));
        let doors = [(self.doors.tcp.as_fd(), Interest::Read), (self.doors.unix.listener.as_fd(), Interest::Read)];
        let fds: Vec<_> = doors.into_iter().chain(opening).collect();
        wait(&self.hub.wake, &fds, timeout).map(drop)
    }
}

/// Goes on with a refused peer's TLS handshake, so that it can be told why. False when the connection fails.
fn open(link: &mut Link) -> bool {
    matches!(link.discard_payload(usize::MAX), Ok(Got::Bytes(_) | Got::Blocked)) && link.flush().is_ok()
}

/// Accepts a connection from either socket and readies it. The sockets take turns by `round`, so that a crowd at one does not block
/// the other.
fn accept(doors: &Doors, tls: Option<&Tls>, round: usize) -> Option<Result<Socket, TransferError>> {
    let tcp = || {
        let (stream, _) = doors.tcp.accept()?;
        tcp::tune(&stream)?;
        match tls {
            Some(tls) => tls.accept(stream).map(|stream| Socket::Tls(Box::new(stream))),
            None => Ok(Socket::Tcp(stream)),
        }
    };
    let unix = || {
        doors.unix.listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| Socket::Unix(stream)))
    };
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
    let started =
        threads::spawn(format!("kv-in-{id}"), &hub.options.cpus, move || arrival::run(session, id, mail, socket));
    if started.is_err() {
        hub.dismiss(id);
    }
    started.map(Admitted::Session)
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixStream};

    use super::*;

    #[test]
    fn however_many_come_only_so_many_are_let_in_before_leases_have_their_turn() {
        // I5: a crowd at one socket, all waiting before the first is accepted.
        let hub = Arc::new(Hub::alone(1));
        let name = format!("baton-crowd-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let unix = crate::unix::listen(&name, None).unwrap();
        let doors = Doors { tcp: tcp::listen("127.0.0.1:0".parse().unwrap()).unwrap(), unix };
        let crowd: Vec<_> = (0..2 * ACCEPTS + 3).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
        let mut desk = Desk { hub, doors, sessions: Vec::new(), refused: VecDeque::new(), last_id: 0 };
        let mut turns = Vec::new();
        while desk.last_id < crowd.len() as u64 {
            turns.push((desk.let_in(), desk.last_id));
        }
        let (most, all) = (ACCEPTS as u64, crowd.len() as u64);
        // The sockets take turns, but nobody waits at the other.
        assert_eq!(turns, [(Crowd::Waits, most), (Crowd::Waits, 2 * most), (Crowd::Gone, all)]);
        // Only one connection fits. Of the refused ones only so many are kept open.
        assert_eq!(desk.refused.len(), KEPT_OPEN);
        desk.hub.stop();
    }
}
