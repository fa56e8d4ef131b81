//! The run: workers, connections, and the events that move them. Who does what is in the workers' files; here is what
//! happens to them from outside.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_handoff::{Limits, TransportKind};
use baton_types::WorkerId;

use crate::decode::Decode;
use crate::decode_session::DecodeSession;
use crate::events::{Event, Events, Life, Line, Place};
use crate::faults::{Fault, Faults};
use crate::prefill::Prefill;
use crate::random::Random;
use crate::stream::{Micros, Stream};
use crate::{Options, Sabotage, Summary, Violation};

/// How late a thread may be with what it can do now.
pub(crate) const LAZINESS: Micros = 300;
/// How much later than its bound something may end.
pub(crate) const SLACK: Micros = 10_000;
/// A request that finds no room is asked again so often.
const TRIES: u32 = 1000;
/// Events after which a run does not end by itself.
const MOST_EVENTS: u64 = 20_000_000;

/// Two sockets.
#[derive(Debug)]
pub(crate) struct Connection {
    pub prefill: Place,
    pub prefill_life: Life,
    pub decode: Place,
    pub decode_life: Life,
    /// The peer that the prefill worker means to reach.
    pub peer: WorkerId,
    /// Prefill to decode.
    pub up: Stream,
    /// Decode to prefill.
    pub down: Stream,
    /// Who calls is none of the prefill workers.
    pub is_strangers: bool,
}

pub(crate) struct World {
    pub random: Random,
    pub now: Micros,
    base: Instant,
    pub events: Events,
    pub faults: Faults,
    pub options: Options,
    pub limits: Limits,
    pub decodes: Vec<Decode>,
    pub prefills: Vec<Prefill>,
    pub lines: BTreeMap<Line, Connection>,
    next_line: Line,
    next_life: Life,
    pub summary: Summary,
    /// Requests that have not been placed or given up.
    unplaced: u32,
    pub healed: bool,
}

impl World {
    pub(crate) fn new(seed: u64, options: &Options) -> Result<World, Violation> {
        let mut random = Random::new(seed);
        let faults = if options.calm { Faults::calm(&mut random) } else { Faults::random(&mut random) };
        let limits = Limits {
            handshake: Duration::from_millis(200),
            handoffs: 64,
            queued_blocks: 12,
            heartbeat: Duration::from_millis(20),
            silence: Duration::from_millis(100),
            ..Limits::default()
        };
        let mut world = World {
            random,
            now: 0,
            // Only differences of instants matter, so the run does not depend on when it is made.
            base: Instant::now(),
            events: Events::default(),
            faults,
            options: *options,
            limits,
            decodes: Vec::new(),
            prefills: Vec::new(),
            lines: BTreeMap::new(),
            next_line: 0,
            next_life: 0,
            summary: Summary::default(),
            unplaced: options.handoffs,
            healed: false,
        };
        for _ in 0..world.random.within(1, 2) {
            let decode = Decode::new(world.life(), world.limits.clone())?;
            world.decodes.push(decode);
        }
        for _ in 0..world.random.within(1, 3) {
            let prefill = Prefill::new(world.life())?;
            world.prefills.push(prefill);
        }
        let mut at = 0;
        for request in 0..u64::from(options.handoffs) {
            at += world.random.below(15_000);
            world.events.plan(at, Event::Submit { request, tries: TRIES });
        }
        world.events.plan(1, Event::Strike);
        Ok(world)
    }

    pub(crate) fn life(&mut self) -> Life {
        self.next_life += 1;
        self.next_life
    }

    /// A virtual time for code that knows only instants.
    pub(crate) fn instant(&self, at: Micros) -> Instant {
        self.base + Duration::from_micros(at)
    }

    /// The virtual time of an instant, rounded up.
    pub(crate) fn micros(&self, at: Instant) -> Micros {
        at.saturating_duration_since(self.base).as_nanos().div_ceil(1000) as Micros
    }

    pub(crate) fn violation(&self, invariant: &'static str, what: impl Into<String>) -> Violation {
        Violation { invariant, at_micros: self.now, what: what.into() }
    }

    pub(crate) fn broken(&self, sabotage: Sabotage) -> bool {
        self.options.sabotage == Some(sabotage)
    }

    /// Longest time for a handshake.
    pub(crate) fn handshake(&self) -> Micros {
        self.limits.handshake.as_micros() as Micros
    }

    /// Soon, as threads go.
    pub(crate) fn soon(&mut self) -> Micros {
        self.now + self.random.within(1, LAZINESS)
    }

    /// Plays until nothing is left to happen.
    pub(crate) fn play(mut self) -> Result<Summary, Violation> {
        while let Some((at, event)) = self.events.next() {
            self.now = self.now.max(at);
            self.summary.events += 1;
            if self.summary.events > MOST_EVENTS {
                return Err(self.violation("I5", "the run does not end"));
            }
            match self.frozen(&event) {
                Some(until) => self.events.plan(until + 1, event),
                None => self.happen(event)?,
            }
            if self.unplaced == 0 && !self.healed && self.quiet() {
                self.heal();
            }
        }
        self.end()
    }

    /// Until when the worker that an event belongs to stands still.
    fn frozen(&self, event: &Event) -> Option<Micros> {
        let until = match event {
            Event::Run { prefill, .. }
            | Event::Compute { prefill, .. }
            | Event::MustHaveEnded { prefill, .. }
            | Event::PrefillTurn { prefill, .. } => self.prefills[*prefill].frozen_until,
            Event::MustHaveFailed { decode, .. }
            | Event::Cancel { decode, .. }
            | Event::Finish { decode, .. }
            | Event::Desk { decode, .. } => self.decodes[*decode].frozen_until,
            Event::DecodeTurn { line } | Event::Died { line } => {
                self.lines.get(line).map_or(0, |line| self.decodes[line.decode].frozen_until)
            }
            Event::Submit { .. } | Event::Cut { .. } | Event::Strike => 0,
        };
        (until > self.now).then_some(until)
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Submit { request, tries } => self.submit(request, tries),
            Event::Run { prefill, request, target, deadline } => self.open(prefill, request, &target, deadline),
            Event::Compute { prefill, life, handoff } => self.compute(prefill, life, handoff),
            Event::MustHaveEnded { prefill, life, handoff } => self.must_have_ended(prefill, life, handoff),
            Event::MustHaveFailed { decode, life, epoch } => self.must_have_failed(decode, life, epoch),
            Event::Cancel { decode, life, epoch } => self.cancel(decode, life, epoch),
            Event::Finish { decode, life, epoch } => self.finish(decode, life, epoch),
            Event::DecodeTurn { line } => self.decode_turn(line),
            Event::PrefillTurn { prefill, life, peer } => self.prefill_turn(prefill, life, WorkerId(peer)),
            Event::Desk { decode, life } => self.desk(decode, life),
            Event::Died { line } => self.died(line),
            Event::Cut { line } => {
                self.cut(line);
                Ok(())
            }
            Event::Strike => self.strike(),
        }
    }

    fn submit(&mut self, request: u64, tries: u32) -> Result<(), Violation> {
        let decode = self.random.below(self.decodes.len() as u64) as Place;
        if self.decodes[decode].frozen_until <= self.now && self.reserve(decode, request)? || tries == 0 {
            self.unplaced -= 1;
            return Ok(());
        }
        let at = self.now + self.random.within(1, 30_000);
        self.events.plan(at, Event::Submit { request, tries: tries - 1 });
        Ok(())
    }

    /// Opens a connection; whoever is at that place now answers.
    pub(crate) fn connect(&mut self, prefill: Place, decode: Place, peer: WorkerId, kind: TransportKind) -> Line {
        self.next_line += 1;
        let line = self.next_line;
        let room = self.random.within(40, 2_000) as usize;
        let connection = Connection {
            prefill,
            prefill_life: self.prefills[prefill].life,
            decode,
            decode_life: self.decodes[decode].life,
            peer,
            up: Stream::new(room),
            down: Stream::new(room),
            is_strangers: false,
        };
        self.lines.insert(line, connection);
        if self.decodes[decode].members.admit(line, line) {
            self.decodes[decode].sessions.insert(line, DecodeSession::new(line, kind));
            self.wake_decode(line);
        } else {
            self.close_up(line);
        }
        line
    }

    /// Lets both ends of a connection look what is new.
    pub(crate) fn wake_both(&mut self, line: Line, at: Micros) {
        let Some(connection) = self.lines.get(&line) else { return };
        let (prefill, life, peer) = (connection.prefill, connection.prefill_life, connection.peer.0);
        self.events.plan(at, Event::DecodeTurn { line });
        self.events.plan(at, Event::PrefillTurn { prefill, life, peer });
    }

    /// Whether every handoff has ended on both sides, but for what waits for a peer's word.
    fn quiet(&self) -> bool {
        self.prefills.iter().all(|p| p.handoffs.is_empty()) && self.decodes.iter().all(|d| d.open() == 0)
    }

    /// From now on nothing goes wrong; then the prefill workers leave, which settles what still waits for their word.
    fn heal(&mut self) {
        self.healed = true;
        self.faults.heal();
    }

    /// Everything has ended: what is still held is held for peers that were never heard of again, and they are gone now.
    fn end(mut self) -> Result<Summary, Violation> {
        if !self.healed {
            return Err(self.violation("I5", "handoffs are left and nothing will happen to them"));
        }
        let harmless =
            self.faults.counts.keys().all(|fault| matches!(fault, Fault::Stall | Fault::Freeze | Fault::Stranger));
        if harmless {
            // Nothing was lost between live peers, so every block came back without anybody's death.
            self.check_free()?;
        }
        for place in 0..self.prefills.len() {
            self.restart_prefill(place)?;
        }
        while let Some((at, event)) = self.events.next() {
            self.now = self.now.max(at);
            self.happen(event)?;
        }
        self.check_free()?;
        self.summary.faults = self.faults.counts.clone();
        self.summary.micros = self.now;
        Ok(self.summary)
    }

    fn check_free(&self) -> Result<(), Violation> {
        for decode in &self.decodes {
            decode.check_free().map_err(|what| self.violation("I6", what))?;
        }
        for prefill in &self.prefills {
            prefill.check_free().map_err(|what| self.violation("I6", what))?;
        }
        Ok(())
    }
}
