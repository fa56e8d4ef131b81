//! Tells a decode worker that this process no longer writes to its pool ([`baton_handoff::tells_peer`]).

use std::time::Instant;

use baton_handoff::{Excuse, Over, Paths, TransferError};
use rustix::io::Errno;

use super::connect::{Interrupt, Plan};
use crate::link::Socket;
use crate::shm;
use crate::wake::wait;

impl Plan {
    /// Tries until the peer is told, by another session that ends at once. A stalled peer is told when it moves again. A new session to the
    /// peer ends this, since it tells the peer the same.
    pub(super) fn excuse(&self, interrupt: Interrupt<'_>) {
        let mut excuse = Excuse::new(Instant::now());
        while let Err(error) = self.try_excuse(interrupt, excuse.until()) {
            if (interrupt.stopped)() {
                return;
            }
            let Some(again) = excuse.failed(&error, Instant::now()) else {
                tracing::warn!(%error, "the decode worker cannot be told that its pool is unmapped; it may keep blocks aside");
                break;
            };
            tracing::debug!(%error, "the decode worker is not told yet that its pool is unmapped");
            if pause(interrupt, again).is_err() {
                return;
            }
        }
        self.paths(Paths::told);
    }

    /// Ok, too, when the peer is gone.
    fn try_excuse(&self, interrupt: Interrupt<'_>, until: Instant) -> Result<(), TransferError> {
        let over = if self.target.device { Over::CudaIpc } else { Over::Stream };
        let address = self.unix_address();
        let caller = self.caller(&address, over);
        match shm::connect(&self.target.unix) {
            // The socket's name is the peer's alone, and nobody listens there.
            Err(Errno::CONNREFUSED) => Ok(()),
            Err(error) => Err(caller.cannot(error)),
            Ok(stream) => self.greet(interrupt, &caller, Socket::Unix(stream), until).map(drop),
        }
    }
}

/// Waits until `until`, or until interrupted.
fn pause(interrupt: Interrupt<'_>, until: Instant) -> Result<(), TransferError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || (interrupt.stopped)() {
            return Ok(());
        }
        wait(interrupt.wake, &[], Some(left))?;
    }
}
