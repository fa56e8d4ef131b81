//! When the disk's file is synced: after a segment is complete, but not more than once in [`EVERY`]. A sync empties the disk's own cache, and
//! other reads and writes wait meanwhile. Nothing but how much is lost with the power depends on it.

use std::time::{Duration, Instant};

/// Complete segments wait for so long at most, as long as something ticks.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Syncs {
    /// A segment is complete that is not synced.
    due: bool,
    /// When the file was synced, or opened.
    last: Instant,
}

impl Syncs {
    pub fn new(opened: Instant) -> Syncs {
        Syncs { due: false, last: opened }
    }

    /// A segment is complete. True: sync now.
    pub fn complete(&mut self, now: Instant) -> bool {
        self.due = true;
        self.is_time(now)
    }

    /// True: sync now.
    pub fn is_time(&mut self, now: Instant) -> bool {
        let is = self.due && now.saturating_duration_since(self.last) >= EVERY;
        if is {
            (self.due, self.last) = (false, now);
        }
        is
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_segments_are_synced_together() {
        let opened = Instant::now();
        let at = |millis| opened + Duration::from_millis(millis);
        let mut syncs = Syncs::new(opened);
        assert!(!syncs.is_time(at(5000)), "nothing is complete");
        assert!(syncs.complete(at(5000)));
        assert!(!syncs.complete(at(5400)) && !syncs.complete(at(5900)) && !syncs.is_time(at(5999)));
        assert!(syncs.is_time(at(6000)), "also when no further segment is complete");
        assert!(!syncs.is_time(at(9000)), "once");
    }
}
