//! Measures how long a session has been carrying blocks, to judge a path's speed and to see whether it still makes progress. It does not
//! know what is copied, or where to.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::Epoch;

/// Bytes carried, and the time that took. Time counts while batches are under way or completed handoffs wait for their outcome. So a
/// transport that is done once bytes are in a buffer is judged like one that waits until they are applied.
#[derive(Default)]
pub struct Meter {
    /// Epoch and bytes of each batch under way, oldest first.
    under_way: VecDeque<(Epoch, u64)>,
    awaits: bool,
    /// Until when time has been counted. None while time does not count.
    counted: Option<Instant>,
    /// When a batch was last flushed or cancelled, or the first of those under way submitted.
    moved: Option<Instant>,
    bytes: u64,
    time: Duration,
}

impl Meter {
    /// A batch is submitted.
    pub fn submitted(&mut self, epoch: Epoch, bytes: u64, now: Instant) {
        if self.under_way.is_empty() {
            self.moved = Some(now);
        }
        self.under_way.push_back((epoch, bytes));
        self.count(now);
    }

    /// The oldest batch is flushed.
    pub fn flushed(&mut self, now: Instant) {
        if let Some((_, bytes)) = self.under_way.pop_front() {
            self.bytes += bytes;
            self.moved = Some(now);
        }
        self.count(now);
    }

    /// A handoff's batches are cancelled.
    pub fn cancelled(&mut self, epoch: Epoch, now: Instant) {
        self.under_way.retain(|(of, _)| *of != epoch);
        self.moved = Some(now);
        self.count(now);
    }

    /// Whether completed handoffs wait for their outcome.
    pub fn awaits(&self) -> bool {
        self.awaits
    }

    /// Sets whether completed handoffs wait for their outcome.
    pub fn set_awaits(&mut self, awaits: bool, now: Instant) {
        self.awaits = awaits;
        self.count(now);
    }

    /// Since when no batch has been flushed; None when none is under way.
    pub fn since(&self) -> Option<Instant> {
        self.moved.filter(|_| !self.under_way.is_empty())
    }

    /// What was carried since the last call, and the time that took.
    pub fn take(&mut self, now: Instant) -> (u64, Duration) {
        self.count(now);
        (std::mem::take(&mut self.bytes), std::mem::take(&mut self.time))
    }

    fn count(&mut self, now: Instant) {
        if let Some(from) = self.counted {
            self.time += now.saturating_duration_since(from);
        }
        self.counted = (self.awaits || !self.under_way.is_empty()).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_once_and_only_while_something_is_under_way_or_awaited() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let seconds = Duration::from_secs;
        let mut meter = Meter::default();
        meter.submitted(Epoch(1), 10, at(1));
        meter.submitted(Epoch(1), 20, at(2));
        meter.submitted(Epoch(2), 40, at(3));
        assert_eq!(meter.since(), Some(at(1)));
        meter.flushed(at(4));
        meter.flushed(at(5));
        assert_eq!(meter.since(), Some(at(5)));
        assert_eq!(meter.take(at(6)), (30, seconds(5)));
        // Cancelled bytes do not count, and neither does the time after them.
        meter.cancelled(Epoch(2), at(8));
        assert_eq!(meter.since(), None);
        assert_eq!(meter.take(at(20)), (0, seconds(2)));
        // Waiting for the outcome counts, and bytes flushed before it count once.
        meter.submitted(Epoch(3), 5, at(30));
        meter.flushed(at(31));
        meter.set_awaits(true, at(31));
        meter.set_awaits(false, at(34));
        assert_eq!(meter.take(at(50)), (5, seconds(4)));
    }
}
