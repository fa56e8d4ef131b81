//! The time from a worker's registration until it has left the cluster.
//!
//! A signal to the process starts the drain, so that the registry, the router and the supervisor all learn of it. The [`Drain`]
//! decides. This file owns the lease and the real clock.

use std::future::pending;

use baton_cluster::RegistryLease;
use baton_roles::{Drain, DrainEffect, DrainInput, Snapshot};
use baton_runtime::Shutdown;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::{EngineHandle, WorkerError};

/// A registered worker.
pub(crate) struct Serving<C> {
    handle: EngineHandle<C>,
    shutdown: Shutdown,
    health: HealthReporter,
    service: &'static str,
    /// None once it is given back.
    lease: Option<RegistryLease>,
    /// Why the engine cannot go on.
    failed: Option<WorkerError>,
}

impl<C> Serving<C> {
    /// A worker with this lease, whose gRPC `service` is reported as healthy.
    pub fn new(
        handle: EngineHandle<C>,
        shutdown: Shutdown,
        health: HealthReporter,
        service: &'static str,
        lease: RegistryLease,
    ) -> Serving<C> {
        Serving { handle, shutdown, health, service, lease: Some(lease), failed: None }
    }

    /// Returns when the worker has left the cluster, and its sockets are to be closed.
    ///
    /// # Errors
    /// The worker has left because its engine cannot go on.
    pub async fn until_left(mut self) -> Result<(), WorkerError> {
        let (mut drain, mut snapshot) = (Drain::default(), self.handle.snapshot());
        loop {
            let input = match drain.next_effect() {
                Some(DrainEffect::Close) => return self.failed.map_or(Ok(()), Err),
                Some(effect) => match self.perform(effect).await {
                    Some(input) => input,
                    None => continue,
                },
                None => self.happens(&drain, &mut snapshot).await,
            };
            drain.feed(input, Instant::now().into_std());
        }
    }

    /// Performs one effect. Returns its answer, if it has one.
    async fn perform(&mut self, effect: DrainEffect) -> Option<DrainInput> {
        match effect {
            DrainEffect::Announce => self.lease.iter().for_each(RegistryLease::set_draining),
            DrainEffect::Refuse => self.health.set_service_status(self.service, ServingStatus::NotServing).await,
            DrainEffect::DrainEngine => self.handle.drain(),
            DrainEffect::CutOff(0) => {}
            DrainEffect::CutOff(sequences) => tracing::warn!(sequences, "the worker leaves before it is idle"),
            DrainEffect::Revoke => {
                if let Some(lease) = self.lease.take() {
                    lease.revoke().await;
                }
                return Some(DrainInput::Revoked);
            }
            // The last effect. `until_left` performs it.
            DrainEffect::Close => {}
        }
        None
    }

    /// Waits for the next event. Of events that are ready together, the first in this order is taken.
    async fn happens(&mut self, drain: &Drain, snapshot: &mut watch::Receiver<Snapshot>) -> DrainInput {
        let stall = self.handle.stall();
        let failed = tokio::select! {
            biased;
            () = self.shutdown.forced() => return DrainInput::Forced,
            // A stalled engine thread may never publish another snapshot.
            () = stall.told() => stall.get().cloned().map(WorkerError::Stalled),
            () = self.shutdown.draining(), if drain.serves() => {
                let until = self.shutdown.deadline().unwrap_or_else(Instant::now).into_std();
                return DrainInput::Asked { until };
            }
            changed = snapshot.changed() => match changed {
                Ok(()) => return DrainInput::Held(*snapshot.borrow_and_update()),
                Err(_) => Some(WorkerError::EngineStopped),
            },
            () = at(drain.next_wake()) => return DrainInput::Wake,
        };
        self.failed = failed;
        // The process's other tasks do not wait either.
        self.shutdown.force("what computes has stopped");
        DrainInput::EngineEnded
    }
}

async fn at(wake: Option<std::time::Instant>) {
    match wake {
        Some(at) => sleep_until(at.into()).await,
        None => pending().await,
    }
}
