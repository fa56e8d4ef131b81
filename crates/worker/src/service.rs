//! The `Worker` service every worker has, and its drain. A drain starts with a signal to the process, so that the registry, the
//! router and the supervisor all learn of it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_proto::v1::{self, worker_server};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use baton_roles::Snapshot;

/// Says over what KV goes to which peers.
type Peers = Box<dyn Fn() -> Vec<v1::Peer> + Send + Sync>;

/// Answers from the engine thread's snapshots.
#[derive(Clone)]
pub struct WorkerService {
    pub(crate) role: &'static str,
    pub(crate) snapshot: watch::Receiver<Snapshot>,
    /// None of a role that writes to nobody.
    peers: Arc<OnceLock<Peers>>,
}

impl WorkerService {
    pub(crate) fn new(role: &'static str, snapshot: watch::Receiver<Snapshot>) -> WorkerService {
        WorkerService { role, snapshot, peers: Arc::default() }
    }

    /// From now on the worker's status says what `peers` does.
    pub fn report_peers(&self, peers: impl Fn() -> Vec<v1::Peer> + Send + Sync + 'static) {
        // A worker has one role, which says it once.
        let _ = self.peers.set(Box::new(peers));
    }

    /// Waits until the engine, which was told to drain, is idle; Err: sequences left at the deadline.
    pub(crate) async fn drained(&self, timeout: Duration) -> Result<(), u32> {
        let mut snapshot = self.snapshot.clone();
        let idle = tokio::time::timeout(timeout, snapshot.wait_for(|s| s.draining && s.idle)).await;
        if matches!(idle, Ok(Ok(_))) {
            return Ok(());
        }
        let now = *self.snapshot.borrow();
        Err(now.running + now.waiting)
    }
}

#[tonic::async_trait]
impl worker_server::Worker for WorkerService {
    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        let now = *self.snapshot.borrow();
        let b = now.blocks;
        Ok(Response::new(v1::StatusResponse {
            role: self.role.to_owned(),
            running: now.running,
            waiting: now.waiting,
            blocks: Some(v1::BlockCounts {
                total: b.total,
                free: b.free,
                used: b.used,
                cached: b.cached,
                lent: b.lent,
                quarantined: b.quarantined,
            }),
            draining: now.draining,
            steps: now.steps,
            peers: self.peers.get().map(|peers| peers()).unwrap_or_default(),
        }))
    }
}
