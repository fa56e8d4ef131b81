//! The receiving side of the handshake: a new connection becomes a session or joins one.

use baton_handoff::TransportKind;
use baton_handoff::{Frame, FrameLimits, Hello, Inbound, JoinTicket, WriteHead, visitor};
use baton_types::WorkerId;

use crate::events::{Event, Line, Place, Process};
use crate::faults::Fault;
use crate::receiver_session::{ReceiverSession, Stop};
use crate::stream::Micros;
use crate::world::World;
use crate::{Sabotage, Violation};

/// State of a connection in the handshake.
pub(crate) enum Greeted {
    /// The handshake goes on.
    Waits,
    /// It is a new session.
    Guest,
    /// It joins the session of this line.
    Joins(Line),
}

impl World {
    /// Continues the handshake.
    pub(crate) fn greet(&mut self, here: Process, session: &mut ReceiverSession) -> Result<Greeted, Stop> {
        let fingerprint = self.receivers[here].memory.geometry.layout.fingerprint();
        let until = *session.greeting_until.get_or_insert_with(|| {
            let until = self.now + self.limits.handshake.as_micros() as Micros;
            self.events.plan(until, Event::ReceiverTurn { line: session.line });
            until
        });
        if self.now >= until {
            return Err(session.lost("no handshake in time"));
        }
        if !session.hello_seen {
            if !session.own().take_hello(fingerprint).map_err(|e| session.lost(e))? {
                return Ok(Greeted::Waits);
            }
            session.hello_seen = true;
            session.own().outbox.push_bytes(Hello { fingerprint }.encode());
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let Some(frame) = session.own().next_frame(&limits).map_err(|e| session.lost(e))? else {
            return Ok(Greeted::Waits);
        };
        let welcomed = match frame {
            Frame::Join { ticket, stream } => self.join_session(here, session, ticket, stream),
            frame => visitor(&frame, self.receivers[here].id).map(|(worker, _)| {
                self.welcome(here, session, worker);
                Greeted::Guest
            }),
        };
        welcomed.map_err(|reason| {
            session.own().outbox.push_bytes(Frame::Reject { reason: reason.clone() }.encode());
            self.flush_receiver(session);
            session.lost(reason)
        })
    }

    fn welcome(&mut self, here: Process, session: &mut ReceiverSession, worker: WorkerId) {
        let token = (session.kind == TransportKind::Tcp).then(|| self.random.bits());
        let receiver = &mut self.receivers[here];
        let earlier: Vec<Line> = receiver.members.introduce(session.line, worker, token).into_iter().copied().collect();
        for line in earlier {
            if let Some(session) = self.receivers[here].sessions.get_mut(&line) {
                session.superseded = true;
                self.wake_receiver(line);
            }
        }
        let geometry = self.receivers[here].memory.geometry.clone();
        let (blocks, ticket) =
            (geometry.blocks.clone(), token.map(|token| JoinTicket { session: session.line, token }));
        let inbound = Inbound::new(session.line, worker, session.kind, geometry, &self.limits);
        session.worker = Some(worker);
        session.inbound = Some(if self.broken(Sabotage::SkipVerify) { inbound.unverified() } else { inbound });
        session.own().outbox.push_bytes(Frame::Welcome { blocks, ticket }.encode());
    }

    fn join_session(
        &mut self,
        here: Process,
        session: &mut ReceiverSession,
        ticket: JoinTicket,
        stream: u8,
    ) -> Result<Greeted, String> {
        let careless = self.broken(Sabotage::IgnoreTickets);
        let receiver = &mut self.receivers[here];
        let owner = match receiver.members.join(ticket, stream).copied() {
            Err(_) if careless && receiver.sessions.contains_key(&ticket.session) => ticket.session,
            joined => joined?,
        };
        session.own().stream = stream.into();
        session.own().outbox.push_bytes(Frame::Joined.encode());
        Ok(Greeted::Joins(owner))
    }

    /// Hands a connection over to the session it has joined.
    pub(crate) fn hand_over(&mut self, here: Process, session: &mut ReceiverSession, owner: Line) {
        let receiver = &mut self.receivers[here];
        receiver.members.dismiss(session.line);
        match receiver.sessions.get_mut(&owner) {
            Some(of) => {
                of.joined.append(&mut session.ends);
                receiver.streams.insert(session.line, owner);
                self.wake_receiver(owner);
            }
            None => self.close_up(session.line),
        }
    }

    /// A stranger connects, asks to join some session with a made-up ticket, and then writes to blocks that are lent there.
    pub(crate) fn stranger(&mut self) {
        let here = Process::Decode(self.random.below(self.decodes.len() as u64) as Place);
        let receiver = &self.receivers[here];
        let over_tcp = |session: &&ReceiverSession| session.kind == TransportKind::Tcp && session.worker.is_some();
        let sessions: Vec<Line> = receiver.sessions.values().filter(over_tcp).map(|session| session.line).collect();
        if sessions.is_empty() {
            return;
        }
        let session = sessions[self.random.below(sessions.len() as u64) as usize];
        let (from, serial) = match self.lines.get(&session) {
            Some(connection) => (connection.from, connection.session),
            None => return,
        };
        self.faults.count(Fault::Stranger);
        let line = self.connect(from, here, serial, TransportKind::Tcp);
        let (token, stream) = (self.random.bits(), self.random.within(1, 4) as u8);
        let layout = self.receivers[here].memory.geometry.layout.clone();
        let mut words = Hello { fingerprint: layout.fingerprint() }.encode();
        words.extend(Frame::Join { ticket: JoinTicket { session, token }, stream }.encode());
        for epoch in self.receivers[here].lent() {
            let payload = layout.block_bytes(0) as u32;
            words.extend(Frame::Write(WriteHead { epoch, group: 0, layer: 0, payload, indexes: vec![0] }).encode());
            words.extend(vec![0xbd; payload as usize]);
        }
        let delay = self.faults.delay(&mut self.random);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        connection.is_strangers = true;
        let at = connection.up.send(words, self.now, delay);
        self.events.plan(at, Event::ReceiverTurn { line });
    }

    /// I3: no byte of a stranger may reach the pool.
    pub(crate) fn check_writer(&self, line: Line) -> Result<(), Violation> {
        match self.lines.get(&line).is_some_and(|connection| connection.is_strangers) {
            true => Err(self.violation("I3", "what somebody without a ticket says reaches the pool")),
            false => Ok(()),
        }
    }
}
