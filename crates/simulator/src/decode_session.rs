//! A session at a decode worker: what its thread does with its socket, on a simulated one.

use baton_transfer::protocol::{Frame, FrameLimits, Hello, Inbound, PREFIX, Target, parse_body, parse_prefix, visitor};
use baton_transfer::{Reach, TransferError, TransportKind};
use baton_types::{Epoch, WorkerId};

use crate::events::{Event, Line, Place};
use crate::outbox::Outbox;
use crate::stream::{Micros, Timer};
use crate::world::World;
use crate::{Sabotage, Violation};

/// One connection's end at the decode worker.
pub(crate) struct DecodeSession {
    line: Line,
    kind: TransportKind,
    /// Since the peer has said who it is.
    inbound: Option<Inbound>,
    worker: Option<WorkerId>,
    hello_seen: bool,
    /// Since it was taken up.
    greeting_until: Option<Micros>,
    inbox: Vec<u8>,
    outbox: Outbox,
    /// Epochs that other threads want fenced.
    pub fences: Vec<Epoch>,
    /// The same worker has another session, so it has ended this one.
    superseded: bool,
    /// The peer's process is gone.
    dead: bool,
    /// It has seen the pool, so a closed connection proves nothing.
    pool_given: bool,
    timer: Timer,
    /// Why it has ended; it may wait for proof that the peer cannot write.
    ended: Option<TransferError>,
}

/// Why a step did not go well.
enum Stop {
    Ended(TransferError),
    Broken(Violation),
}

/// The next frame of an inbox, once all of it is here.
pub(crate) fn take_frame(inbox: &mut Vec<u8>, limits: &FrameLimits) -> Result<Option<Frame>, String> {
    let Some(prefix) = inbox.first_chunk::<PREFIX>() else { return Ok(None) };
    let told = |m: baton_transfer::protocol::Malformed| format!("{}: {}", m.field, m.problem);
    let head = parse_prefix(*prefix, limits).map_err(told)?;
    let Some(body) = inbox.get(PREFIX..PREFIX + head.len) else { return Ok(None) };
    let frame = parse_body(&head, body).map_err(told)?;
    inbox.drain(..PREFIX + head.len);
    Ok(Some(frame))
}

/// A Hello of this fingerprint, once it is here.
pub(crate) fn take_hello(inbox: &mut Vec<u8>, fingerprint: u64) -> Result<bool, String> {
    if inbox.len() < Hello::LEN {
        return Ok(false);
    }
    let hello = inbox.drain(..Hello::LEN).collect::<Vec<_>>();
    let hello = Hello::parse(&hello).map_err(|m| format!("{}: {}", m.field, m.problem))?;
    if hello.fingerprint == fingerprint { Ok(true) } else { Err("another layout".into()) }
}

impl DecodeSession {
    pub(crate) fn new(line: Line, kind: TransportKind) -> DecodeSession {
        DecodeSession {
            line,
            kind,
            inbound: None,
            worker: None,
            hello_seen: false,
            greeting_until: None,
            inbox: Vec::new(),
            outbox: Outbox::default(),
            fences: Vec::new(),
            superseded: false,
            dead: false,
            pool_given: false,
            timer: Timer::default(),
            ended: None,
        }
    }

    fn lost(&self, cause: impl Into<String>) -> Stop {
        let peer = self.worker.unwrap_or_default();
        Stop::Ended(TransferError::PeerLost { peer, cause: cause.into() })
    }
}

impl World {
    pub(crate) fn wake_decode(&mut self, line: Line) {
        let at = self.soon();
        self.events.plan(at, Event::DecodeTurn { line });
    }

    /// Its process has died.
    pub(crate) fn died(&mut self, line: Line) -> Result<(), Violation> {
        let place = self.lines.get(&line).map(|connection| connection.decode);
        if let Some(session) = place.and_then(|place| self.decodes[place].sessions.get_mut(&line)) {
            session.dead = true;
            self.wake_decode(line);
        }
        Ok(())
    }

    /// Everything that can be done now, or a part of it.
    pub(crate) fn decode_turn(&mut self, line: Line) -> Result<(), Violation> {
        let Some((place, life)) = self.lines.get(&line).map(|c| (c.decode, c.decode_life)) else { return Ok(()) };
        if self.decodes[place].life != life {
            return Ok(());
        }
        let Some(mut session) = self.decodes[place].sessions.remove(&line) else { return Ok(()) };
        if session.ended.is_none() {
            match self.serve(place, &mut session) {
                Ok(()) => {}
                Err(Stop::Broken(violation)) => return Err(violation),
                Err(Stop::Ended(error)) => self.wind_up(place, &mut session, error),
            }
        }
        if !self.sever(place, &mut session) {
            self.decodes[place].sessions.insert(line, session);
        }
        self.after(place)
    }

    /// What is under way fails; nothing more is read.
    fn wind_up(&mut self, place: Place, session: &mut DecodeSession, error: TransferError) {
        if let Some(inbound) = &mut session.inbound {
            inbound.lost(&mut self.decodes[place].ledger, &error);
        }
        session.ended = Some(error);
        let delay = self.faults.delay(&mut self.random);
        let Some(connection) = self.lines.get_mut(&session.line) else { return };
        let at = connection.down.finish(self.now, delay);
        let (prefill, life, peer) = (connection.prefill, connection.prefill_life, connection.peer.0);
        // What the peer sends from now on finds nobody.
        connection.up.cut(self.now, at);
        self.events.plan(at, Event::PrefillTurn { prefill, life, peer });
    }

    /// Gives back what an ended session held, once the peer provably cannot write. True when the session is over.
    fn sever(&mut self, place: Place, session: &mut DecodeSession) -> bool {
        let Some(error) = &session.ended else { return false };
        let careless = self.broken(Sabotage::FreeOnLost);
        let ledger = &mut self.decodes[place].ledger;
        let Some(inbound) = &mut session.inbound else { return true };
        let proof = !session.pool_given || session.dead || session.superseded || careless;
        if proof {
            inbound.severed(ledger, error);
        }
        proof || !inbound.holds_any(ledger)
    }

    fn serve(&mut self, place: Place, session: &mut DecodeSession) -> Result<(), Stop> {
        let line = session.line;
        let now = self.now;
        if let Some(connection) = self.lines.get_mut(&line) {
            let mut heard = false;
            while let Some(bytes) = connection.up.receive(now) {
                session.inbox.extend(bytes);
                heard = true;
            }
            let instant = self.instant(now);
            if heard
                && let Some(inbound) = session.inbound.as_mut()
                && inbound.heard(instant)
            {
                inbound.renew(instant, &mut self.decodes[place].ledger);
            }
        }
        loop {
            if session.superseded {
                return Err(session.lost("it started another session"));
            }
            self.obey_fences(place, session);
            let moved = match session.inbound {
                Some(_) => self.read_some(place, session)?,
                None => self.greet(place, session)?,
            };
            self.answer(session);
            if !moved {
                break;
            }
            if self.random.chance(200) {
                // Other threads come in between.
                self.wake_decode(line);
                break;
            }
        }
        self.beat(session);
        self.flush_decode(session);
        let ended = self.lines.get(&line).is_none_or(|connection| connection.up.has_ended(now));
        if ended && session.inbound.is_none() | self.starved(session) {
            return Err(session.lost("it closed the connection"));
        }
        Ok(())
    }

    /// Whether nothing more can be made of what has arrived.
    fn starved(&self, session: &mut DecodeSession) -> bool {
        let limits = FrameLimits::new(&self.limits, 2);
        match session.inbound.as_mut().and_then(|inbound| inbound.payload(0)) {
            Some(payload) => !payload.is_done() && session.inbox.is_empty(),
            None => take_frame(&mut session.inbox.clone(), &limits).is_ok_and(|frame| frame.is_none()),
        }
    }

    fn obey_fences(&mut self, place: Place, session: &mut DecodeSession) {
        for epoch in std::mem::take(&mut session.fences) {
            if let Some(inbound) = &mut session.inbound {
                inbound.fence(epoch, &mut self.decodes[place].ledger);
            }
        }
    }

    /// The handshake's side that answers.
    fn greet(&mut self, place: Place, session: &mut DecodeSession) -> Result<bool, Stop> {
        let decode = &self.decodes[place];
        let (id, geometry) = (decode.id, decode.memory.geometry.clone());
        let fingerprint = geometry.layout.fingerprint();
        let until = *session.greeting_until.get_or_insert_with(|| {
            let until = self.now + self.limits.handshake.as_micros() as Micros;
            self.events.plan(until, Event::DecodeTurn { line: session.line });
            until
        });
        if self.now >= until {
            return Err(session.lost("no handshake in time"));
        }
        if !session.hello_seen {
            if !take_hello(&mut session.inbox, fingerprint).map_err(|e| session.lost(e))? {
                return Ok(false);
            }
            session.hello_seen = true;
            session.outbox.push_bytes(Hello { fingerprint }.encode());
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let Some(frame) = take_frame(&mut session.inbox, &limits).map_err(|e| session.lost(e))? else {
            return Ok(false);
        };
        match visitor(&frame, id) {
            Ok((worker, _)) => {
                self.supersede(place, session.line, worker);
                session.worker = Some(worker);
                let inbound = Inbound::new(session.line, worker, session.kind, geometry.clone(), &self.limits);
                let careless = self.broken(Sabotage::SkipVerify);
                session.inbound = Some(if careless { inbound.unverified() } else { inbound });
                session.outbox.push_bytes(Frame::Welcome { blocks: geometry.blocks, ticket: None }.encode());
                Ok(true)
            }
            Err(reason) => {
                session.outbox.push_bytes(Frame::Reject { reason: reason.clone() }.encode());
                self.flush_decode(session);
                Err(session.lost(reason))
            }
        }
    }

    /// A worker opens a session only after its last one is over.
    fn supersede(&mut self, place: Place, line: Line, worker: WorkerId) {
        let sessions = self.decodes[place].sessions.values_mut();
        let earlier = sessions.filter(|s| s.line < line && s.worker == Some(worker));
        let lines: Vec<Line> = earlier
            .map(|session| {
                session.superseded = true;
                session.line
            })
            .collect();
        lines.into_iter().for_each(|line| self.wake_decode(line));
    }

    /// A frame, or some payload. False when neither is there.
    fn read_some(&mut self, place: Place, session: &mut DecodeSession) -> Result<bool, Stop> {
        let now = self.instant(self.now);
        let Some(inbound) = &mut session.inbound else { return Ok(false) };
        if let Some(payload) = inbound.payload(0) {
            if !payload.is_done() && session.inbox.is_empty() {
                return Ok(false);
            }
            let (offset, wanted) = match payload.target() {
                Target::Nowhere(bytes) => (None, bytes),
                Target::Pool(ranges) => ranges.first().map_or((None, 0), |range| (Some(range.0), range.1)),
            };
            let bytes: Vec<u8> = session.inbox.drain(..wanted.min(session.inbox.len())).collect();
            payload.advance(bytes.len());
            if let Some(offset) = offset {
                // I3: the checker's books, not the ledger's.
                if self.decodes[place].memory.owner_at(offset).is_none() {
                    let what = format!("bytes for {offset} come when nobody keeps that block aside");
                    return Err(Stop::Broken(self.violation("I3", what)));
                }
                self.decodes[place].memory.write(offset, &bytes);
            }
            // SAFETY: a simulation is one thread.
            unsafe { inbound.landed(0, &mut Reach::Host(self.decodes[place].memory.segment.clone())) }
                .map_err(Stop::Ended)?;
            return Ok(true);
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let Some(frame) = take_frame(&mut session.inbox, &limits).map_err(|e| session.lost(e))? else {
            return Ok(false);
        };
        if let Frame::Complete { epoch, .. } = frame
            && self.broken(Sabotage::AckEarly)
        {
            session.outbox.push(&Frame::Verified { epoch });
        }
        let Some(inbound) = &mut session.inbound else { return Ok(false) };
        inbound.frame(0, frame, now, &mut self.decodes[place].ledger).map_err(Stop::Ended)?;
        Ok(true)
    }

    /// Queues answers.
    fn answer(&mut self, session: &mut DecodeSession) {
        while let Some(answer) = session.inbound.as_mut().and_then(Inbound::next_answer) {
            session.pool_given |= matches!(answer, Frame::Granted { .. }) && session.kind == TransportKind::Shm;
            session.outbox.push(&answer);
        }
    }

    /// Shows that it is alive, when it has said nothing else.
    fn beat(&mut self, session: &mut DecodeSession) {
        let now = self.instant(self.now);
        let Some(inbound) = &mut session.inbound else { return };
        let next = inbound.beat(now, session.outbox.is_empty());
        self.answer(session);
        if let Some(at) = next {
            self.set_decode_timer(session, self.micros(at));
        }
    }

    fn flush_decode(&mut self, session: &mut DecodeSession) {
        let Some(connection) = self.lines.get_mut(&session.line) else { return };
        let none = |_| Vec::new();
        let last = session.outbox.flush(&mut connection.down, self.now, &mut self.random, &mut self.faults, none);
        let (prefill, life, peer) = (connection.prefill, connection.prefill_life, connection.peer.0);
        if let Some(at) = last {
            self.events.plan(at, Event::PrefillTurn { prefill, life, peer });
        }
        if !session.outbox.is_empty() {
            // The stream has room again once the peer has read.
            self.set_decode_timer(session, self.now + 1_000);
        }
    }

    fn set_decode_timer(&mut self, session: &mut DecodeSession, at: Micros) {
        let at = at.max(self.now + 1);
        if session.timer.set(at, self.now) {
            self.events.plan(at, Event::DecodeTurn { line: session.line });
        }
    }
}
