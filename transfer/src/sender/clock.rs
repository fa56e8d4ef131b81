//! How long a transport has been copying: what a path's speed is judged by. Pure; does not know what is copied, or where to.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::Epoch;

/// Bytes copied and the time that took. While several batches are under way, time counts once.
#[derive(Default)]
pub(super) struct Clock {
    /// Whose, and how many bytes, in their order.
    under_way: VecDeque<(Epoch, u64)>,
    /// Up to when the time is counted, while batches are under way.
    counted: Option<Instant>,
    bytes: u64,
    time: Duration,
}

impl Clock {
    /// A batch begins.
    pub(super) fn submitted(&mut self, epoch: Epoch, bytes: u64, now: Instant) {
        if self.under_way.is_empty() {
            self.counted = Some(now);
        }
        self.under_way.push_back((epoch, bytes));
    }

    /// The oldest one is flushed.
    pub(super) fn flushed(&mut self, now: Instant) {
        if let (Some((_, bytes)), Some(from)) = (self.under_way.pop_front(), self.counted.replace(now)) {
            self.bytes += bytes;
            self.time += now.saturating_duration_since(from);
        }
    }

    /// Those of a handoff are given up.
    pub(super) fn cancelled(&mut self, epoch: Epoch) {
        self.under_way.retain(|(of, _)| *of != epoch);
    }

    /// What was copied since the last call, and the time that took.
    pub(super) fn take(&mut self) -> (u64, Duration) {
        (std::mem::take(&mut self.bytes), std::mem::take(&mut self.time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_once_and_only_while_something_is_under_way() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut clock = Clock::default();
        clock.submitted(Epoch(1), 10, at(1));
        clock.submitted(Epoch(1), 20, at(2));
        clock.submitted(Epoch(2), 40, at(3));
        clock.flushed(at(4));
        clock.flushed(at(5));
        clock.cancelled(Epoch(2));
        assert_eq!(clock.take(), (30, Duration::from_secs(4)));
        clock.submitted(Epoch(3), 5, at(10));
        clock.flushed(at(11));
        assert_eq!(clock.take(), (5, Duration::from_secs(1)));
    }
}
