//! When a thread that copies gives way to others.

use std::time::{Duration, Instant};

use super::{LEAST_PATIENCE, PATIENCE};

/// Gives way as [`baton_types::Courtesy`] says, for a time that is bounded. What is given away counts as time that a load takes, in what is learned of its
/// tier, too: that is how long a prompt waits on this machine.
#[derive(Debug, Default)]
pub(super) struct Courtesy {
    of: baton_types::Courtesy,
    /// Gives way no longer than this. None: always.
    until: Option<Instant>,
}

impl Courtesy {
    /// One that gives way as this one does.
    pub fn new(of: baton_types::Courtesy) -> Courtesy {
        Courtesy { of, until: None }
    }

    /// A load begins that is expected to take so many seconds. It gives way for half of its patience at most, and does not wait until it is given up.
    pub fn load(&mut self, seconds: f64) {
        let half =
            Duration::try_from_secs_f64(seconds * PATIENCE / 2.0).unwrap_or(Duration::MAX).max(LEAST_PATIENCE / 2);
        self.until = Instant::now().checked_add(half);
    }

    /// A save begins. Nobody waits for it.
    pub fn save(&mut self) {
        self.until = None;
    }

    /// So many bytes were copied. Gives way, if it is time.
    pub fn copied(&mut self, bytes: usize) {
        if self.until.is_none_or(|until| Instant::now() < until) {
            self.of.copied(bytes);
        }
    }

    /// What is copied next makes it give way.
    #[cfg(test)]
    pub fn nearly(&mut self) {
        self.of.nearly();
    }

    /// How often it gave way.
    #[cfg(test)]
    pub fn times(&self) -> u64 {
        self.of.times()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: usize = 1 << 30;

    #[test]
    fn a_load_gives_way_for_half_of_its_patience() {
        let mut courtesy = Courtesy::default();
        let begun = Instant::now();
        courtesy.load(60.0);
        let half = courtesy.until.map(|until| (until - begun).as_secs_f64() / (60.0 * PATIENCE));
        assert!(half.is_some_and(|half| (0.5..0.6).contains(&half)), "{half:?} of its patience");
        courtesy.copied(MUCH);
        assert_eq!(courtesy.times(), 1);
        courtesy.until = Some(Instant::now());
        courtesy.copied(MUCH);
        assert_eq!(courtesy.times(), 1, "its time is over");
        courtesy.load(0.0);
        courtesy.copied(MUCH);
        assert_eq!(courtesy.times(), 2, "the next has time of its own");
        courtesy.save();
        courtesy.copied(MUCH);
        assert_eq!(courtesy.times(), 3);
    }
}
