//! How a session begins: which path is tried next, and for how long.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::paths::Paths;
use crate::error::TransferError;
use crate::limits::TransportKind;

/// Connecting to a decode worker, over one path after the other.
#[derive(Debug)]
pub struct Connecting {
    /// The paths not tried yet, best first.
    left: VecDeque<TransportKind>,
    /// When all of it must be over.
    last: Instant,
    failure: Option<TransferError>,
}

impl Connecting {
    /// Begins over these paths. It takes `handshake` at most.
    pub fn new(paths: &Paths, handshake: Duration, now: Instant) -> Connecting {
        Connecting { left: paths.order(now).into(), last: now + handshake, failure: None }
    }

    /// The next path to try, and until when. None when no path is left.
    pub fn next_path(&mut self, now: Instant) -> Option<(TransportKind, Instant)> {
        let kind = self.left.pop_front()?;
        let left = self.last.saturating_duration_since(now);
        // A path on which nothing answers must leave time for the next.
        let until = if self.left.is_empty() { self.last } else { self.last - left / 4 };
        Some((kind, until))
    }

    /// A path could not be set up. Returns the error when connecting ends with it, because no other path would work either.
    pub fn failed(&mut self, error: TransferError) -> Result<(), TransferError> {
        if !error.is_of_path() {
            return Err(error);
        }
        self.failure = Some(error);
        Ok(())
    }

    /// Why the last path failed; None when there was no path to try.
    pub fn failure(self) -> Option<TransferError> {
        self.failure
    }
}

/// Until when the further connections of a session may join, if the handshake must be over at `last`: half of the time left. The session
/// goes on with those that joined by then, since they only make it faster.
pub fn join_until(last: Instant, now: Instant) -> Instant {
    now + last.saturating_duration_since(now) / 2
}

#[cfg(test)]
mod tests {
    use baton_types::WorkerId;

    use super::*;

    fn refused() -> TransferError {
        TransferError::Connect { peer: WorkerId(1), address: "there".into(), cause: "refused".into() }
    }

    #[test]
    fn a_path_on_which_nothing_answers_leaves_time_for_the_next() {
        let (t, s) = (Instant::now(), Duration::from_secs);
        let paths = Paths::new([(TransportKind::Shm, None), (TransportKind::Tcp, None)], true);
        let mut connecting = Connecting::new(&paths, s(4), t);
        assert_eq!(connecting.next_path(t), Some((TransportKind::Shm, t + s(3))));
        connecting.failed(refused()).unwrap();
        assert_eq!(connecting.next_path(t + s(3)), Some((TransportKind::Tcp, t + s(4))));
        connecting.failed(refused()).unwrap();
        assert_eq!((connecting.next_path(t + s(4)), connecting.failure()), (None, Some(refused())));
    }

    #[test]
    fn no_other_path_is_tried_when_none_would_work() {
        let paths = Paths::new([(TransportKind::Shm, None), (TransportKind::Tcp, None)], true);
        let mut connecting = Connecting::new(&paths, Duration::from_secs(4), Instant::now());
        assert_eq!(connecting.failed(TransferError::Closed), Err(TransferError::Closed));
    }

    #[test]
    fn what_joins_has_half_of_the_time_left() {
        let (t, s) = (Instant::now(), Duration::from_secs);
        assert_eq!(join_until(t + s(4), t + s(2)), t + s(3));
        assert_eq!(join_until(t, t + s(1)), t + s(1));
    }
}
