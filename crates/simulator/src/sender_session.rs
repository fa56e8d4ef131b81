//! A session at the worker that gives KV. It does with simulated sockets and transports what the session's thread does with real ones.

use std::collections::VecDeque;
use std::time::Instant;

use baton_handoff::{Connecting, Effect, Excuse, Frame, FrameLimits, Line as Ops, Meter, Outbound, Written};
use baton_handoff::{TransferError, TransportKind};
use baton_types::WorkerId;

use crate::copying::{Copying, Mapped, Sending};
use crate::end::End;
use crate::events::{Event, Life, Line, Process, Serial};
use crate::joining::Asked;
use crate::stream::{Micros, Timer};
use crate::world::World;
use crate::{Sabotage, Violation};

/// Phase of a session.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Phase {
    /// Waits for the session before it to end.
    Waiting,
    /// Waits for the peer's welcome, until this time at most.
    Greeting {
        until: Micros,
        hello_seen: bool,
    },
    /// Waits for further connections to join, until this time at most.
    Joining {
        until: Micros,
    },
    Open,
    /// Sends its last frames, until this time at most.
    Closing {
        until: Micros,
        /// Why it ends.
        error: TransferError,
    },
    /// Tells the peer over a new connection that its pool is no longer mapped here, however long that takes.
    Excusing {
        hello_seen: bool,
    },
    /// Tries that again at this time.
    Pausing {
        until: Micros,
    },
    Over,
}

/// The giving worker's end of a session, and its transport.
pub(crate) struct SenderSession {
    pub to: Process,
    pub peer: WorkerId,
    pub kind: TransportKind,
    pub serial: Serial,
    /// The session to the same worker that this one replaces.
    pub before: Option<Serial>,
    /// The paths that are still to be tried.
    pub connecting: Option<Connecting>,
    /// How it tells the peer that it has ended.
    pub excuse: Option<Excuse>,
    /// The session's own connection, then those that have joined it.
    pub ends: Vec<End>,
    /// Connections that have asked to join.
    pub asked: Vec<Asked>,
    pub line: Ops,
    pub outbound: Outbound,
    pub phase: Phase,
    /// Over TCP: the number of writes on each connection except the session's own.
    pub written: Written,
    pub meter: Meter,
    /// Over TCP: the batches in flight, in order.
    pub sending: VecDeque<Sending>,
    /// Over shared memory: the peer's pool.
    pub mapped: Option<Mapped>,
    /// Over shared memory: what is left of the batches in flight, in order.
    pub copying: VecDeque<Copying>,
    pub timer: Timer,
}

impl SenderSession {
    /// The session's own connection.
    pub(crate) fn own(&mut self) -> &mut End {
        &mut self.ends[0]
    }

    /// The oldest batch in flight has been carried.
    pub(crate) fn flushed(&mut self, now: Instant) {
        self.outbound.flushed(Vec::new());
        self.meter.flushed(now);
    }
}

/// Why a turn broke off: the session has ended, or an invariant is violated.
pub(crate) enum Stop {
    Ended(TransferError),
    Broken(Violation),
}

impl World {
    pub(crate) fn wake_sender(&mut self, process: Process, session: Serial) {
        let at = self.soon();
        self.plan_sender_turn(process, session, at);
    }

    /// Takes a turn of a session: does all that can be done now, or a part of it.
    pub(crate) fn sender_turn(&mut self, here: Process, life: Life, serial: Serial) -> Result<(), Violation> {
        if self.senders[here].life != life {
            return Ok(());
        }
        let Some(mut session) = self.senders[here].sessions.remove(&serial) else { return Ok(()) };
        match self.session_turn(here, &mut session) {
            Ok(()) => {}
            Err(Stop::Broken(violation)) => return Err(violation),
            Err(Stop::Ended(error)) => self.over(here, &mut session, error),
        }
        if session.phase != Phase::Over {
            self.flush_sender(here, &mut session)?;
            self.senders[here].sessions.insert(serial, session);
        } else {
            let waits = |next: &&SenderSession| next.before == Some(serial);
            let next = self.senders[here].sessions.values().find(waits).map(|next| next.serial);
            next.into_iter().for_each(|next| self.wake_sender(here, next));
        }
        self.reported(here)
    }

    fn session_turn(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Stop> {
        if matches!(session.phase, Phase::Waiting | Phase::Greeting { .. } | Phase::Joining { .. }) {
            self.tend(here, session);
        }
        match session.phase.clone() {
            Phase::Waiting => self.wait_for_before(here, session),
            Phase::Excusing { .. } | Phase::Pausing { .. } if session.line.is_stopped() => {
                self.leave_session(session);
                Ok(())
            }
            Phase::Pausing { until } => {
                if until <= self.now {
                    self.try_excuse(here, session);
                }
                Ok(())
            }
            Phase::Greeting { .. } | Phase::Excusing { .. } => self.greeting(here, session),
            Phase::Joining { until } => {
                self.joining(here, session, until);
                Ok(())
            }
            Phase::Open => self.work(here, session),
            Phase::Closing { until, error } => {
                self.flush_sender(here, session).map_err(Stop::Broken)?;
                if session.own().outbox.is_empty() || until <= self.now {
                    self.hang_up(here, session, &error);
                }
                Ok(())
            }
            Phase::Over => Ok(()),
        }
    }

    pub(crate) fn end_connection(&mut self, line: Line) {
        let delay = self.faults.delay(&mut self.random);
        if let Some(connection) = self.lines.get_mut(&line) {
            let at = connection.up.finish(self.now, delay);
            self.events.plan(at, Event::ReceiverTurn { line });
        }
    }

    /// An open session's turn.
    fn work(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Stop> {
        if let Some(error) = session.line.is_over() {
            return Err(Stop::Ended(error));
        }
        let now = self.clock_now(here);
        let due = self.look(here, session);
        let rest = session.line.rest(session.peer, now);
        while self.copy_some(here, session)? {
            if self.random.chance(300) {
                self.wake_sender(here, session.serial);
                break;
            }
        }
        let may_say = session.own().outbox.is_empty();
        let beat = session.outbound.beat(now, may_say);
        self.carry_out(here, session);
        self.flush_sender(here, session).map_err(Stop::Broken)?;
        if !session.sending.is_empty() && session.ends.iter().all(|end| end.outbox.is_empty()) {
            // The batch that held back the next one has just left.
            self.wake_sender(here, session.serial);
        }
        if let Some(at) = [due, beat, rest].into_iter().flatten().min() {
            self.set_sender_timer(here, session, self.micros(here, at));
        }
        self.read(here, session)
    }

    /// Handles handoffs that were aborted, have begun, or have expired. Returns when the next one expires. Sometimes does nothing: owners
    /// act on other threads, so what they do may also come right after this look and before the next step.
    fn look(&mut self, here: Process, session: &mut SenderSession) -> Option<Instant> {
        if self.random.chance(100) {
            self.wake_sender(here, session.serial);
            return None;
        }
        let now = self.clock_now(here);
        for (epoch, quiet) in session.line.take_aborts() {
            session.outbound.abort(epoch, quiet, now, &mut session.line);
        }
        self.carry_out(here, session);
        let deadlines = !self.broken(Sabotage::IgnoreDeadlines);
        let due = if deadlines { session.outbound.expire(now, &mut session.line) } else { None };
        self.carry_out(here, session);
        due
    }

    fn read(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Stop> {
        let now = self.clock_now(here);
        if self.receive(session.own()) {
            session.outbound.heard(now);
        }
        let limits = FrameLimits::new(&self.limits, 2);
        let lost = |cause: String| Stop::Ended(TransferError::PeerLost { peer: WorkerId(0), cause });
        while let Some(frame) = session.own().next_frame(&limits).map_err(lost)? {
            if matches!(frame, Frame::Granted { .. }) && session.kind == TransportKind::Shm && session.mapped.is_none()
            {
                self.map(session).map_err(lost)?;
            }
            let kind = session.kind;
            session.outbound.frame(frame, kind, now, &mut session.line).map_err(Stop::Ended)?;
            self.carry_out(here, session);
            self.wake_sender(here, session.serial);
        }
        for end in &mut session.ends[1..] {
            if self.receive(end) {
                return Err(lost("it says something on a connection for blocks".into()));
            }
        }
        match session.ends.iter().any(|end| self.has_ended(end)) {
            true => Err(lost("it closed a connection".into())),
            false => Ok(()),
        }
    }

    pub(crate) fn carry_out(&mut self, here: Process, session: &mut SenderSession) {
        let now = self.clock_now(here);
        for effect in session.outbound.take_effects() {
            match effect {
                Effect::Cancel(epoch) => {
                    self.cancel_batches(session, epoch);
                    session.meter.cancelled(epoch, now);
                }
                Effect::Send(mut frame) => {
                    session.written.stamp(&mut frame);
                    session.own().outbox.push(&frame);
                }
                Effect::Report(done, outcome) => {
                    if let Some(paths) = self.senders[here].paths.get_mut(session.peer) {
                        paths.ended(session.kind, &outcome, &mut session.meter, now);
                    }
                    done.report(outcome);
                }
                Effect::Hush(quiet) => drop(quiet),
            }
        }
        session.meter.set_awaits(session.outbound.awaits_outcome(), now);
    }

    /// Sends what the connections take. A closing session sends over its own connection only.
    fn flush_sender(&mut self, here: Process, session: &mut SenderSession) -> Result<(), Violation> {
        let ends = if matches!(session.phase, Phase::Closing { .. }) { 1 } else { session.ends.len() };
        let mut left = false;
        for end in &mut session.ends[..ends] {
            self.flush_end(here, end)?;
            left |= !end.outbox.is_empty();
        }
        for asked in &mut session.asked {
            self.flush_end(here, &mut asked.end)?;
            left |= !asked.end.outbox.is_empty();
        }
        if left {
            // The streams have room again once the peer has read.
            self.set_sender_timer(here, session, self.now + 1_000);
        }
        Ok(())
    }

    fn flush_end(&mut self, here: Process, end: &mut End) -> Result<(), Violation> {
        let Some(connection) = self.lines.get_mut(&end.line) else { return Ok(()) };
        let memory = &self.senders[here].memory;
        let mut stray = None;
        let read = |range: (usize, usize)| {
            if memory.owner_at(range.0).is_none() {
                stray = Some(range.0);
            }
            memory.read(range)
        };
        let last = end.outbox.flush(&mut connection.up, self.now, &mut self.random, &mut self.faults, read);
        if let Some(offset) = stray {
            return Err(self.violation("I3", format!("local bytes at {offset} are read after they were given back")));
        }
        if let Some(at) = last {
            self.events.plan(at, Event::ReceiverTurn { line: end.line });
        }
        Ok(())
    }

    pub(crate) fn set_sender_timer(&mut self, here: Process, session: &mut SenderSession, at: Micros) {
        let at = at.max(self.now + 1);
        if session.timer.set(at, self.now) {
            self.plan_sender_turn(here, session.serial, at);
        }
    }
}
