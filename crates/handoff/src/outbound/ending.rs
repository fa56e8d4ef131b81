//! How a session ends, for whatever reason. In this order:
//!
//! 1. It finds out whether its path [is to blame](blames_path).
//! 2. It ends its handoffs ([`super::Outbound::end_all`]) and closes its [`Line`], so that a handoff that is opened again gets a new session.
//!    If a copy could not be stopped, it closes the line only after step 4, since the copy may read local blocks until then.
//! 3. It sends what it still has to say, for [`FAREWELL`] at most, and closes its connections.
//! 4. It unmaps the peer's pool.
//! 5. If it [must](tells_peer), it says so over a connection of its own, [again and again](Excuse).
//!
//! A session that could not begin does step 5, too: it should have told the peer of the end of the one before.

use std::time::{Duration, Instant};

use super::line::Line;
use super::paths::Paths;
use crate::error::TransferError;

/// How long an ending session keeps trying to tell its peer over its own connection.
pub const FAREWELL: Duration = Duration::from_millis(500);

/// Whether the path of a session counts as failed, asked before its handoffs are ended. Not so if nothing was under way, as when a worker
/// leaves the cluster.
pub fn blames_path(error: &TransferError, line: &Line) -> bool {
    *error != TransferError::Closed && (!line.idle() || error.is_corruption())
}

/// Whether a session that ended with this error must tell its peer, over a new connection, that this process no longer writes to its pool.
/// Otherwise the peer would keep the blocks in quarantine until this process ends or opens another session (I3). Asked once the line is
/// closed.
pub fn tells_peer(error: &TransferError, line: &Line, paths: &Paths) -> bool {
    // The session that waits for a retired one tells the peer as much.
    paths.is_untold() && *error != TransferError::Closed && !line.is_retired()
}

/// How long to keep trying to tell a peer. It may be stalled, or have as many connections as it may have. Meanwhile it keeps
/// blocks aside, and this process counts it among its connections.
const EXCUSE: Duration = Duration::from_secs(3600);
/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Tells a peer that its pool is no longer mapped, by a session that ends at once. Tries until the peer is told, for an hour.
#[derive(Debug)]
pub struct Excuse {
    until: Instant,
    pause: Duration,
}

impl Excuse {
    /// Begins now.
    pub fn new(now: Instant) -> Excuse {
        Excuse { until: now + EXCUSE, pause: PAUSES.0 }
    }

    /// When a try must be over.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// A try has failed. Returns when to try again; None after an hour, or when a new session tells the peer instead.
    pub fn failed(&mut self, error: &TransferError, now: Instant) -> Option<Instant> {
        let again = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        (*error != TransferError::Closed && again < self.until).then_some(again)
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Epoch, WorkerId};

    use super::*;
    use crate::limits::{TransferLimits, TransportKind};
    use crate::testing::core;

    #[test]
    fn what_an_end_leads_to() {
        let lost = TransferError::PeerLost { peer: WorkerId(1), cause: "cut".into() };
        let mut line = Line::new(TransferLimits::default());
        assert!(!blames_path(&lost, &line), "a worker left, with nothing under way");
        let mut paths = Paths::new([(TransportKind::Shm, None)], true);
        assert!(!tells_peer(&lost, &line, &paths), "nothing was mapped");
        paths.over(true);
        assert!(tells_peer(&lost, &line, &paths) && !tells_peer(&TransferError::Closed, &line, &paths));
        line.begin(core(Epoch(1), Instant::now())).unwrap();
        assert!(blames_path(&lost, &line) && !blames_path(&TransferError::Closed, &line));
        line.ended(Epoch(1));
        let changed = TransferError::Corrupt { peer: WorkerId(1) };
        assert!(blames_path(&changed, &line), "a changed byte is the path's fault, whatever was under way");
        assert!(!line.goes_on(true, false));
        assert!(!tells_peer(&lost, &line, &paths), "the next session tells the peer");
    }

    #[test]
    fn a_peer_is_told_again_and_again_but_not_for_ever() {
        let (t, s) = (Instant::now(), Duration::from_secs);
        let full = TransferError::Connect { peer: WorkerId(1), address: "there".into(), cause: "full".into() };
        let mut excuse = Excuse::new(t);
        assert_eq!(excuse.until(), t + s(3600));
        let pauses: Vec<_> = (0..8).map_while(|_| excuse.failed(&full, t)).map(|at| (at - t).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(excuse.failed(&full, t + s(3596)), None);
        assert_eq!(Excuse::new(t).failed(&TransferError::Closed, t), None, "a new session tells it");
    }
}
