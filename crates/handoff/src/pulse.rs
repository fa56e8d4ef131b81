//! When an end that has nothing to say says that it is alive.
//!
//! Pure, and the same at both ends. Knows neither frames nor handoffs: who asks has one under way.

use std::time::{Duration, Instant};

/// What an end has said, and how often it must.
#[derive(Debug)]
pub(crate) struct Pulse {
    heartbeat: Duration,
    /// When something was said last, as far as noticed.
    said: Option<Instant>,
    /// Something was said since.
    speaks: bool,
}

impl Pulse {
    /// Nothing was said yet.
    pub fn new(heartbeat: Duration) -> Pulse {
        Pulse { heartbeat, said: None, speaks: false }
    }

    /// How often something must be said.
    pub fn heartbeat(&self) -> Duration {
        self.heartbeat
    }

    /// Something is being said, whatever it is.
    pub fn speaks(&mut self) {
        self.speaks = true;
    }

    /// Whether it must be said now that this end is alive, since nothing else was for a heartbeat, and when to ask again.
    /// `may_say` is false while earlier words have yet to leave: they will do as well.
    pub fn beat(&mut self, now: Instant, may_say: bool) -> (bool, Instant) {
        if std::mem::take(&mut self.speaks) || !may_say {
            self.said = Some(now);
        }
        let due = *self.said.get_or_insert(now) + self.heartbeat;
        let beats = due <= now;
        if beats {
            self.said = Some(now);
        }
        (beats, if beats { now + self.heartbeat } else { due })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_beats_after_a_heartbeat_of_silence_and_not_before() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut pulse = Pulse::new(Duration::from_millis(100));
        assert_eq!(pulse.beat(at(0), true), (false, at(100)));
        assert_eq!(pulse.beat(at(99), true), (false, at(100)));
        assert_eq!(pulse.beat(at(100), true), (true, at(200)));
        assert_eq!(pulse.beat(at(150), true), (false, at(200)));
        // What else is said counts from when it is noticed.
        pulse.speaks();
        assert_eq!(pulse.beat(at(190), true), (false, at(290)));
        assert_eq!(pulse.beat(at(289), true), (false, at(290)));
        // Words that have not left yet are not followed by more.
        assert_eq!(pulse.beat(at(290), false), (false, at(390)));
        assert_eq!(pulse.beat(at(390), true), (true, at(490)));
    }
}
