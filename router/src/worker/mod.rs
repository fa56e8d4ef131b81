//! The workers of this router: one [`Fleet`] for all requests, and a connection to each worker.
//!
//! The task that watches the registry supplies the views; request drivers ask for workers. The fleet decides; this module
//! only connects and probes as the fleet says.

mod channel;
mod fetch;
mod follow;
mod held;
mod keep;
mod legs;
mod link;
mod look;
mod recall;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use baton_cluster::{Member, View};
use baton_policy::{
    Ask, Backlog, BlockName, Capacity, Chosen, Failure, Fetch, Fleet, GateRoom, Holder, Judgement, Known, LeastLoaded,
    LegEnd, Links, NameChain, NameSecret, Placed, Predicted, RoundRobin, Terms, Verdict,
};
use baton_proto::v1;
use baton_runtime::Tls;
use baton_runtime::config::format_duration;
use baton_runtime::metrics as names;
use baton_types::{RequestId, WorkerId, random_u64};
use metrics::{counter, gauge};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::config::{PlacementKind, RouterConfig};
use crate::error::RequestError;
use crate::explain::Explanations;
use crate::model::ServedModel;
use crate::trace::Traces;
use held::{BLOCKS, HeldBlocks, IN_POOLS, IN_STORES};
use link::{WorkerChannel, WorkerLink, WorkerTls};

pub(crate) use fetch::{Allowed, FetchBegins};
use fetch::{Failed, Wish};
use keep::{HOT, Keeper};
pub(crate) use legs::{Leg, Word, open_decode, open_prefill, traced};
pub(crate) use look::Seen;
use recall::Recaller;

/// All workers in the current view.
pub(crate) struct Workers {
    /// The name by which clients ask for the model.
    served_name: String,
    worker_timeout: Duration,
    /// Prompt tokens that tenants may have at each worker that computes prompts.
    fair_window: u32,
    tls: Option<WorkerTls>,
    secret: NameSecret,
    /// Locked only briefly, never across an await.
    fleet: Mutex<Fleet>,
    followers: Mutex<Followers>,
    /// What each worker holds in its pool.
    held: HeldBlocks,
    /// What each worker has in its own store below it.
    stored: HeldBlocks,
    /// Places for prefixes that move.
    fetches: Arc<Semaphore>,
    keeper: Keeper,
    /// `None`: no KV is brought up ahead of need.
    recaller: Option<Recaller>,
    /// Placements so far.
    turn: AtomicUsize,
    explanations: Explanations,
    traces: Traces,
    /// What follows from the latest view. Requests read it without waiting for each other.
    table: RwLock<Arc<Table>>,
}

/// What the processes of a cluster have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared<'a> {
    pub tls: Option<&'a Tls>,
    /// From which the names of blocks follow.
    pub secret: NameSecret,
}

/// What became of a wish to be placed.
pub(crate) struct Placement {
    pub chosen: Result<Chosen, Failure>,
    /// Number of its explanation.
    pub number: u64,
}

/// What follows from a view alone.
#[derive(Clone, Debug)]
struct Table {
    capacity: Capacity,
    gate_room: GateRoom,
    fingerprint: u64,
    /// Connections to the fleet's workers. One removed here lives on in the links of the requests that use it.
    channels: HashMap<WorkerId, WorkerChannel>,
    /// Tokens of a block of the workers, where names of blocks are to be compared with theirs.
    block_size: u32,
    /// There are KV stores.
    has_stores: bool,
    /// Idle workers take copies of hot prefixes.
    copies_hot: bool,
}

/// The tasks that follow workers.
#[derive(Debug, Default)]
struct Followers {
    /// Dropping a sender ends its task.
    here: HashMap<WorkerId, (oneshot::Sender<()>, JoinHandle<()>)>,
    /// Those that end.
    left: HashMap<WorkerId, JoinHandle<()>>,
}

impl Followers {
    fn join(&mut self, workers: &Arc<Workers>, id: WorkerId, channel: WorkerChannel) {
        let ((here, left), before) = (oneshot::channel(), self.left.remove(&id));
        let task = tokio::spawn(follow::until_left(Arc::downgrade(workers), id, channel, left, before));
        self.here.insert(id, (here, task));
    }

    fn leave(&mut self, id: WorkerId) {
        self.left.retain(|_, task| !task.is_finished());
        if let Some((_, task)) = self.here.remove(&id) {
            self.left.insert(id, task);
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.describe())
    }
}

impl Workers {
    /// A table without workers.
    pub fn new(model: &ServedModel, config: &RouterConfig, Shared { tls, secret }: Shared<'_>) -> Workers {
        let RouterConfig { placement, local_prompt, late_reservation, worker_timeout, fair_window, .. } = *config;
        let traces = Traces::new(config.admin_prompts);
        let placement: Box<dyn baton_policy::Placement> = match placement {
            PlacementKind::Predicted => Box::new(Predicted::new(local_prompt)),
            PlacementKind::RoundRobin => Box::<RoundRobin>::default(),
            PlacementKind::LeastLoaded => Box::<LeastLoaded>::default(),
        };
        let mut fleet = Fleet::new(model.name(), placement, random_u64());
        fleet.reserve_late(Some(late_reservation));
        // The settings were checked.
        fleet.keep_from(config.kv_store_min_uses as u8);
        fleet.copy_hot(HOT, config.hot_prefix_percent);
        let table = Table {
            capacity: fleet.capacity(),
            gate_room: fleet.gate_room(fair_window),
            fingerprint: fleet.fingerprint(),
            channels: HashMap::new(),
            block_size: fleet.block_size(),
            has_stores: false,
            copies_hot: false,
        };
        let tls = tls.map(WorkerTls::new);
        let (served_name, table) = (model.id().to_owned(), RwLock::new(Arc::new(table)));
        Workers {
            served_name,
            worker_timeout,
            fair_window,
            tls,
            secret,
            fleet: Mutex::new(fleet),
            followers: Mutex::default(),
            held: HeldBlocks::new(BLOCKS, "pools"),
            stored: HeldBlocks::new(BLOCKS, "stores"),
            fetches: Arc::new(Semaphore::new(fetch::MOST)),
            keeper: Keeper::default(),
            recaller: config.recall_turns.then(Recaller::default),
            turn: AtomicUsize::new(random_u64() as usize),
            explanations: Explanations::default(),
            traces,
            table,
        }
    }

    fn fleet(&self) -> MutexGuard<'_, Fleet> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies a new view: connects to workers that joined and follows what they hold, and forgets those that left.
    pub fn update(self: &Arc<Self>, view: Arc<View>) {
        // To the end, so that of two views the later one stays.
        let mut fleet = self.fleet();
        let changes = fleet.update(view);
        let mut table = Table::clone(&self.table());
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        for id in changes.left {
            table.channels.remove(&id);
            followers.leave(id);
        }
        for member in changes.joined {
            if member.kv_secret != self.secret.mark() && member.model == fleet.model() {
                tracing::warn!(worker = %member.id, "it has another kv_secret_file than this router, which finds none of its KV");
            }
            match link::connect(&member, self.worker_timeout, self.tls.as_ref()) {
                Ok(channel) => {
                    if member.model == fleet.model() {
                        followers.join(self, member.id, channel.clone());
                    }
                    table.channels.insert(member.id, channel);
                }
                Err(error) => {
                    fleet.unusable(member.id);
                    tracing::warn!(worker = %member.id, address = member.grpc, error, "a worker cannot be used");
                }
            }
        }
        (table.capacity, table.fingerprint) = (fleet.capacity(), fleet.fingerprint());
        (table.gate_room, table.block_size) = (fleet.gate_room(self.fair_window), fleet.block_size());
        (table.has_stores, table.copies_hot) = (fleet.has_stores(), fleet.copies_hot());
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }

    /// The view as JSON, for people and `baton status`.
    pub fn describe(&self) -> serde_json::Value {
        let (model, view, states) = {
            let fleet = self.fleet();
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
            "served_name": self.served_name,
            "revision": view.revision,
            "stale": view.stale,
            "members": view.members.iter().zip(states).map(member).collect::<Vec<_>>(),
        })
    }

    /// What happened to the latest choices.
    pub fn traces(&self) -> &Traces {
        &self.traces
    }

    /// Why no request can be served now; None when requests can be served.
    pub fn not_ready(&self) -> Option<String> {
        self.fleet().not_ready()
    }

    /// The longest sequence and the KV tokens that the workers in the view can hold.
    pub fn capacity(&self) -> Capacity {
        self.table().capacity
    }

    /// The room that the workers in the view have for requests of several tenants.
    pub fn gate_room(&self) -> GateRoom {
        self.table().gate_room
    }

    /// Identifies the workers' weights and KV layout.
    pub fn fingerprint(&self) -> u64 {
        self.table().fingerprint
    }

    /// Tokens of a block of the workers.
    pub fn block_size(&self) -> u32 {
        self.table().block_size
    }

    /// What comes before the first block of prompts with this salt.
    pub fn root(&self, salt: &str, block_size: u32) -> NameChain {
        self.secret.root(salt, block_size)
    }

    /// Chooses workers for a request.
    pub fn place(&self, ask: &Ask, request: &RequestId, failed: Option<u64>) -> Placement {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let pool = self.held.find(&ask.names, IN_POOLS, turn);
        let store = self.stored.find(&ask.names, IN_STORES, turn);
        self.recaller.iter().for_each(|recaller| recaller.came(&ask.names));
        let chosen = self.fleet().place(ask, Known { pool: &pool, store: &store }, Instant::now().into_std());
        if let Ok(Chosen { placed, why: Some(_), load, .. }) = &chosen {
            let route = if placed.prefill.is_some() { "split" } else { "local" };
            let at = |holder: &Holder| holder.worker == placed.decode || Some(holder.worker) == placed.prefill;
            let kv = match load {
                Some(_) => "stored",
                None if pool.iter().any(at) => "held",
                None => "none",
            };
            counter!(names::PLACEMENTS, "route" => route, "kv" => kv).increment(1);
        }
        let number = self.explanations.placed(request, &chosen, failed);
        Placement { chosen, number }
    }

    /// Remembers why a request is not placed at all.
    pub fn turned_away(&self, request: &RequestId, error: &RequestError) {
        self.explanations.placed(request, &Err(Failure::new(error.kind, error.message.clone())), None);
    }

    /// Has a worker take a prefix from another one, if both are there and not too many move.
    pub fn fetch(self: &Arc<Self>, fetch: Fetch, prefix: v1::Prefix, allowed: Allowed) -> Option<FetchBegins> {
        let table = self.table();
        let [to, from] = [fetch.to, fetch.from].map(|worker| table.channels.get(&worker).cloned());
        let place = Arc::clone(&self.fetches).try_acquire_owned().ok()?;
        Some(fetch::begin(Arc::downgrade(self), (to?, from?), Wish { fetch, prefix, allowed, place }))
    }

    /// Takes in what became of a prefix that was to move, where it had the time that it needs.
    fn apart(&self, outcome: &Result<u32, Failed>, to: WorkerId, from: WorkerId) {
        let now = Instant::now().into_std();
        let gone = |status: &Status| !link::answered(status) || status.code() == Code::Unavailable;
        let late = |status: &Status| status.code() == Code::DeadlineExceeded;
        match outcome {
            Ok(_) => self.fleet().fetched(to),
            Err(Failed::NotTaken(_)) => self.fleet().not_fetched(to, now),
            // One that is late may be loading it first.
            Err(Failed::NotGiven(status)) if gone(status) => self.fleet().silent(from, now),
            Err(Failed::Refused(status)) if gone(status) || late(status) => self.fleet().silent(to, now),
            _ => {}
        }
    }

    /// The stream to a worker is opened for the request with this placement.
    pub fn opened(&self, worker: WorkerId, placement: u64) {
        self.fleet().opened(worker, placement, Instant::now().into_std());
    }

    /// The request that was so placed has begun to answer, or has ended.
    pub fn begun(&self, chosen: &Chosen) {
        self.fleet().begun(chosen);
    }

    /// What came of a placement with these predictions: seconds to the first token, and from one token to the next.
    pub fn measured(&self, number: u64, predicted: &Terms, first: Option<f64>, token: Option<f64>) {
        let errors = {
            let mut fleet = self.fleet();
            fleet.measured(predicted, first, token);
            fleet.errors()
        };
        for (of, error) in [("ttft", errors.0), ("itl", errors.1)] {
            if let Some(error) = error {
                gauge!(names::PREDICTION_ERROR, "of" => of).set(error);
            }
        }
        self.explanations.measured(number, first, token);
    }

    /// So many tokens of the prompt that was so placed were not computed.
    pub fn cached(&self, number: u64, tokens: u32) {
        self.explanations.cached(number, tokens);
    }

    /// Why a request was placed where it was; nothing if it is not known, or not any more.
    pub fn explain(&self, request: &str, since: Option<Instant>) -> Vec<serde_json::Value> {
        self.explanations.of(request, since)
    }

    /// Takes in how a request fared on a worker, or between two.
    pub fn judge(&self, verdict: Verdict) {
        let judgement = self.fleet().judge(verdict, Instant::now().into_std());
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

    /// Records that these workers have the KV of the prefixes with these names, after an answer of so many tokens.
    pub fn note(&self, placed: Placed, names: &[BlockName], answer: u32) {
        self.fleet().note(placed, names, answer, Instant::now().into_std());
    }

    /// Nothing is heard of a worker any more.
    fn untold(&self, worker: WorkerId) {
        self.fleet().untold(worker);
    }

    /// A worker says how fast KV leaves it.
    fn linked(&self, worker: WorkerId, links: Links) {
        self.fleet().linked(worker, links);
    }

    /// A worker says what it had to do so long ago.
    fn told(&self, worker: WorkerId, backlog: Backlog, routers: u32, age: Duration) {
        let now = Instant::now().into_std();
        self.fleet().told(worker, backlog, routers, now.checked_sub(age).unwrap_or(now));
    }

    /// The connection to a worker. It counts as a request in flight until it is dropped.
    pub fn link(self: &Arc<Self>, worker: WorkerId) -> Result<WorkerLink, LegEnd> {
        // Every worker of the fleet has a connection, so this worker has left.
        let channel = self.table().channels.get(&worker).cloned().ok_or(LegEnd::Left { worker })?;
        let lease = self.fleet().lease(worker)?;
        Ok(WorkerLink::new(Arc::clone(self), channel, lease))
    }
}
