//! When a thread that copies gives way to others.

use std::time::{Duration, Instant};

use super::{LEAST_PATIENCE, PATIENCE};

/// Bytes after which it gives way: some hundred microseconds of copying.
const PIECE: usize = 1 << 20;

/// What a thread has copied since it last gave way. Where a step is computed on the same processors, the step goes on first: whoever is being
/// answered waits for the next token, while a load can use the step's pauses. A processor that has nothing else to do loses nothing by it. What is
/// given away counts as time that a load takes, in what is learned of its tier, too: that is how long a prompt waits on this machine.
#[derive(Debug, Default)]
pub(super) struct Courtesy {
    copied: usize,
    /// Gives way no longer than this. None: always.
    until: Option<Instant>,
}

impl Courtesy {
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

    /// So many bytes were copied. Returns whether it gave way.
    pub fn copied(&mut self, bytes: usize) -> bool {
        self.copied += bytes;
        let gives = self.copied >= PIECE && self.until.is_none_or(|until| Instant::now() < until);
        if gives {
            self.copied = 0;
            std::thread::yield_now();
        }
        gives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_way_after_each_piece() {
        let mut courtesy = Courtesy::default();
        courtesy.save();
        let gave: Vec<_> = (0..6).map(|_| courtesy.copied(PIECE / 2)).collect();
        assert_eq!(gave, [false, true, false, true, false, true]);
    }

    #[test]
    fn a_load_gives_way_for_half_of_its_patience() {
        let mut courtesy = Courtesy::default();
        let begun = Instant::now();
        courtesy.load(60.0);
        let half = courtesy.until.map(|until| (until - begun).as_secs_f64() / (60.0 * PATIENCE));
        assert!(half.is_some_and(|half| (0.5..0.6).contains(&half)), "{half:?} of its patience");
        assert!(courtesy.copied(PIECE));
        courtesy.until = Some(Instant::now());
        assert!(!courtesy.copied(PIECE), "its time is over");
        courtesy.load(0.0);
        assert!(courtesy.copied(0), "the next has time of its own");
    }
}
