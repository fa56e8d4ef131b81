//! The life of a session at the worker that gives KV, as the sender has it: `baton-handoff` decides which session a handoff goes over, over which
//! path a session connects, and what its end leads to. This file opens and closes simulated connections.

use baton_handoff::{Connecting, Excuse, FAREWELL, Line as Ops, Op, Outbound, Parties, Paths, Pools, Written};
use baton_handoff::{Effect, Meter, TransferError, TransportKind, blames_path, tells_peer};
use baton_types::WorkerId;

use crate::end::End;
use crate::events::{Event, Process, Serial};
use crate::sender_session::{Phase, SenderSession, Stop};
use crate::stream::{Micros, Timer};
use crate::world::World;

impl World {
    /// The session that a new handoff to a worker goes over.
    pub(crate) fn session_to(&mut self, here: Process, to: Process, peer: WorkerId) -> Serial {
        let now = self.clock_now(here);
        let sender = &mut self.senders[here];
        let latest = sender.latest.get(&peer).copied();
        if let Some(serial) = latest
            && let Some(session) = sender.sessions.get(&serial)
        {
            let before = session.before.and_then(|before| sender.sessions.get(&before));
            let waits = before.is_some_and(|before| before.line.closed().is_none());
            let changes = sender.paths.get_mut(peer).is_some_and(|paths| paths.would_change(now));
            let session = sender.sessions.get_mut(&serial);
            if session.is_some_and(|session| session.line.goes_on(changes, waits)) {
                return serial;
            }
            let retired = sender.sessions[&serial].line.is_retired();
            self.summary.replaced += u64::from(retired);
            self.wake_sender(here, serial);
        }
        self.new_session(here, to, peer, latest)
    }

    fn new_session(&mut self, here: Process, to: Process, peer: WorkerId, before: Option<Serial>) -> Serial {
        self.next_session += 1;
        let serial = self.next_session;
        let sender = &self.senders[here];
        let parties = Parties { me: sender.id, peer };
        let pools = Pools::alike(sender.memory.geometry.clone());
        let session = SenderSession {
            to,
            peer,
            kind: TransportKind::Tcp,
            serial,
            before,
            connecting: None,
            excuse: None,
            ends: Vec::new(),
            asked: Vec::new(),
            line: Ops::new(self.limits.clone()),
            outbound: Outbound::new(parties, pools, &self.limits),
            phase: Phase::Waiting,
            written: Written::default(),
            meter: Meter::default(),
            sending: Default::default(),
            mapped: None,
            copying: Default::default(),
            timer: Timer::default(),
        };
        let sender = &mut self.senders[here];
        sender.sessions.insert(serial, session);
        sender.latest.insert(peer, serial);
        self.wake_sender(here, serial);
        serial
    }

    /// Waits for the session before this one to end, then connects.
    pub(crate) fn wait_for_before(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Stop> {
        let sender = &self.senders[here];
        if session.before.is_some_and(|before| sender.sessions.contains_key(&before)) {
            return Ok(());
        }
        let now = self.clock_now(here);
        let near = self.near(here, session.to);
        let shm = (TransportKind::Shm, (!near).then(|| "it runs on another host".to_owned()));
        let new = || Paths::new([shm, (TransportKind::Tcp, None)], true);
        let paths = self.senders[here].paths.to(session.peer, self.limits.connections, new);
        session.connecting = Some(Connecting::new(paths, self.limits.handshake, now));
        self.try_next_path(here, session).map_err(Stop::Ended)
    }

    fn try_next_path(&mut self, here: Process, session: &mut SenderSession) -> Result<(), TransferError> {
        let now = self.clock_now(here);
        let Some((kind, until)) = session.connecting.as_mut().and_then(|connecting| connecting.next_path(now)) else {
            return Err(session.connecting.take().and_then(Connecting::failure).unwrap_or(TransferError::Closed));
        };
        let connection = self.connect(here, session.to, session.serial, kind);
        session.kind = kind;
        session.ends = vec![End::new(connection, 0)];
        let until = self.micros(here, until);
        session.phase = Phase::Greeting { until, hello_seen: false };
        self.call(here, session, Some(until));
        Ok(())
    }

    /// Ends handoffs that are late or aborted while the session is not open yet.
    pub(crate) fn tend(&mut self, here: Process, session: &mut SenderSession) {
        let now = self.clock_now(here);
        let next = session.outbound.wait_for_session(now, &mut session.line);
        for effect in session.outbound.take_effects() {
            match effect {
                Effect::Report(done, outcome) => done.report(outcome),
                Effect::Hush(quiet) => drop(quiet),
                // There is no peer to tell, and nothing is being copied.
                Effect::Send(_) | Effect::Cancel(_) => {}
            }
        }
        if let Some(at) = next {
            self.set_sender_timer(here, session, self.micros(here, at));
        }
    }

    /// The session has all the connections that it will have.
    pub(crate) fn opened(&mut self, here: Process, session: &mut SenderSession) {
        session.phase = Phase::Open;
        if let Some(paths) = self.senders[here].paths.get_mut(session.peer) {
            paths.begun(session.kind, session.ends.len());
        }
        self.wake_sender(here, session.serial);
    }

    /// A session has failed, in any phase.
    pub(crate) fn over(&mut self, here: Process, session: &mut SenderSession, error: TransferError) {
        match session.phase.clone() {
            Phase::Greeting { .. } => {
                self.end_connections(session);
                let failed = session.connecting.as_mut().map_or(Ok(()), |connecting| connecting.failed(error.clone()));
                if failed.is_ok() {
                    self.blame(here, session, &error);
                }
                if let Err(error) = failed.and_then(|()| self.try_next_path(here, session)) {
                    self.close(session, &error);
                    self.part(here, session, &error);
                }
            }
            Phase::Excusing { .. } => self.excuse_failed(here, session, &error),
            Phase::Open => self.wind_up_sender(here, session, error),
            _ => {
                self.close(session, &error);
                self.end_connections(session);
                self.part(here, session, &error);
            }
        }
    }

    fn blame(&mut self, here: Process, session: &SenderSession, error: &TransferError) {
        let now = self.clock_now(here);
        if let Some(paths) = self.senders[here].paths.get_mut(session.peer) {
            paths.blamed(session.kind, error, now);
        }
    }

    /// Ends an open session: its handoffs, then its queue. Its last frames may still leave.
    fn wind_up_sender(&mut self, here: Process, session: &mut SenderSession, error: TransferError) {
        if blames_path(&error, &session.line) {
            self.blame(here, session, &error);
        }
        let now = self.clock_now(here);
        session.outbound.end_all(&error, now, &mut session.line);
        self.carry_out(here, session);
        self.close(session, &error);
        let until = self.now + self.random.within(1, FAREWELL.as_micros() as Micros);
        session.phase = Phase::Closing { until, error };
        self.plan_sender_turn(here, session.serial, until);
    }

    /// Closes the connections and unmaps the peer's pool.
    pub(crate) fn hang_up(&mut self, here: Process, session: &mut SenderSession, error: &TransferError) {
        session.mapped = None;
        session.copying.clear();
        self.end_connections(session);
        if let Some(paths) = self.senders[here].paths.get_mut(session.peer) {
            paths.over(session.kind == TransportKind::Shm);
        }
        self.part(here, session, error);
    }

    /// Tells the peer that its pool is unmapped, if the session must. Else the session is over.
    fn part(&mut self, here: Process, session: &mut SenderSession, error: &TransferError) {
        let paths = self.senders[here].paths.get_mut(session.peer);
        if !paths.is_some_and(|paths| tells_peer(error, &session.line, paths)) {
            return self.leave_session(session);
        }
        session.excuse = Some(Excuse::new(self.clock_now(here)));
        self.try_excuse(here, session);
    }

    /// Tries to tell the peer, over a new connection.
    pub(crate) fn try_excuse(&mut self, here: Process, session: &mut SenderSession) {
        if self.receivers[session.to].id != session.peer || !self.is_alive(session.to) {
            return self.excused(here, session);
        }
        let connection = self.connect(here, session.to, session.serial, TransportKind::Shm);
        session.ends = vec![End::new(connection, 0)];
        session.phase = Phase::Excusing { hello_seen: false };
        self.milestone("telling", here);
        self.call(here, session, None);
    }

    fn excuse_failed(&mut self, here: Process, session: &mut SenderSession, error: &TransferError) {
        self.end_connections(session);
        let now = self.clock_now(here);
        match session.excuse.as_mut().and_then(|excuse| excuse.failed(error, now)) {
            Some(again) => {
                let at = self.micros(here, again);
                session.phase = Phase::Pausing { until: at };
                self.plan_sender_turn(here, session.serial, at);
            }
            None => self.excused(here, session),
        }
    }

    /// The peer knows that its pool is unmapped, or is gone, or has been told in vain for too long.
    pub(crate) fn excused(&mut self, here: Process, session: &mut SenderSession) {
        if let Some(paths) = self.senders[here].paths.get_mut(session.peer) {
            paths.told();
        }
        self.leave_session(session);
    }

    /// Closes the queue and fails what is still queued. From now on another session may be opened.
    fn close(&mut self, session: &mut SenderSession, error: &TransferError) {
        let (ops, aborts) = session.line.close(error.clone());
        for op in ops {
            if let Op::Complete { done, .. } = op {
                done.report(Err(error.clone()));
            }
        }
        drop(aborts);
    }

    /// A session's last act.
    pub(crate) fn leave_session(&mut self, session: &mut SenderSession) {
        self.end_connections(session);
        session.phase = Phase::Over;
    }

    fn end_connections(&mut self, session: &mut SenderSession) {
        session.ends.iter().for_each(|end| self.end_connection(end.line));
        session.asked.drain(..).for_each(|asked| self.end_connection(asked.end.line));
    }

    pub(crate) fn plan_sender_turn(&mut self, here: Process, session: Serial, at: Micros) {
        let life = self.senders[here].life;
        self.events.plan(at, Event::SenderTurn { process: here, life, session });
    }
}
