//! Follows the registry: the workers' table, the router's readiness and its health take over each view.
//!
//! A router becomes ready with its first workers, and stays ready when they go: without any router, clients would be told nothing, where this
//! one says 503 and why. One that never had workers may be unable to read the registry, and must not take the place of one that can.

use std::future::pending;
use std::sync::Arc;

use baton_cluster::{Restored, Role, View, ViewReceiver};
use baton_runtime::{Readiness, Shutdown, metrics as names};
use metrics::gauge;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic_health::ServingStatus;

use crate::models::Models;

/// Name of the service whose health clients ask for.
pub(crate) const INFERENCE: &str = "baton.v1.Inference";

/// Passes every new view to the workers' tables, and publishes whether requests can be served.
pub(crate) struct Watcher {
    pub models: Arc<Models>,
    pub readiness: Readiness,
    pub health: tonic_health::server::HealthReporter,
    pub shutdown: Shutdown,
    /// The latest view, for those who save it.
    pub seen: watch::Sender<Arc<View>>,
}

impl Watcher {
    /// Runs until the drain starts. `restored` is what is known before the registry says anything.
    pub async fn run(self, mut views: ViewReceiver, mut restored: Restored) {
        loop {
            let view = Arc::clone(&views.borrow_and_update());
            restored.hear(view, Instant::now().into_std());
            self.take(restored.view()).await;
            let settled = async {
                match restored.settles_at() {
                    Some(at) => sleep_until(at.into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                changed = views.changed() => if changed.is_err() {
                    // The registry's watch ended; the last view stays (I7).
                    break;
                },
                () = settled => {}
                () = self.shutdown.draining() => break,
            }
        }
        self.shutdown.draining().await;
        self.serving("", false).await;
        self.serving(INFERENCE, false).await;
    }

    async fn take(&self, view: Arc<View>) {
        for role in [Role::Prefill, Role::Decode, Role::KvStore] {
            let count = view.members.iter().filter(|m| m.role == role).count();
            gauge!(names::MEMBERS, "role" => role.as_str()).set(count as f64);
        }
        gauge!(names::VIEW_STALE).set(f64::from(u8::from(view.stale)));
        tracing::debug!(revision = view.revision, members = view.members.len(), stale = view.stale, "view");
        self.models.update(&view);
        self.seen.send_replace(view);
        let lacking = self.models.not_ready();
        match &lacking {
            None => self.readiness.ready(),
            Some(reason) if self.readiness.reason().is_some() => self.readiness.not_ready(reason),
            Some(_) => {}
        }
        self.serving("", self.readiness.reason().is_none()).await;
        self.serving(INFERENCE, lacking.is_none()).await;
    }

    async fn serving(&self, service: &str, serves: bool) {
        let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.health.set_service_status(service, status).await;
    }
}
