//! Tells a decode worker that this process no longer writes to its pool ([`baton_handoff::tells_peer`]).

use std::time::Instant;

use baton_handoff::{Excuse, Over, Paths, TransferError};
use rustix::io::Errno;

use super::connect::{Interrupt, Plan};
use crate::link::Socket;
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
            let again = excuse.failed(&error, Instant::now());
            tracing::debug!(%error, "the decode worker is not told yet that its pool is unmapped");
            let waited = again.ok_or(error).and_then(|again| pause(interrupt, again));
            if let Err(error) = waited {
                tracing::warn!(%error, "the decode worker cannot be told that its pool is unmapped; it may keep blocks aside");
                break;
            }
        }
        self.paths(Paths::told);
    }

    /// Ok, too, when the peer is gone.
    fn try_excuse(&self, interrupt: Interrupt<'_>, until: Instant) -> Result<(), TransferError> {
        let over = if self.target.device { Over::CudaIpc } else { Over::Stream };
        let address = self.unix_address();
        let caller = self.caller(&address, over);
        match self.call_unix() {
            // The socket's name is the peer's alone, and nobody listens there.
            Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(()),
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

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use baton_handoff::{Frame, FrameLimits, TransferLimits};

    use super::super::session::tests::plan;
    use super::*;
    use crate::handshake::{HandshakeEnd, receive};
    use crate::link::Link;
    use crate::wake::Wake;

    /// A plan to reach a worker with this socket, which must be told.
    fn untold(name: &str) -> Plan {
        let plan = plan();
        let mut target = plan.target.clone();
        target.unix = format!("baton-test-{name}-{}", std::process::id()).into_bytes();
        let plan = Plan { config: plan.config.clone(), target };
        plan.paths(|paths| paths.over(true));
        plan
    }

    fn listen(plan: &Plan) -> UnixListener {
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&plan.target.unix).unwrap()).unwrap()
    }

    #[test]
    fn a_worker_that_hangs_up_is_told_by_the_next_call() {
        let plan = untold("busy");
        let (listener, limits) = (listen(&plan), TransferLimits::default());
        let (peer, fingerprint) = (plan.peer(), plan.target.layout.fingerprint());
        let (blocks, pool) = (vec![1; plan.target.layout.groups.len()], plan.pool().clone());
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let worker = std::thread::spawn(move || {
            for call in 1..=3 {
                let (stream, _) = listener.accept().unwrap();
                counted.store(call, Ordering::Relaxed);
                if call < 3 {
                    continue;
                }
                stream.set_nonblocking(true).unwrap();
                let mut link = Link::new(Socket::Unix(stream), pool.clone(), FrameLimits::new(&limits, blocks.len()));
                let wake = Wake::new().unwrap();
                let until = Instant::now() + Duration::from_secs(60);
                let end = HandshakeEnd { wake: &wake, until, stopped: &|| false };
                receive(&mut link, peer, fingerprint, &end).map(drop).unwrap();
                link.push(&Frame::Welcome { blocks: blocks.clone(), ticket: None });
                link.flush().unwrap();
            }
        });
        let wake = Wake::new().unwrap();
        plan.excuse(Interrupt { wake: &wake, stopped: &|| false });
        worker.join().unwrap();
        assert_eq!((calls.load(Ordering::Relaxed), plan.paths(|paths| paths.is_untold())), (3, false));
    }

    #[test]
    fn a_worker_that_is_gone_need_not_be_told() {
        let plan = untold("gone");
        drop(listen(&plan));
        let wake = Wake::new().unwrap();
        plan.excuse(Interrupt { wake: &wake, stopped: &|| false });
        assert!(!plan.paths(|paths| paths.is_untold()));
    }

    #[test]
    fn a_new_session_ends_the_calls_and_tells_the_worker_itself() {
        let plan = untold("stopped");
        let _listener = listen(&plan);
        let wake = Wake::new().unwrap();
        plan.excuse(Interrupt { wake: &wake, stopped: &|| true });
        assert!(plan.paths(|paths| paths.is_untold()));
    }
}
