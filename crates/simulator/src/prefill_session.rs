//! A session at a prefill worker: what its thread does with its socket and its transport, on simulated ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use baton_transfer::protocol::{
    Batch, Core, Effect, Frame, FrameLimits, Hello, Line as Ops, Outbound, Over, Parties, Pools, Run,
};
use baton_transfer::{Segment, TransferError, TransportKind};
use baton_types::{Epoch, WorkerId};

use crate::decode_session::{take_frame, take_hello};
use crate::events::{Event, Life, Line, Place};
use crate::outbox::Outbox;
use crate::prefill::FAREWELL;
use crate::shapes::geometry;
use crate::stream::{Micros, Timer};
use crate::world::World;
use crate::{Sabotage, Violation};

/// Batches under way over shared memory, as many as any transport may take at once.
const DEPTH: usize = 4;

/// How far the session is.
#[derive(Clone, PartialEq, Debug)]
enum Phase {
    /// Until this time for the peer's welcome.
    Greeting {
        until: Micros,
        hello_seen: bool,
    },
    Open,
    /// Says goodbye, until then.
    Closing {
        until: Micros,
        error: TransferError,
    },
    /// Another connection tells the peer that its pool is not mapped here any more, for as long as that takes.
    Excusing {
        hello_seen: bool,
    },
    Over,
}

/// A block's layer on its way over shared memory.
#[derive(Clone, Copy, Debug)]
struct Copy {
    from: usize,
    to: usize,
    len: usize,
    epoch: Epoch,
}

/// One decode worker's pool, as mapped here.
struct Mapped {
    segment: Arc<Segment>,
    life: Life,
}

/// What a batch over shared memory comes to.
enum Copying {
    Run(Copy),
    /// All its runs are copied: the frame that says so, and whose it is.
    Said(Epoch, Frame),
}

/// One connection's end at the prefill worker, and the transport over it.
pub(crate) struct PrefillSession {
    decode: Place,
    peer: WorkerId,
    kind: TransportKind,
    /// Tells sessions to the same peer apart.
    pub serial: Line,
    connection: Line,
    pub line: Ops,
    outbound: Outbound,
    phase: Phase,
    inbox: Vec<u8>,
    outbox: Outbox,
    mapped: Option<Mapped>,
    /// Over shared memory: what is left of the batches under way, in their order.
    copying: VecDeque<Copying>,
    timer: Timer,
}

impl PrefillSession {
    /// For the message of a violation.
    pub(crate) fn describe(&self, serial: Line) -> String {
        let (phase, closed, own) = (&self.phase, self.line.closed(), self.serial == serial);
        format!("its own session {own}, {phase:?}, closed by {closed:?}, sends {}", !self.outbox.is_empty())
    }

    /// Whether a handoff that was begun here may ask for more.
    pub(crate) fn serves(&self, serial: Line, core: &Core) -> bool {
        self.serial == serial && self.line.has_room(core, 0).is_ok()
    }
}

/// Why a step did not go well.
enum Stop {
    Ended(TransferError),
    Broken(Violation),
}

impl World {
    pub(crate) fn new_session(
        &mut self,
        place: Place,
        decode: Place,
        peer: WorkerId,
        kind: TransportKind,
        connection: Line,
    ) -> PrefillSession {
        let prefill = &self.prefills[place];
        let parties = Parties { me: prefill.id, peer };
        let (local, remote) = (prefill.memory.geometry.clone(), geometry(crate::decode::BLOCKS));
        let pools = Pools { local, ..Pools::alike(remote) };
        let mut session = PrefillSession {
            decode,
            peer,
            kind,
            serial: connection,
            connection,
            line: Ops::new(self.limits.clone()),
            outbound: Outbound::new(parties, pools, &self.limits),
            phase: Phase::Greeting { until: self.now + self.handshake(), hello_seen: false },
            inbox: Vec::new(),
            outbox: Outbox::default(),
            mapped: None,
            copying: VecDeque::new(),
            timer: Timer::default(),
        };
        self.call(place, &mut session);
        session
    }

    /// A handshake's first words.
    fn call(&mut self, place: Place, session: &mut PrefillSession) {
        let prefill = &self.prefills[place];
        let (me, life) = (prefill.id, prefill.life);
        let fingerprint = prefill.memory.geometry.layout.fingerprint();
        session.inbox.clear();
        session.outbox = Outbox::default();
        session.outbox.push_bytes(Hello { fingerprint }.encode());
        session.outbox.push_bytes(Frame::Identify { me, you: session.peer, over: Over::Stream }.encode());
        let until = self.now + self.handshake();
        self.events.plan(until, Event::PrefillTurn { prefill: place, life, peer: session.peer.0 });
    }

    pub(crate) fn wake_prefill(&mut self, prefill: Place, peer: WorkerId) {
        let (at, life) = (self.soon(), self.prefills[prefill].life);
        self.events.plan(at, Event::PrefillTurn { prefill, life, peer: peer.0 });
    }

    /// Everything that can be done now, or a part of it.
    pub(crate) fn prefill_turn(&mut self, place: Place, life: Life, peer: WorkerId) -> Result<(), Violation> {
        if self.prefills[place].life != life {
            return Ok(());
        }
        let Some(mut session) = self.prefills[place].sessions.remove(&peer) else { return Ok(()) };
        let stepped = match session.phase.clone() {
            Phase::Greeting { .. } | Phase::Excusing { .. } => self.greeting(&mut session),
            Phase::Open => self.work(place, &mut session),
            Phase::Closing { until, error } => {
                self.flush_prefill(place, &mut session)?;
                let done = session.outbox.is_empty() || until <= self.now;
                if done {
                    self.hang_up(place, &mut session, &error);
                }
                Ok(())
            }
            Phase::Over => Ok(()),
        };
        match stepped {
            Ok(()) => {}
            Err(Stop::Broken(violation)) => return Err(violation),
            Err(Stop::Ended(error)) => self.over(place, &mut session, error)?,
        }
        if session.phase != Phase::Over {
            self.flush_prefill(place, &mut session)?;
        }
        self.prefills[place].sessions.insert(peer, session);
        self.reported(place)
    }

    fn receive(&mut self, session: &mut PrefillSession) -> bool {
        let mut heard = false;
        let now = self.now;
        if let Some(connection) = self.lines.get_mut(&session.connection) {
            while let Some(bytes) = connection.down.receive(now) {
                session.inbox.extend(bytes);
                heard = true;
            }
        }
        heard
    }

    fn has_ended(&self, session: &PrefillSession) -> bool {
        self.lines.get(&session.connection).is_none_or(|connection| connection.down.has_ended(self.now))
    }

    /// The handshake's side that calls.
    fn greeting(&mut self, session: &mut PrefillSession) -> Result<(), Stop> {
        self.receive(session);
        let fingerprint = geometry(1).layout.fingerprint();
        let (until, seen) = match &mut session.phase {
            Phase::Greeting { until, hello_seen } => (*until, hello_seen),
            Phase::Excusing { hello_seen } => (Micros::MAX, hello_seen),
            _ => return Ok(()),
        };
        let cannot = |cause: String| {
            Stop::Ended(TransferError::Connect { peer: WorkerId(0), address: "simulated".into(), cause })
        };
        if !*seen {
            *seen = take_hello(&mut session.inbox, fingerprint).map_err(cannot)?;
        }
        let limits = FrameLimits::new(&self.limits, 2);
        if *seen && let Some(frame) = take_frame(&mut session.inbox, &limits).map_err(cannot)? {
            return match (frame, &session.phase) {
                (Frame::Welcome { .. }, Phase::Greeting { .. }) => {
                    session.phase = Phase::Open;
                    Ok(())
                }
                (other, _) => Err(cannot(format!("{other:?}"))),
            };
        }
        match until <= self.now || self.has_ended(session) {
            true => Err(cannot("no answer in time".into())),
            false => Ok(()),
        }
    }

    /// An error in whatever phase.
    fn over(&mut self, place: Place, session: &mut PrefillSession, error: TransferError) -> Result<(), Violation> {
        match session.phase.clone() {
            Phase::Greeting { .. } => self.close(session, &error),
            // However the excuse went.
            Phase::Excusing { .. } => self.leave(session),
            _ => {
                let now = self.instant(self.now);
                session.outbound.end_all(&error, now, &mut session.line);
                self.carry_out(session);
                let until = self.now + self.random.within(1, FAREWELL);
                session.phase = Phase::Closing { until, error };
                let life = self.prefills[place].life;
                self.events.plan(until, Event::PrefillTurn { prefill: place, life, peer: session.peer.0 });
            }
        }
        Ok(())
    }

    /// Closes the connection, lets go of the peer's pool, and tells the peer so if it may not know.
    fn hang_up(&mut self, place: Place, session: &mut PrefillSession, error: &TransferError) {
        session.mapped = None;
        session.copying.clear();
        self.close(session, error);
        if session.kind == TransportKind::Shm {
            session.connection = self.connect(place, session.decode, session.peer, session.kind);
            session.phase = Phase::Excusing { hello_seen: false };
            self.call(place, session);
        }
    }

    fn end_connection(&mut self, session: &PrefillSession) {
        let delay = self.faults.delay(&mut self.random);
        if let Some(connection) = self.lines.get_mut(&session.connection) {
            let at = connection.up.finish(self.now, delay);
            self.events.plan(at, Event::DecodeTurn { line: session.connection });
        }
    }

    /// From now on another session may be opened.
    fn close(&mut self, session: &mut PrefillSession, error: &TransferError) {
        let (ops, aborts) = session.line.close(error.clone());
        for op in ops {
            if let baton_transfer::protocol::Op::Complete { done, .. } = op {
                done.report(Err(error.clone()));
            }
        }
        drop(aborts);
        self.leave(session);
    }

    /// The last thing, also before another session to the same worker.
    pub(crate) fn leave(&mut self, session: &mut PrefillSession) {
        self.end_connection(session);
        session.phase = Phase::Over;
    }

    /// An open session's turn.
    fn work(&mut self, place: Place, session: &mut PrefillSession) -> Result<(), Stop> {
        let now = self.instant(self.now);
        let due = self.look(place, session);
        while self.copy_some(place, session)? {
            if self.random.chance(300) {
                self.wake_prefill(place, session.peer);
                break;
            }
        }
        let beat = session.outbound.beat(now, session.outbox.is_empty());
        self.carry_out(session);
        self.flush_prefill(place, session).map_err(Stop::Broken)?;
        if let Some(at) = [due, beat].into_iter().flatten().min() {
            self.set_prefill_timer(place, session, self.micros(at));
        }
        self.read(place, session)
    }

    /// At what was given up, begins, or is over; answers when the next handoff is. What its owners do on other threads may
    /// come right after this look and before the next step.
    fn look(&mut self, place: Place, session: &mut PrefillSession) -> Option<Instant> {
        if self.random.chance(100) {
            self.wake_prefill(place, session.peer);
            return None;
        }
        let now = self.instant(self.now);
        for (epoch, quiet) in session.line.take_aborts() {
            session.outbound.abort(epoch, quiet, now, &mut session.line);
        }
        self.carry_out(session);
        let deadlines = !self.broken(Sabotage::IgnoreDeadlines);
        let due = if deadlines { session.outbound.expire(now, &mut session.line) } else { None };
        self.carry_out(session);
        due
    }

    fn read(&mut self, place: Place, session: &mut PrefillSession) -> Result<(), Stop> {
        let now = self.instant(self.now);
        if self.receive(session) {
            session.outbound.heard(now);
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let lost = |cause: String| Stop::Ended(TransferError::PeerLost { peer: WorkerId(0), cause });
        while let Some(frame) = take_frame(&mut session.inbox, &limits).map_err(lost)? {
            if matches!(frame, Frame::Granted { .. }) && session.kind == TransportKind::Shm && session.mapped.is_none()
            {
                let life = self.lines.get(&session.connection).map_or(0, |connection| connection.decode_life);
                let decode = &self.decodes[session.decode];
                if decode.life != life {
                    return Err(lost("its pool is gone".into()));
                }
                session.mapped = Some(Mapped { segment: decode.memory.segment.clone(), life });
            }
            let kind = session.kind;
            session.outbound.frame(frame, kind, now, &mut session.line).map_err(Stop::Ended)?;
            self.carry_out(session);
            self.wake_prefill(place, session.peer);
        }
        match self.has_ended(session) {
            true => Err(lost("it closed the connection".into())),
            false => Ok(()),
        }
    }

    fn carry_out(&mut self, session: &mut PrefillSession) {
        for effect in session.outbound.take_effects() {
            match effect {
                Effect::Cancel(epoch) => {
                    let ignores = self.broken(Sabotage::IgnoreCancel);
                    session.copying.retain(|copying| match copying {
                        Copying::Run(copy) => ignores || copy.epoch != epoch,
                        Copying::Said(of, _) => *of != epoch,
                    });
                    if !ignores {
                        session.outbox.forget_pool();
                    }
                }
                Effect::Send(frame) => session.outbox.push(&frame),
                Effect::Report(done, outcome) => done.report(outcome),
                Effect::Hush(quiet) => drop(quiet),
            }
        }
    }

    /// A copy, a batch, or an op. False when nothing can be done now.
    fn copy_some(&mut self, place: Place, session: &mut PrefillSession) -> Result<bool, Stop> {
        let early = self.broken(Sabotage::CompleteEarly) && self.random.chance(900);
        let deeper = session.outbound.in_flight() < DEPTH && self.random.chance(300);
        if !early && !deeper && self.copy_next(place, session).map_err(Stop::Broken)? {
            return Ok(true);
        }
        if session.mapped.is_none() && session.outbound.in_flight() > 0 {
            if session.outbox.reads_pool() {
                return Ok(false);
            }
            session.outbound.flushed(Vec::new());
        }
        let now = self.instant(self.now);
        let pool = self.prefills[place].memory.segment.clone().into();
        let batch = session.outbound.next_batch(&pool, false, now).map_err(Stop::Ended)?;
        if let Some(batch) = batch {
            self.submit_batch(session, &batch);
            return Ok(true);
        }
        let more = session.outbound.next_op(now, &mut session.line);
        self.carry_out(session);
        Ok(more || !session.copying.is_empty())
    }

    /// Goes on with the batches under way over shared memory. False when there are none.
    fn copy_next(&mut self, place: Place, session: &mut PrefillSession) -> Result<bool, Violation> {
        match session.copying.pop_front() {
            None => return Ok(false),
            Some(Copying::Run(copy)) => self.copy(place, session, copy)?,
            Some(Copying::Said(_, write)) => {
                session.outbox.push(&write);
                session.outbound.flushed(Vec::new());
            }
        }
        Ok(true)
    }

    fn submit_batch(&mut self, session: &mut PrefillSession, batch: &Batch) {
        match (&session.mapped, session.kind) {
            (Some(_), TransportKind::Shm) => {
                let (epoch, write) = (batch.epoch, Frame::Write(batch.head(0)));
                let copy = |run: Run| Copying::Run(Copy { from: run.source, to: run.target, len: run.len, epoch });
                session.copying.extend(batch.runs().map(copy));
                if self.broken(Sabotage::CompleteEarly) {
                    session.outbox.push(&write);
                    session.outbound.flushed(Vec::new());
                } else {
                    session.copying.push_back(Copying::Said(epoch, write));
                }
            }
            _ => {
                let payload = batch.bytes() as u32;
                let sources = batch.runs().map(|run| (run.source, run.len));
                session.outbox.push_with(&Frame::Write(batch.head(payload)), sources);
            }
        }
    }

    /// One copy over shared memory, while the peer may be doing anything.
    fn copy(&mut self, place: Place, session: &PrefillSession, copy: Copy) -> Result<(), Violation> {
        let Some(mapped) = &session.mapped else { return Ok(()) };
        let prefill = &self.prefills[place];
        if prefill.memory.owner_at(copy.from).is_none() {
            return Err(self.violation("I3", format!("{} reads local blocks it has given back", copy.epoch)));
        }
        let decode = &self.decodes[session.decode];
        if decode.life == mapped.life && decode.memory.owner_at(copy.to) != Some(copy.epoch) {
            let owner = decode.memory.owner_at(copy.to);
            let what = format!("{} writes to a block that is kept for {owner:?}", copy.epoch);
            return Err(self.violation("I3", what));
        }
        let mut bytes = prefill.memory.bytes((copy.from, copy.len));
        if self.faults.miscopies(&mut self.random) {
            self.random.flip(&mut bytes);
        }
        // SAFETY: a simulation is one thread; the range is a block of the mapped pool's geometry.
        unsafe { mapped.segment.write(copy.to, &bytes) };
        Ok(())
    }

    fn flush_prefill(&mut self, place: Place, session: &mut PrefillSession) -> Result<(), Violation> {
        let Some(connection) = self.lines.get_mut(&session.connection) else { return Ok(()) };
        let memory = &self.prefills[place].memory;
        let mut stray = None;
        let read = |range: (usize, usize)| {
            if memory.owner_at(range.0).is_none() {
                stray = Some(range.0);
            }
            memory.bytes(range)
        };
        let last = session.outbox.flush(&mut connection.up, self.now, &mut self.random, &mut self.faults, read);
        if let Some(offset) = stray {
            return Err(self.violation("I3", format!("local bytes at {offset} are read after they were given back")));
        }
        if let Some(at) = last {
            self.events.plan(at, Event::DecodeTurn { line: session.connection });
        }
        if !session.outbox.is_empty() {
            // The stream has room again once the peer has read.
            self.set_prefill_timer(place, session, self.now + 1_000);
        }
        Ok(())
    }

    fn set_prefill_timer(&mut self, place: Place, session: &mut PrefillSession, at: Micros) {
        let at = at.max(self.now + 1);
        if session.timer.set(at, self.now) {
            let life = self.prefills[place].life;
            self.events.plan(at, Event::PrefillTurn { prefill: place, life, peer: session.peer.0 });
        }
    }
}
