//! The gRPC service `Worker` of every worker.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_engine::BlockCounts;
use baton_proto::v1::{self, worker_server};
use baton_types::WorkerId;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use baton_roles::Snapshot;

use crate::columns::Asks;
use crate::news::{WorkerEvents, WorkerNews};

/// How often it is looked at how fast KV leaves, and most peers of which that is told.
const LINKS_EVERY: Duration = Duration::from_secs(1);
const LINKS: usize = 1024;

/// Lists a prefill worker's peers and the transports to each.
type Peers = Box<dyn Fn() -> Vec<v1::Peer> + Send + Sync>;

/// Says what the tiers of the worker's KV store hold.
type Tiers = Box<dyn Fn() -> Vec<v1::KvTier> + Send + Sync>;

/// Answers from the engine thread's snapshots.
#[derive(Clone)]
pub struct WorkerService {
    id: WorkerId,
    pub(crate) role: &'static str,
    pub(crate) snapshot: watch::Receiver<Snapshot>,
    /// Unset for a role that writes to no peer.
    peers: Arc<OnceLock<Peers>>,
    /// Unset without a KV store.
    tiers: Arc<OnceLock<Tiers>>,
    /// Unset where nobody can look at KV.
    columns: Arc<OnceLock<Asks>>,
    /// Bytes of a block of the pool.
    block_bytes: u64,
    /// What others open the KV pool by, for people.
    pool_by: String,
    news: Arc<WorkerNews>,
}

impl WorkerService {
    pub(crate) fn new(
        id: WorkerId,
        role: &'static str,
        snapshot: watch::Receiver<Snapshot>,
        (pool_by, block_bytes): (String, u64),
        news: Arc<WorkerNews>,
    ) -> WorkerService {
        let (peers, tiers, columns) = (Arc::default(), Arc::default(), Arc::default());
        WorkerService { id, role, snapshot, peers, tiers, columns, block_bytes, pool_by, news }
    }

    /// Ends its streams.
    pub(crate) fn end(&self) {
        self.news.end();
    }

    /// How fast KV leaves for each peer, as far as it was measured. `token_bytes`: of a token's KV; `load_seconds`: what a token takes from the
    /// store.
    fn links(&self, token_bytes: u32, load_seconds: f64) -> v1::LinksEvent {
        let rate = |peer: v1::Peer| {
            let path = peer.paths.into_iter().find(|path| path.in_use)?;
            Some(v1::Link { worker: peer.id, bytes_per_second: path.bytes_per_second? })
        };
        let peers = self.peers.get().map(|peers| peers()).unwrap_or_default();
        let mut links: Vec<_> = peers.into_iter().filter_map(rate).collect();
        links.sort_unstable_by_key(|link| link.worker);
        links.truncate(LINKS);
        v1::LinksEvent { token_bytes, links, load_seconds }
    }

    /// Tells those that follow how fast KV leaves, and comes from the store, until the task is dropped.
    pub(crate) async fn tell_links(&self, token_bytes: u32, load_seconds: impl Fn() -> f64) {
        loop {
            self.news.links(self.links(token_bytes, load_seconds()));
            tokio::time::sleep(LINKS_EVERY).await;
        }
    }

    /// Adds what `peers` returns to the worker's status from now on.
    pub fn report_peers(&self, peers: impl Fn() -> Vec<v1::Peer> + Send + Sync + 'static) {
        // A worker has one role, and the role calls this once.
        let _ = self.peers.set(Box::new(peers));
    }

    /// Adds what `tiers` returns to the worker's status from now on.
    pub(crate) fn report_tiers(&self, tiers: impl Fn() -> Vec<v1::KvTier> + Send + Sync + 'static) {
        // A worker has one store.
        let _ = self.tiers.set(Box::new(tiers));
    }

    /// Answers `Columns` by this from now on.
    pub(crate) fn show_columns(&self, asks: Asks) {
        // A worker has one pool.
        let _ = self.columns.set(asks);
    }

    /// The pool and the tiers below it.
    fn kv_tiers(&self, blocks: &BlockCounts) -> Vec<v1::KvTier> {
        let held = u64::from(blocks.used) + u64::from(blocks.cached);
        let (bytes, limit_bytes) = (held * self.block_bytes, u64::from(blocks.total) * self.block_bytes);
        let pool = v1::KvTier { tier: "pool".to_owned(), blocks: held, bytes, limit_bytes, ..Default::default() };
        std::iter::once(pool).chain(self.tiers.get().into_iter().flat_map(|tiers| tiers())).collect()
    }
}

#[tonic::async_trait]
impl worker_server::Worker for WorkerService {
    type FollowStream = WorkerEvents;

    async fn follow(&self, _: Request<v1::FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        Arc::clone(&self.news).follow().map(Response::new)
    }

    async fn columns(&self, request: Request<v1::ColumnsRequest>) -> Result<Response<v1::ColumnsResponse>, Status> {
        let asks = self.columns.get().ok_or_else(|| Status::unimplemented("this worker shows no KV"))?;
        asks(request.into_inner()).await.map(Response::new)
    }

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
            id: self.id.0,
            pid: std::process::id(),
            pool_by: self.pool_by.clone(),
            tiers: self.kv_tiers(&b),
        }))
    }
}
