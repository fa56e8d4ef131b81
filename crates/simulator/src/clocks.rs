//! Clocks of processes: each shows a different time and runs at a slightly different rate.
//!
//! Events have the world's time. A process is told the time of its own clock, and asks to be woken by that clock. So an instant
//! sent from one process to another would be far off, and a bound on which two processes must agree has to allow for the drift.

use std::time::{Duration, Instant};

use baton_types::testing::Random;
use baton_types::{Time, mix};

use crate::events::Process;
use crate::faults::Fault;
use crate::stream::Micros;
use crate::world::World;

/// Largest deviation of a clock's rate, parts per million: far more than that of a bad quartz.
pub(crate) const DRIFT: u64 = 10_000;
/// How far a clock may be ahead of the world's time, microseconds.
const AHEAD: Micros = 3_600_000_000;

/// A process's clock. The default shows the world's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Clock {
    ahead: Micros,
    /// Parts per million by which the clock is too fast.
    drift: i64,
}

impl Clock {
    fn random(random: &mut Random) -> Clock {
        Clock { ahead: random.below(AHEAD), drift: random.within(0, 2 * DRIFT) as i64 - DRIFT as i64 }
    }

    fn shows(self, at: Micros) -> Micros {
        let drifted = i128::from(at) * i128::from(1_000_000 + self.drift) / 1_000_000;
        self.ahead + drifted as Micros
    }

    /// The first world time at which the clock shows `shown`.
    fn when(self, shown: Micros) -> Micros {
        let shown = i128::from(shown.saturating_sub(self.ahead));
        let rate = i128::from(1_000_000 + self.drift);
        ((shown * 1_000_000 + rate - 1) / rate) as Micros
    }
}

impl World {
    /// Gives a process a random clock if the run's clocks differ. Draws nothing from the seed's main sequence, so that runs with and
    /// without such clocks differ in nothing else.
    pub(crate) fn give_clock(&mut self, process: Process) {
        if !self.faults.clocks {
            return;
        }
        let number = match process {
            Process::Router(place) => 4 * place,
            Process::Prefill(place) => 4 * place + 1,
            Process::Decode(place) => 4 * place + 2,
            Process::Registry => 3,
            Process::KvStore(place) => 4 * place + 7,
        };
        let clock = Clock::random(&mut Random(mix(self.seed ^ mix(number as u64 + 1))));
        self.faults.count(Fault::Clocks);
        self.clocks.insert(process, clock);
    }

    fn clock(&self, process: Process) -> Clock {
        self.clocks.get(&process).copied().unwrap_or_default()
    }

    /// What a process's clock shows now.
    pub(crate) fn clock_now(&self, process: Process) -> Instant {
        self.clock_at(process, self.now)
    }

    /// What a process's clock shows at a world time.
    pub(crate) fn clock_at(&self, process: Process, at: Micros) -> Instant {
        self.base + Duration::from_micros(self.clock(process).shows(at))
    }

    /// The same as the engine's time, in nanoseconds.
    pub(crate) fn engine_now(&self, process: Process) -> Time {
        Time(self.clock(process).shows(self.now) * 1000)
    }

    /// The world time at which a process's clock will show `shown`.
    pub(crate) fn micros(&self, process: Process, shown: Instant) -> Micros {
        let shown = shown.saturating_duration_since(self.base).as_nanos().div_ceil(1000) as Micros;
        self.clock(process).when(shown)
    }

    /// Upper bound of the world time that passes while some process's clock advances by `time`.
    pub(crate) fn by_any_clock(&self, time: Micros) -> Micros {
        if self.clocks.is_empty() { time } else { time + time * 2 * DRIFT / 1_000_000 + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_asked_when_it_will_show_what_it_shows() {
        let mut random = Random(5);
        assert_eq!((Clock::default().shows(7), Clock::default().when(7)), (7, 7));
        for _ in 0..1000 {
            let (clock, at) = (Clock::random(&mut random), random.below(1 << 40));
            let shown = clock.shows(at);
            let when = clock.when(shown);
            assert!(when <= at && at - when <= 1, "{clock:?} at {at}");
            assert!(clock.shows(when) >= shown && (when == 0 || clock.shows(when - 1) < shown), "the first time");
        }
    }
}
