//! A session at the worker that takes KV. It does with simulated sockets what the session's thread does with real ones.

use std::collections::BTreeMap;

use baton_handoff::{Frame, FrameLimits, Inbound, PeerReach, TransferError, TransportKind};
use baton_types::{Epoch, WorkerId};

use crate::arrival::Greeted;
use crate::arriving::Coming;
use crate::end::End;
use crate::events::{Event, Line, Process};
use crate::stream::{Micros, Timer};
use crate::world::World;
use crate::{Sabotage, Violation};

/// A session, or a connection that is still in the handshake.
pub(crate) struct ReceiverSession {
    pub line: Line,
    pub kind: TransportKind,
    /// Set once the peer has identified itself.
    pub inbound: Option<Inbound>,
    pub worker: Option<WorkerId>,
    pub hello_seen: bool,
    /// When the handshake must be over; set at the first turn.
    pub greeting_until: Option<Micros>,
    /// Its own connection, then those that have joined it. Empty only after the connection was handed over to another session.
    pub ends: Vec<End>,
    /// Connections that have joined since its last turn.
    pub joined: Vec<End>,
    pub coming: BTreeMap<usize, Coming>,
    /// Epochs that other threads want fenced.
    pub fences: Vec<Epoch>,
    /// The same worker has opened another session, which ends this one.
    pub superseded: bool,
    /// The peer's process has died.
    dead: bool,
    /// The peer may have mapped the pool, so a closed connection does not prove that it cannot write.
    pool_given: bool,
    timer: Timer,
    /// Why the session has ended. It may still wait for proof that the peer cannot write.
    ended: Option<TransferError>,
}

/// Why a turn broke off: the session has ended, or an invariant is violated.
pub(crate) enum Stop {
    Ended(TransferError),
    Broken(Violation),
}

impl ReceiverSession {
    pub(crate) fn new(line: Line, kind: TransportKind) -> ReceiverSession {
        ReceiverSession {
            line,
            kind,
            inbound: None,
            worker: None,
            hello_seen: false,
            greeting_until: None,
            ends: vec![End::new(line, 0)],
            joined: Vec::new(),
            coming: BTreeMap::new(),
            fences: Vec::new(),
            superseded: false,
            dead: false,
            pool_given: false,
            timer: Timer::default(),
            ended: None,
        }
    }

    pub(crate) fn own(&mut self) -> &mut End {
        &mut self.ends[0]
    }

    pub(crate) fn lost(&self, cause: impl Into<String>) -> Stop {
        let peer = self.worker.unwrap_or_default();
        Stop::Ended(TransferError::PeerLost { peer, cause: cause.into() })
    }
}

impl World {
    pub(crate) fn wake_receiver(&mut self, line: Line) {
        let at = self.soon();
        self.events.plan(at, Event::ReceiverTurn { line });
    }

    /// The session learns that its peer's process has died.
    pub(crate) fn died(&mut self, line: Line) -> Result<(), Violation> {
        let here = self.lines.get(&line).map(|connection| connection.to);
        if let Some(session) = here.and_then(|here| self.receivers[here].sessions.get_mut(&line)) {
            session.dead = true;
            self.wake_receiver(line);
        }
        Ok(())
    }

    /// Takes a turn of the session that has this connection: does all that can be done now, or a part of it.
    pub(crate) fn receiver_turn(&mut self, line: Line) -> Result<(), Violation> {
        let Some((here, life)) = self.lines.get(&line).map(|c| (c.to, c.to_life)) else { return Ok(()) };
        let receiver = &mut self.receivers[here];
        if receiver.life != life {
            return Ok(());
        }
        let line = receiver.streams.get(&line).copied().unwrap_or(line);
        let Some(mut session) = receiver.sessions.remove(&line) else { return Ok(()) };
        let mut owner = None;
        if session.ended.is_none() {
            match self.serve(here, &mut session) {
                Ok(joins) => owner = joins,
                Err(Stop::Broken(violation)) => return Err(violation),
                Err(Stop::Ended(error)) => self.wind_up(here, &mut session, error),
            }
        }
        match owner {
            Some(owner) => self.hand_over(here, &mut session, owner),
            None if !self.sever(here, &mut session) => drop(self.receivers[here].sessions.insert(line, session)),
            None => self.receivers[here].forget(line),
        }
        self.after(here)
    }

    /// Ends a session: what is in flight fails, and nothing more is read.
    fn wind_up(&mut self, here: Process, session: &mut ReceiverSession, error: TransferError) {
        if let Some(inbound) = &mut session.inbound {
            inbound.lost(&mut self.receivers[here].ledger, &error);
        }
        session.ended = Some(error);
        let joined = std::mem::take(&mut session.joined);
        session.ends.iter().chain(&joined).for_each(|end| self.close_up(end.line));
    }

    /// Closes a connection from the receiving side. What the peer sends from now on is lost.
    pub(crate) fn close_up(&mut self, line: Line) {
        let delay = self.faults.delay(&mut self.random);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        let at = connection.down.finish(self.now, delay);
        let turn = connection.sender_turn();
        connection.up.cut(self.now, at);
        self.events.plan(at, turn);
    }

    /// Gives back what an ended session held, once the peer provably cannot write. True when the session is over.
    fn sever(&mut self, here: Process, session: &mut ReceiverSession) -> bool {
        let Some(error) = &session.ended else { return false };
        let careless = self.broken(Sabotage::FreeOnLost);
        let ledger = &mut self.receivers[here].ledger;
        let Some(inbound) = &mut session.inbound else { return true };
        let has_pool = session.pool_given && !careless;
        let reach = PeerReach { has_pool, gone: session.dead, superseded: session.superseded };
        inbound.let_go(reach, ledger, error)
    }

    /// Serves a session. Returns the session it joins, if it turns out to be a further connection of that one.
    fn serve(&mut self, here: Process, session: &mut ReceiverSession) -> Result<Option<Line>, Stop> {
        session.ends.append(&mut session.joined);
        self.listen(here, session);
        loop {
            if session.superseded {
                return Err(session.lost("it started another session"));
            }
            self.obey_fences(here, session);
            let moved = match session.inbound {
                Some(_) => self.read_round(here, session)?,
                None => match self.greet(here, session)? {
                    Greeted::Waits => false,
                    Greeted::Guest => true,
                    Greeted::Joins(owner) => return Ok(Some(owner)),
                },
            };
            self.answer(session);
            if !moved {
                break;
            }
            if self.random.chance(200) {
                // Other threads run in between.
                self.wake_receiver(session.line);
                break;
            }
        }
        self.beat(here, session);
        self.flush_receiver(session);
        self.look_for_ends(session)?;
        Ok(None)
    }

    /// Takes in the bytes that have arrived.
    fn listen(&mut self, here: Process, session: &mut ReceiverSession) {
        let (mut heard, now) = (false, self.now);
        for end in &mut session.ends {
            let Some(connection) = self.lines.get_mut(&end.line) else { continue };
            while let Some(bytes) = connection.up.receive(now) {
                end.inbox.extend(bytes);
                heard = true;
            }
        }
        let instant = self.clock_now(here);
        if heard
            && let Some(inbound) = session.inbound.as_mut()
            && inbound.heard(instant)
        {
            inbound.renew(instant, &mut self.receivers[here].ledger);
        }
    }

    /// Ends the session if one of its connections has ended. A connection that has carried nothing yet is only dropped.
    fn look_for_ends(&mut self, session: &mut ReceiverSession) -> Result<(), Stop> {
        for at in (0..session.ends.len()).rev() {
            let (line, stream) = (session.ends[at].line, session.ends[at].stream);
            let ended = self.lines.get(&line).is_none_or(|connection| connection.up.has_ended(self.now));
            if !ended || session.inbound.is_some() && !self.starved(session, at) {
                continue;
            }
            if !session.inbound.as_ref().is_some_and(|inbound| inbound.is_unused(stream)) {
                return Err(session.lost("it closed the connection"));
            }
            session.ends.remove(at);
            self.close_up(line);
        }
        Ok(())
    }

    /// Whether the bytes that have arrived over a connection allow no further step.
    fn starved(&self, session: &mut ReceiverSession, at: usize) -> bool {
        let limits = FrameLimits::new(&self.limits, 2);
        let end = &session.ends[at];
        match session.inbound.as_mut().and_then(|inbound| inbound.payload(end.stream)) {
            Some(payload) => !payload.is_done() && end.inbox.is_empty(),
            None => !end.has_frame(&limits),
        }
    }

    fn obey_fences(&mut self, here: Process, session: &mut ReceiverSession) {
        for epoch in std::mem::take(&mut session.fences) {
            if let Some(inbound) = &mut session.inbound {
                inbound.fence(epoch, &mut self.receivers[here].ledger);
            }
        }
    }

    /// Reads once from each connection; skips some at random, as other work may come first. False when there was nothing to read.
    fn read_round(&mut self, here: Process, session: &mut ReceiverSession) -> Result<bool, Stop> {
        let mut moved = false;
        for at in 0..session.ends.len() {
            moved |= session.ends.len() > 1 && self.random.chance(300) || self.read_some(here, session, at)?;
        }
        Ok(moved)
    }

    /// Queues the session's answers.
    fn answer(&mut self, session: &mut ReceiverSession) {
        while let Some(answer) = session.inbound.as_mut().and_then(Inbound::next_answer) {
            session.pool_given |= matches!(answer, Frame::Granted { .. }) && session.kind == TransportKind::Shm;
            session.own().outbox.push(&answer);
        }
    }

    /// Sends a heartbeat when one is due and nothing else waits to leave.
    fn beat(&mut self, here: Process, session: &mut ReceiverSession) {
        let now = self.clock_now(here);
        let may_say = session.own().outbox.is_empty();
        let Some(inbound) = &mut session.inbound else { return };
        let next = inbound.beat(now, may_say);
        self.answer(session);
        if let Some(at) = next {
            self.set_receiver_timer(session, self.micros(here, at));
        }
    }

    pub(crate) fn flush_receiver(&mut self, session: &mut ReceiverSession) {
        let mut left = false;
        for end in &mut session.ends {
            let Some(connection) = self.lines.get_mut(&end.line) else { continue };
            let none = |_| Vec::new();
            let last = end.outbox.flush(&mut connection.down, self.now, &mut self.random, &mut self.faults, none);
            let turn = connection.sender_turn();
            if let Some(at) = last {
                self.events.plan(at, turn);
            }
            left |= !end.outbox.is_empty();
        }
        if left {
            // The streams have room again once the peer has read.
            self.set_receiver_timer(session, self.now + 1_000);
        }
    }

    fn set_receiver_timer(&mut self, session: &mut ReceiverSession, at: Micros) {
        let at = at.max(self.now + 1);
        if session.timer.set(at, self.now) {
            self.events.plan(at, Event::ReceiverTurn { line: session.line });
        }
    }
}
