//! Copies beside answers: they share the cores with what computes the next tokens, so they rest between blocks while there are any.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// While answers are given, a copy rests so many times as long as it worked: of a core it has an eighth.
const RESTS: u32 = 7;
/// The longest rest: how soon a copy goes on when the last answer has ended.
const LONGEST: Duration = Duration::from_millis(10);
/// How fast the measured time of a copy follows.
const FOLLOW: f64 = 0.2;

/// Whether answers are given, and how long copies take. Of one worker.
#[derive(Debug, Default)]
pub(super) struct Manners {
    answering: AtomicBool,
    /// Nanoseconds that a byte takes to copy, as bits of an f64.
    nanos: AtomicU64,
}

impl Manners {
    /// Sets whether the worker gives answers.
    pub fn answers(&self, answering: bool) {
        self.answering.store(answering, Relaxed);
    }

    /// So many bytes were copied since then. Rests for it, while answers are given.
    pub fn copied(&self, begun: Instant, bytes: usize) {
        let took = begun.elapsed();
        let (old, new) = (self.nanos(), took.as_nanos() as f64 / bytes.max(1) as f64);
        self.nanos.store((old + FOLLOW * (new - old)).to_bits(), Relaxed);
        if self.answering.load(Relaxed) {
            std::thread::sleep((took * RESTS).min(LONGEST));
        }
    }

    fn nanos(&self) -> f64 {
        f64::from_bits(self.nanos.load(Relaxed))
    }

    /// How many seconds the rests take while so many bytes are copied, as far as is known: now, and while answers are given.
    pub fn rests(&self, bytes: usize) -> (f64, f64) {
        let most = self.nanos() * f64::from(RESTS) * bytes as f64 / 1e9;
        (if self.answering.load(Relaxed) { most } else { 0.0 }, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_rests_only_beside_answers_and_what_that_takes_is_known() {
        let (manners, ago) = (Manners::default(), Instant::now() - Duration::from_millis(1));
        let rests = || {
            let begun = Instant::now();
            manners.copied(ago.max(begun - Duration::from_millis(1)), 1_000_000);
            begun.elapsed()
        };
        assert!(rests() < Duration::from_millis(5));
        let (now, most) = manners.rests(5_000_000);
        assert!(now == 0.0 && most > 0.0);
        manners.answers(true);
        assert!(rests() >= Duration::from_millis(7));
        let (now, most) = manners.rests(5_000_000);
        assert_eq!(now, most);
        (0..100).for_each(|_| assert!(rests() < Duration::from_secs(1)));
        let (now, _) = manners.rests(5_000_000);
        assert!((0.035..0.1).contains(&now), "5 ms of copying, and 35 of rests: {now}");
    }
}
