//! How a session ends.

use std::time::Duration;

use super::line::Line;
use crate::error::TransferError;

/// How long an ending session keeps trying to tell its peer over its own connection.
pub const FAREWELL: Duration = Duration::from_millis(500);

/// What a session that ends with an error still has to do. In this order:
///
/// 1. End its handoffs ([`super::Outbound::end_all`]) and close its [`Line`], so that a handoff that is opened again gets a new session.
/// 2. Send what it has to say, for [`FAREWELL`] at most, and close its connections.
/// 3. Unmap the peer's pool.
/// 4. If it [tells](Ending::tells): say so over a connection of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ending {
    /// Its path counts as failed. Not so if nothing was under way, as when a worker leaves the cluster.
    pub blames_path: bool,
    /// It tells the peer, over a new connection, that this process no longer writes to its pool. Otherwise the peer would keep the blocks
    /// in quarantine until this process ends or opens another session (I3).
    pub tells: bool,
}

impl Ending {
    /// The end of a session whose ops are in `line`, before its handoffs are ended. `near`: the peer can tell when this process ends, so it
    /// waits for that unless it is told.
    pub fn of(error: &TransferError, line: &Line, near: bool) -> Ending {
        let failed = *error != TransferError::Closed;
        Ending {
            blames_path: failed && (!line.idle() || error.is_corruption()),
            // The session that waits for a retired one tells the peer as much.
            tells: near && failed && !line.is_retired(),
        }
    }
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
        let of = |error, line: &Line, near| {
            let Ending { blames_path, tells } = Ending::of(error, line, near);
            (blames_path, tells)
        };
        assert_eq!(of(&lost, &line, true), (false, true), "a worker left, with nothing under way");
        assert_eq!(of(&TransferError::Closed, &line, true), (false, false));
        line.begin(core(Epoch(1), Instant::now())).unwrap();
        assert_eq!(of(&lost, &line, true), (true, true));
        assert_eq!(of(&lost, &line, false), (true, false));
        assert_eq!(of(&TransferError::Closed, &line, true), (false, false));
        line.ended(Epoch(1));
        assert!(!line.goes_on(true, false));
        assert_eq!(of(&lost, &line, true), (false, false), "the next session tells the peer");
    }
}
