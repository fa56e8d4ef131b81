//! The workers of this router: one [`Fleet`] for all requests, and a connection to each worker.
//!
//! The task that watches the registry supplies the views; request drivers ask for workers. The fleet decides; this module
//! only connects and probes as the fleet says.

mod gather;
mod legs;
mod link;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_cluster::{Member, View};
use baton_policy::{
    Ask, Capacity, Failure, Fleet, Judgement, LeastLoaded, LegEnd, Placed, Placement, RoundRobin, Verdict, WorkerLease,
};
use baton_runtime::config::format_duration;
use baton_runtime::metrics as names;
use baton_types::WorkerId;
use metrics::counter;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::config::PlacementKind;
use link::WorkerLink;

pub(crate) use legs::{Leg, open_decode, open_prefill};

/// All workers in the current view.
pub(crate) struct Workers {
    worker_timeout: Duration,
    state: Mutex<State>,
}

/// Locked only briefly. Do not hold the lock across an await, nor while dropping a [`WorkerLink`]: its drop takes the lock.
struct State {
    fleet: Fleet,
    /// Connections to the fleet's workers. One removed here lives on in the links of the requests that use it.
    channels: HashMap<WorkerId, Channel>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.describe())
    }
}

impl Workers {
    /// A table without workers.
    pub fn new(model: &str, placement: PlacementKind, worker_timeout: Duration) -> Workers {
        let placement: Box<dyn Placement> = match placement {
            PlacementKind::RoundRobin => Box::<RoundRobin>::default(),
            PlacementKind::LeastLoaded => Box::<LeastLoaded>::default(),
        };
        let state = State { fleet: Fleet::new(model, placement), channels: HashMap::new() };
        Workers { worker_timeout, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a new view: connects to workers that joined, and forgets those that left.
    pub fn update(&self, view: Arc<View>) {
        let State { fleet, channels } = &mut *self.state();
        let changes = fleet.update(view);
        changes.left.iter().for_each(|id| drop(channels.remove(id)));
        for member in changes.joined {
            match link::connect(&member, self.worker_timeout) {
                Ok(channel) => drop(channels.insert(member.id, channel)),
                Err(error) => {
                    fleet.unusable(member.id);
                    tracing::warn!(worker = %member.id, address = member.grpc, %error, "unusable address");
                }
            }
        }
    }

    /// The view as JSON, for people and `baton status`.
    pub fn describe(&self) -> serde_json::Value {
        let (model, view, states) = {
            let State { fleet, .. } = &*self.state();
            let states: Vec<_> = fleet.members().map(|w| (w.lost, w.ejected, w.in_flight)).collect();
            (fleet.model().to_owned(), Arc::clone(fleet.view()), states)
        };
        let member = |(m, (lost, ejected, in_flight)): (&Member, (bool, bool, u32))| {
            serde_json::json!({
                "id": m.id.to_string(),
                "role": m.role.as_str(),
                "grpc": m.grpc,
                "admin": m.admin,
                "model": m.model,
                "layout": format!("{:016x}", m.layout),
                "blocks": m.blocks,
                "block_size": m.block_size,
                "context_tokens": m.context_tokens,
                "draining": m.draining,
                "lost": lost,
                "ejected": ejected,
                "in_flight": in_flight,
            })
        };
        serde_json::json!({
            "model": model,
            "revision": view.revision,
            "stale": view.stale,
            "members": view.members.iter().zip(states).map(member).collect::<Vec<_>>(),
        })
    }

    /// Why no request can be served now; None when requests can be served.
    pub fn not_ready(&self) -> Option<String> {
        self.state().fleet.not_ready()
    }

    /// The longest sequence and the KV tokens that the workers in the view can hold.
    pub fn capacity(&self) -> Capacity {
        self.state().fleet.capacity()
    }

    /// Identifies the workers' weights and KV layout.
    pub fn fingerprint(&self) -> u64 {
        self.state().fleet.fingerprint()
    }

    /// Chooses workers for a request.
    pub fn place(&self, ask: &Ask) -> Result<Placed, Failure> {
        self.state().fleet.place(ask, Instant::now().into_std())
    }

    /// Takes in how a request fared on a worker, or between two.
    pub fn judge(&self, verdict: Verdict) {
        let judgement = self.state().fleet.judge(verdict, Instant::now().into_std());
        match judgement {
            None => {}
            Some(Judgement::Ejected { on, time, why }) => {
                counter!(names::EJECTIONS, "of" => on.kind()).increment(1);
                let time = format_duration(time);
                tracing::warn!(%on, "ejected for {time}: {why}");
            }
            Some(Judgement::Readmitted(on)) => tracing::info!(%on, "readmitted: the request that tried it went well"),
        }
    }

    /// Records that these workers have the KV of the prefixes with these names.
    pub fn note(&self, placed: Placed, names: &[u64]) {
        self.state().fleet.note(placed, names);
    }

    /// The connection to a worker. It counts as a request in flight until it is dropped.
    pub fn link(self: &Arc<Self>, worker: WorkerId) -> Result<WorkerLink, LegEnd> {
        let State { fleet, channels } = &mut *self.state();
        // Every worker of the fleet has a connection, so this worker has left.
        let channel = channels.get(&worker).cloned().ok_or(LegEnd::Left { worker })?;
        Ok(WorkerLink::new(Arc::clone(self), channel, fleet.lease(worker)?))
    }

    fn release(&self, lease: WorkerLease) {
        self.state().fleet.release(lease);
    }
}
