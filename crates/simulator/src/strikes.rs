//! What happens to connections and workers from outside, at random times. What becomes of frames is the outbox's.

use crate::Violation;
use crate::decode::Decode;
use crate::events::{Event, Line, Place};
use crate::faults::Fault;
use crate::prefill::Prefill;
use crate::stream::Micros;
use crate::world::{Connection, World};

/// Between two looks whether a fault strikes, at most.
const STRIKES: Micros = 20_000;

impl World {
    /// A random line, if there is one.
    fn any_line(&mut self) -> Option<Line> {
        let open = |connection: &Connection| connection.up.is_open() && connection.down.is_open();
        let alive: Vec<Line> = self.lines.iter().filter(|(_, c)| open(c)).map(|(line, _)| *line).collect();
        (!alive.is_empty()).then(|| alive[self.random.below(alive.len() as u64) as usize])
    }

    pub(crate) fn strike(&mut self) -> Result<(), Violation> {
        if self.healed {
            return Ok(());
        }
        let next = self.now + self.random.within(1, STRIKES);
        self.events.plan(next, Event::Strike);
        match self.faults.strike(&mut self.random) {
            Some(Fault::Corrupt) => self.corrupt(),
            Some(Fault::Stall) => self.stall(),
            Some(Fault::Cut) => {
                if let Some(line) = self.any_line() {
                    self.faults.count(Fault::Cut);
                    self.cut(line);
                }
            }
            Some(Fault::Stranger) => self.stranger(),
            Some(Fault::Restart) if self.random.chance(100) => self.restart()?,
            Some(Fault::Freeze) if self.random.chance(200) => self.freeze(),
            _ => {}
        }
        Ok(())
    }

    fn corrupt(&mut self) {
        let Some(line) = self.any_line() else { return };
        let up = self.random.chance(700);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        let stream = if up { &mut connection.up } else { &mut connection.down };
        if stream.corrupt(&mut self.random) {
            self.faults.count(Fault::Corrupt);
        }
    }

    fn stall(&mut self) {
        let Some(line) = self.any_line() else { return };
        let until = self.now + self.random.within(1_000, 400_000);
        let Some(connection) = self.lines.get_mut(&line) else { return };
        let stream = if self.random.chance(500) { &mut connection.up } else { &mut connection.down };
        let last = stream.stall(until).unwrap_or(until);
        self.faults.count(Fault::Stall);
        self.wake_both(line, last);
    }

    /// Ends a connection; either end learns of it in its time.
    pub(crate) fn cut(&mut self, line: Line) {
        let (a, b) = (self.random.within(1, 50_000), self.random.within(1, 50_000));
        let now = self.now;
        let Some(connection) = self.lines.get_mut(&line) else { return };
        connection.up.cut(now, now + a);
        connection.down.cut(now, now + b);
        self.wake_both(line, now + a);
        self.wake_both(line, now + b);
    }

    fn freeze(&mut self) {
        self.faults.count(Fault::Freeze);
        let until = self.now + self.random.within(1_000, 600_000);
        if self.random.chance(500) {
            let place = self.random.below(self.decodes.len() as u64) as Place;
            let frozen = &mut self.decodes[place].frozen_until;
            *frozen = until.max(*frozen);
        } else {
            let place = self.random.below(self.prefills.len() as u64) as Place;
            let frozen = &mut self.prefills[place].frozen_until;
            *frozen = until.max(*frozen);
        }
    }

    fn restart(&mut self) -> Result<(), Violation> {
        self.faults.count(Fault::Restart);
        if self.random.chance(500) {
            let place = self.random.below(self.decodes.len() as u64) as Place;
            self.restart_decode(place)
        } else {
            let place = self.random.below(self.prefills.len() as u64) as Place;
            self.restart_prefill(place)
        }
    }

    /// The process dies with everything in it; the next one has the same address and another name.
    fn restart_decode(&mut self, place: Place) -> Result<(), Violation> {
        let life = self.life();
        let before = std::mem::replace(&mut self.decodes[place], Decode::new(life, self.limits.clone())?);
        self.summary.withdrawn += before.open();
        let lines = self.lines.iter().filter(|(_, c)| c.decode_life == before.life).map(|(line, _)| *line);
        for line in lines.collect::<Vec<_>>() {
            self.cut(line);
        }
        Ok(())
    }

    pub(crate) fn restart_prefill(&mut self, place: Place) -> Result<(), Violation> {
        let life = self.life();
        let before = std::mem::replace(&mut self.prefills[place], Prefill::new(life)?);
        let lines = self.lines.iter().filter(|(_, c)| c.prefill_life == before.life).map(|(line, _)| *line);
        for line in lines.collect::<Vec<_>>() {
            self.cut(line);
            let at = self.now + self.random.within(1, 50_000);
            self.events.plan(at, Event::Died { line });
        }
        Ok(())
    }
}
