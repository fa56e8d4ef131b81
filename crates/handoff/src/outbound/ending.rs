//! How a session ends, for whatever reason. In this order:
//!
//! 1. It finds out whether its path [is to blame](blames_path).
//! 2. It ends its handoffs ([`super::Outbound::end_all`]) and closes its [`Line`], so that a handoff that is opened again gets a new session.
//!    If a copy could not be stopped, it closes the line only after step 4, since the copy may read local blocks until then.
//! 3. It sends what it still has to say, for [`FAREWELL`] at most, and closes its connections.
//! 4. It unmaps the peer's pool.
//! 5. If it [must](tells_peer), it says so over a connection of its own.

use std::time::Duration;

use super::line::Line;
use crate::error::TransferError;

/// How long an ending session keeps trying to tell its peer over its own connection.
pub const FAREWELL: Duration = Duration::from_millis(500);

/// Whether the path of a session counts as failed, asked before its handoffs are ended. Not so if nothing was under way, as when a worker
/// leaves the cluster.
pub fn blames_path(error: &TransferError, line: &Line) -> bool {
    *error != TransferError::Closed && (!line.idle() || error.is_corruption())
}

/// Whether an ended session must tell its peer, over a new connection, that this process no longer writes to its pool. Otherwise the peer
/// would keep the blocks in quarantine until this process ends or opens another session (I3). Asked once the line is closed. `near`: the
/// peer can tell when this process ends, so it waits for that unless it is told.
pub fn tells_peer(error: &TransferError, line: &Line, near: bool) -> bool {
    // The session that waits for a retired one tells the peer as much.
    near && *error != TransferError::Closed && !line.is_retired()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use baton_types::{Epoch, WorkerId};

    use super::*;
    use crate::limits::TransferLimits;
    use crate::testing::core;

    #[test]
    fn what_an_end_leads_to() {
        let lost = TransferError::PeerLost { peer: WorkerId(1), cause: "cut".into() };
        let mut line = Line::new(TransferLimits::default());
        assert!(!blames_path(&lost, &line), "a worker left, with nothing under way");
        assert!(tells_peer(&lost, &line, true) && !tells_peer(&lost, &line, false));
        assert!(!tells_peer(&TransferError::Closed, &line, true));
        line.begin(core(Epoch(1), Instant::now())).unwrap();
        assert!(blames_path(&lost, &line) && !blames_path(&TransferError::Closed, &line));
        line.ended(Epoch(1));
        let changed = TransferError::Corrupt { peer: WorkerId(1) };
        assert!(blames_path(&changed, &line), "a changed byte is the path's fault, whatever was under way");
        assert!(!line.goes_on(true, false));
        assert!(!tells_peer(&lost, &line, true), "the next session tells the peer");
    }
}
