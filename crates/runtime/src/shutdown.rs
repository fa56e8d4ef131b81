//! How a process ends: with a drain that starts once, has a deadline, and can be forced.
//!
//! Knows no task and no server; they watch it. [`crate::Tasks::join`] waits for the tasks and enforces the deadline.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::error::RuntimeError;

/// How a process ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every task finished by itself.
    Clean,
    /// The drain was forced, or its deadline passed; these tasks were stopped.
    Cut(Vec<String>),
}

/// The shutdown state of one process. Clones share it.
#[derive(Clone, Debug)]
pub struct Shutdown(Arc<State>);

#[derive(Debug)]
struct State {
    drain: CancellationToken,
    force: CancellationToken,
    timeout: Duration,
    started: OnceLock<(Instant, String)>,
}

impl Shutdown {
    /// The state of a running process. Its drain may take `timeout`.
    pub fn new(timeout: Duration) -> Shutdown {
        Shutdown(Arc::new(State {
            drain: CancellationToken::new(),
            force: CancellationToken::new(),
            timeout,
            started: OnceLock::new(),
        }))
    }

    /// From now on SIGINT and SIGTERM start the drain, and a SIGINT during the drain forces it. Call inside a tokio runtime.
    ///
    /// A second SIGTERM is ignored: when a parent dies, the kernel hands its children from thread to thread and sends the
    /// signal of [`crate::die_with_parent`] each time.
    pub fn listen_for_signals(&self) -> Result<(), RuntimeError> {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(RuntimeError::Signals)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(RuntimeError::Signals)?;
        let this = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => this.start("SIGINT"),
                _ = terminate.recv() => this.start("SIGTERM"),
            }
            interrupt.recv().await;
            this.force("SIGINT");
        });
        Ok(())
    }

    /// From now on SIGHUP does not end the process. Call inside a tokio runtime.
    pub fn outlive_hangups(&self) -> Result<(), RuntimeError> {
        let mut hangups = signal(SignalKind::hangup()).map_err(RuntimeError::Signals)?;
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                info!(
                    "SIGHUP: keys and certificates are read again when their files change; other settings need a restart"
                );
            }
        });
        Ok(())
    }

    /// Starts the drain; `reason` is logged. Later calls change nothing. Any thread may call it.
    pub fn start(&self, reason: impl Into<String>) {
        let mut first = false;
        let (_, reason) = self.0.started.get_or_init(|| {
            first = true;
            (Instant::now(), reason.into())
        });
        if first {
            let timeout = crate::config::format_duration(self.0.timeout);
            info!(reason, timeout, "draining");
            self.0.drain.cancel();
        }
    }

    /// Ends the drain now, finished or not.
    pub fn force(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.start(reason.clone());
        if !self.0.force.is_cancelled() {
            warn!(reason, "drain cut short");
            self.0.force.cancel();
        }
    }

    /// True once the drain has started.
    pub fn is_draining(&self) -> bool {
        self.0.drain.is_cancelled()
    }

    /// Why the drain started; `None` while running.
    pub fn reason(&self) -> Option<&str> {
        self.0.started.get().map(|(_, reason)| reason.as_str())
    }

    /// When the drain must be over; `None` while running.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.started.get().map(|(at, _)| *at + self.0.timeout)
    }

    /// Completes when the drain starts: take no new work, finish what there is.
    pub async fn draining(&self) {
        self.0.drain.cancelled().await;
    }

    /// Completes when the drain is cut short: drop everything.
    pub async fn forced(&self) {
        self.0.force.cancelled().await;
    }

    /// A token that is cancelled when the drain starts. Cancelling it does not start the drain.
    pub fn token(&self) -> CancellationToken {
        self.0.drain.child_token()
    }
}
