//! How a session at the worker that gives KV begins: the calling side of the handshake, and over TCP the further connections that join it.

use baton_handoff::{Frame, FrameLimits, Hello, JoinTicket, Over};
use baton_handoff::{TransferError, TransportKind, join_until};
use baton_types::WorkerId;

use crate::end::End;
use crate::events::{Event, Process};
use crate::sender_session::{Phase, SenderSession, Stop};
use crate::stream::Micros;
use crate::world::World;

/// Most connections of a session over TCP.
const CONNECTIONS: u64 = 4;

/// A connection that has asked to join.
pub(crate) struct Asked {
    pub end: End,
    hello_seen: bool,
}

impl World {
    /// Sends the first messages of a handshake, which may have to be over by `until`.
    pub(crate) fn call(&mut self, here: Process, session: &mut SenderSession, until: Option<Micros>) {
        let sender = &self.senders[here];
        let (me, peer) = (sender.id, session.peer);
        let outbox = &mut session.own().outbox;
        outbox.push_bytes(Hello { fingerprint: self.geometry.layout.fingerprint() }.encode());
        outbox.push_bytes(Frame::Identify { me, you: peer, over: Over::Stream }.encode());
        if let Some(until) = until {
            self.plan_sender_turn(here, session.serial, until);
        }
    }

    /// Takes in the bytes that have arrived over a connection. False if there were none.
    pub(crate) fn receive(&mut self, end: &mut End) -> bool {
        let mut heard = false;
        if let Some(connection) = self.lines.get_mut(&end.line) {
            while let Some(bytes) = connection.down.receive(self.now) {
                end.inbox.extend(bytes);
                heard = true;
            }
        }
        heard
    }

    pub(crate) fn has_ended(&self, end: &End) -> bool {
        self.lines.get(&end.line).is_none_or(|connection| connection.down.has_ended(self.now))
    }

    /// Continues the calling side of the handshake.
    pub(crate) fn greeting(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Stop> {
        self.receive(session.own());
        let (until, seen) = match &mut session.phase {
            Phase::Greeting { until, hello_seen } => (*until, hello_seen),
            Phase::Excusing { hello_seen } => (Micros::MAX, hello_seen),
            _ => return Ok(()),
        };
        let cannot = |cause: String| {
            Stop::Ended(TransferError::Connect { peer: WorkerId(0), address: "simulated".into(), cause })
        };
        if !*seen {
            *seen = session.ends[0].take_hello(self.geometry.layout.fingerprint()).map_err(cannot)?;
        }
        let limits = FrameLimits::new(&self.limits, 2);
        if *seen && let Some(frame) = session.own().next_frame(&limits).map_err(cannot)? {
            return match (frame, &session.phase) {
                (Frame::Welcome { ticket, .. }, Phase::Greeting { .. }) => {
                    let more = ticket.filter(|_| session.kind == TransportKind::Tcp);
                    more.into_iter().for_each(|ticket| self.ask_to_join(here, session, ticket, until));
                    if session.asked.is_empty() {
                        self.opened(here, session);
                    }
                    Ok(())
                }
                (Frame::Welcome { .. }, Phase::Excusing { .. }) => {
                    self.milestone("told", here);
                    self.excused(here, session);
                    Ok(())
                }
                (other, _) => Err(cannot(format!("{other:?}"))),
            };
        }
        match until <= self.now || self.has_ended(session.own()) {
            true => Err(cannot("no answer in time".into())),
            false => Ok(()),
        }
    }

    /// Opens the further connections of a session. Some break meanwhile.
    fn ask_to_join(&mut self, here: Process, session: &mut SenderSession, ticket: JoinTicket, last: Micros) {
        for stream in 1..self.random.within(1, CONNECTIONS) as u8 {
            let line = self.connect(here, session.to, session.serial, session.kind);
            let mut end = End::new(line, stream.into());
            end.outbox.push_bytes(Hello { fingerprint: self.geometry.layout.fingerprint() }.encode());
            end.outbox.push_bytes(Frame::Join { ticket, stream }.encode());
            session.asked.push(Asked { end, hello_seen: false });
            if self.faults.nips(&mut self.random) {
                let at = self.now + self.random.within(1, 100_000);
                self.events.plan(at, Event::Cut { line });
            }
        }
        if !session.asked.is_empty() {
            let process = here;
            let until = join_until(self.clock_at(process, last), self.clock_now(process));
            let until = self.micros(process, until);
            session.phase = Phase::Joining { until };
            self.plan_sender_turn(here, session.serial, until);
        }
    }

    /// Takes in the connections that join in time, and gives up the others.
    pub(crate) fn joining(&mut self, here: Process, session: &mut SenderSession, until: Micros) {
        for mut asked in std::mem::take(&mut session.asked) {
            self.receive(&mut asked.end);
            match self.has_joined(&mut asked) {
                Ok(true) => {
                    self.summary.joined += 1;
                    session.ends.push(asked.end);
                }
                Ok(false) if self.now < until && !self.has_ended(&asked.end) => session.asked.push(asked),
                _ => {
                    self.summary.left_out += 1;
                    self.end_connection(asked.end.line);
                }
            }
        }
        if session.asked.is_empty() {
            self.opened(here, session);
        }
    }

    fn has_joined(&self, asked: &mut Asked) -> Result<bool, String> {
        if !asked.hello_seen {
            asked.hello_seen = asked.end.take_hello(self.geometry.layout.fingerprint())?;
        }
        let limits = FrameLimits::new(&self.limits, 2);
        match if asked.hello_seen { asked.end.next_frame(&limits)? } else { None } {
            None => Ok(false),
            Some(Frame::Joined) => Ok(true),
            Some(other) => Err(format!("{other:?}")),
        }
    }
}
