//! When an end that has nothing else to send must send a heartbeat.
//!
//! Pure, and the same at both ends. Knows neither frames nor handoffs: the caller asks only while a handoff is under way.

use std::time::{Duration, Instant};

/// When this end last sent something, and how often it must.
#[derive(Debug)]
pub(crate) struct Pulse {
    heartbeat: Duration,
    /// When something was last sent, as far as [`Pulse::beat`] has noticed.
    said: Option<Instant>,
    /// Something was sent since the last [`Pulse::beat`].
    speaks: bool,
}

impl Pulse {
    /// Nothing was sent yet.
    pub fn new(heartbeat: Duration) -> Pulse {
        Pulse { heartbeat, said: None, speaks: false }
    }

    /// How often something must be sent.
    pub fn heartbeat(&self) -> Duration {
        self.heartbeat
    }

    /// Notes that something is being sent.
    pub fn speaks(&mut self) {
        self.speaks = true;
    }

    /// Whether to send a heartbeat now, since nothing else was sent for that long; and when to ask again. `may_say` is false while earlier
    /// output has yet to leave, which serves as the heartbeat.
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
        // Other output counts from the time it is noticed.
        pulse.speaks();
        assert_eq!(pulse.beat(at(190), true), (false, at(290)));
        assert_eq!(pulse.beat(at(289), true), (false, at(290)));
        // No heartbeat follows output that has not left yet.
        assert_eq!(pulse.beat(at(290), false), (false, at(390)));
        assert_eq!(pulse.beat(at(390), true), (true, at(490)));
    }
}
