//! The prefill end: opens handoffs to reservations and writes layers of blocks as they are computed.
//!
//! Threads: one per decode worker that is being written to, and one more while it connects. Knows nothing of sequences: the caller
//! says which local block holds which part of the reservation.

mod connect;
mod dial;
mod excuse;
mod queue;
mod session;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_handoff::{Core, Descriptor, Done, Known, OnDone, PathReport, Quiet, TransferError, TransportKind, Writes};
use baton_types::{BlockId, Epoch, WorkerId};

use crate::cpus::End;
use crate::options::{MAX_TCP_CONNECTIONS, SenderOptions, TransportChoice, UcxSettings, check_pool};
use crate::threads::{self, Thread, lock};
use crate::ucx::UcxEngine;
use crate::unix::{this_folder, this_namespace};
use connect::{Plan, SenderConfig};
use queue::Queue;

#[cfg(feature = "testing")]
pub(crate) use connect::Wrap;

/// Tells which transport carries a handoff, even after the handoff has ended.
#[derive(Clone, Debug)]
pub struct Carrier(Arc<Core>);

impl Carrier {
    /// None until access was granted.
    pub fn transport(&self) -> Option<TransportKind> {
        self.0.transport()
    }
}

struct Peer {
    /// Fingerprint of its pool's layout.
    layout: u64,
    queue: Arc<Queue>,
    thread: Arc<Thread>,
    /// Queue of the previous session. This session's thread waits for that session to end.
    before: Option<Arc<Queue>>,
    /// How many handoffs of all peers had begun when the last of this one did.
    used: u64,
}

impl Peer {
    /// Whether a new handoff goes over its session. `changes`: a new session would take another path.
    fn goes_on(&self, changes: bool) -> bool {
        let waits = self.before.as_ref().is_some_and(|before| !before.is_closed());
        self.queue.goes_on(changes, waits)
    }

    fn stop(&self) {
        self.before.iter().for_each(|before| before.stop());
        self.queue.stop();
    }
}

/// The prefill end. Dropping it aborts every handoff and closes all connections.
pub struct Sender {
    config: Arc<SenderConfig>,
    peers: Mutex<Peers>,
}

/// The decode workers with which there is a session.
#[derive(Default)]
struct Peers {
    all: HashMap<WorkerId, Peer>,
    /// Handoffs begun.
    begun: u64,
}

impl Peers {
    /// Closes the session that was used least recently among those that are idle.
    fn make_room(&self, newcomer: WorkerId) {
        let mut others: Vec<_> = self.all.iter().filter(|(worker, _)| **worker != newcomer).collect();
        others.sort_unstable_by_key(|(_, peer)| peer.used);
        others.into_iter().find(|(worker, peer)| peer.queue.close_if_idle(**worker));
    }
}

impl Sender {
    /// Connects to nobody yet. With [`TransportChoice::Ucx`], fails if the UCX library is missing.
    pub fn new(options: SenderOptions) -> Result<Sender, TransferError> {
        check_pool(&options.geometry, &options.pool)?;
        let options = SenderOptions { cpus: options.cpus.of(End::Sender)?, ..options };
        if !(1..=MAX_TCP_CONNECTIONS).contains(&options.tcp_connections) {
            let problem = format!("{}; it is 1 to {MAX_TCP_CONNECTIONS}", options.tcp_connections);
            return Err(TransferError::argument("tcp_connections", problem));
        }
        let ucx = open_ucx(&options)?;
        let folder = options.sockets.as_deref().map(this_folder).transpose()?;
        let config = SenderConfig {
            options,
            namespace: this_namespace(),
            folder,
            ucx,
            paths: Mutex::default(),
            #[cfg(feature = "testing")]
            wrap: None,
        };
        Ok(Sender { config: Arc::new(config), peers: Mutex::default() })
    }

    /// As [`Sender::new`], with `wrap` around every transport.
    #[cfg(feature = "testing")]
    pub(crate) fn with_wrap(options: SenderOptions, wrap: Wrap) -> Result<Sender, TransferError> {
        let mut sender = Sender::new(options)?;
        if let Some(config) = Arc::get_mut(&mut sender.config) {
            config.wrap = Some(wrap);
        }
        Ok(sender)
    }

    /// Records many handoffs over a path, at `rate` bytes a second.
    #[cfg(test)]
    pub(crate) fn measured(&self, worker: WorkerId, transport: TransportKind, rate: u64) {
        let mut all = lock(&self.config.paths);
        let paths = all.get_mut(worker).expect("its paths");
        (0..100).for_each(|_| paths.carried(transport, rate, std::time::Duration::from_secs(1)));
    }

    /// What is known of the paths to each decode worker written to so far; [`crate::TransferLimits::connections`] workers at most.
    pub fn paths(&self) -> Vec<(WorkerId, Vec<PathReport>)> {
        lock(&self.config.paths).report(Instant::now())
    }

    /// Starts a handoff to the reservation that `target` describes. It must end by `deadline`. Does not wait for the network.
    pub fn open(&self, target: &[u8], deadline: Instant) -> Result<Handoff, TransferError> {
        let options = &self.config.options;
        let layout = &options.geometry.layout;
        let target = Descriptor::parse(target, layout, options.convert.is_some())?;
        let writes = Writes::new(&target, options.worker, &options.geometry, &options.limits, deadline)?;
        let mut queue = self.queue_to(&target)?;
        if let Err(error) = queue.begin(writes.core().clone()) {
            if queue.is_open() {
                return Err(error);
            }
            // The session ended between the two calls; a new one may work.
            queue = self.queue_to(&target)?;
            queue.begin(writes.core().clone())?;
        }
        let converts = target.layout.dtype != layout.dtype;
        Ok(Handoff { config: self.config.clone(), queue, writes, converts, ended: false })
    }

    /// The queue of the session to a worker. A session that has ended is replaced. Its thread may still be telling the worker so, and
    /// counts as a connection until it is done.
    fn queue_to(&self, target: &Descriptor) -> Result<Arc<Queue>, TransferError> {
        let mut peers = lock(&self.peers);
        let Peers { all, begun } = &mut *peers;
        *begun += 1;
        all.retain(|_, peer| !peer.queue.is_closed() || !peer.thread.has_ended());
        let layout = target.layout.fingerprint();
        let changes =
            lock(&self.config.paths).get_mut(target.worker).is_some_and(|paths| paths.would_change(Instant::now()));
        if let Some(peer) = all.get_mut(&target.worker).filter(|peer| peer.goes_on(changes)) {
            peer.used = *begun;
            if peer.layout != layout {
                let (field, problem) = ("layout", format!("{} has a session with another one", target.worker));
                return Err(TransferError::Descriptor { field, problem });
            }
            return Ok(peer.queue.clone());
        }
        let limits = &self.config.options.limits;
        let others = all.keys().filter(|worker| **worker != target.worker).count();
        if others >= limits.connections {
            let (limit, asked) = (limits.connections as u64, others as u64 + 1);
            return Err(TransferError::Limit { what: "connections to decode workers", limit, asked });
        }
        // It stays in the table until the new session's thread runs: whoever comes next must wait for it (I3).
        let (before, waits_for) = all.get(&target.worker).map(|peer| (peer.queue.clone(), peer.thread.clone())).unzip();
        let worker = target.worker;
        let queue = Arc::new(Queue::new(limits.clone())?);
        let plan = Plan { config: self.config.clone(), target: target.clone() };
        let inner = queue.clone();
        let thread = threads::spawn(format!("kv-out-{worker}"), &self.config.options.cpus, move || {
            session::run(plan, waits_for, inner)
        })?;
        let thread = Arc::new(Thread::new(thread));
        all.insert(worker, Peer { layout, queue: queue.clone(), thread, before, used: *begun });
        // The next worker finds a place, unless all are in use.
        if all.len() >= limits.connections {
            peers.make_room(worker);
        }
        Ok(queue)
    }
}

/// Opens UCX if it is asked for, or if it is set up and the transport is chosen automatically. The inner error says why there is none.
fn open_ucx(options: &SenderOptions) -> Result<Result<Arc<UcxEngine>, String>, TransferError> {
    let open = || UcxEngine::open(&options.ucx, options.pool.clone()).map(Arc::new);
    match options.transport {
        TransportChoice::Ucx => open().map(Ok),
        TransportChoice::Auto if options.ucx != UcxSettings::default() => Ok(open().map_err(|error| error.to_string())),
        _ => Ok(Err("it is not set up: neither a library nor options are given".to_owned())),
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let peers = std::mem::take(&mut lock(&self.peers).all);
        peers.values().for_each(Peer::stop);
        peers.into_values().for_each(|peer| peer.thread.join());
    }
}

/// One handoff under way. Dropping it aborts it.
pub struct Handoff {
    config: Arc<SenderConfig>,
    queue: Arc<Queue>,
    writes: Writes,
    converts: bool,
    ended: bool,
}

impl Handoff {
    /// The reservation's epoch.
    pub fn epoch(&self) -> Epoch {
        self.writes.core().epoch
    }

    /// The decode worker.
    pub fn peer(&self) -> WorkerId {
        self.writes.core().peer
    }

    /// Tokens of the sequence whose KV the reservation wants.
    pub fn tokens(&self) -> u32 {
        self.writes.tokens()
    }

    /// Per group: index, in the sequence, of the block that index 0 of the reservation stands for. Blocks before it do
    /// not travel.
    pub fn first_blocks(&self) -> &[u32] {
        self.writes.first_blocks()
    }

    /// Blocks the reservation holds, per group.
    pub fn block_counts(&self) -> &[u32] {
        &self.writes.core().counts
    }

    /// Whether KV changes its type on the way.
    pub fn converts(&self) -> bool {
        self.converts
    }

    /// Tells which transport carries it, or will.
    pub fn carrier(&self) -> Carrier {
        Carrier(self.writes.core().clone())
    }

    /// Why it has failed, if it has. Worth asking before computing more for it.
    pub fn failure(&self) -> Option<TransferError> {
        self.queue.with(|line| self.writes.failure(line))
    }

    /// Queues one layer of some blocks, as pairs of (block of the local pool, index in the reservation's list of the group).
    ///
    /// - Every layer of every block must be written exactly once. So a block that two chunks fill is written after the second.
    /// - The KV must be stored by now. On a device it is enough that [`crate::DeviceMemory::mark`] covers it.
    /// - The local blocks must stay unchanged until the handoff's end is reported.
    /// - While the queue is full this waits, for [`crate::TransferLimits::room`] at most.
    /// - After an error, only [`Handoff::complete`] or [`Handoff::abort`] may follow.
    pub fn write(
        &mut self,
        group: usize,
        layer_in_group: usize,
        pairs: &[(BlockId, u32)],
    ) -> Result<(), TransferError> {
        let patience = Instant::now() + self.config.options.limits.room;
        for op in self.writes.write(group, layer_in_group, pairs, self.config.options.pool.mark())? {
            let blocks = op.blocks();
            self.queue.write(self.writes.core(), op, patience)?;
            self.writes.queued(blocks);
        }
        Ok(())
    }

    /// Says what blocks were verified with when they came into the local pool: if other bytes leave, it ends with [`TransferError::Changed`]. Of KV that
    /// changes its type on the way nothing can be said.
    pub fn knows(&self, known: Vec<Known>) {
        if !self.converts {
            self.writes.core().knows(known);
        }
    }

    /// Ends the handoff once everything is written. `on_done` is called exactly once: when the decode side has verified or refused, when
    /// the peer is lost, or at the deadline. From then on nothing reads the local blocks. `tail` travels along to
    /// [`crate::ReceiverEvent::Verified`].
    pub fn complete(mut self, tail: Vec<u8>, on_done: OnDone) {
        let done = Done::new(on_done);
        match self.queue.with(|line| self.writes.completable(line, &tail)) {
            Ok(()) => {
                self.ended = true;
                self.queue.complete(self.writes.core().epoch, tail, done);
            }
            Err(error) => {
                self.ended = true;
                let report = move || done.report(Err(error));
                self.queue.abort(self.writes.core().epoch, Quiet(Some(Box::new(report))));
            }
        }
    }

    /// Gives up. `on_quiet` is called once nothing reads the local blocks any more. A caller that need not know drops the handoff instead.
    pub fn abort(mut self, on_quiet: Box<dyn FnOnce() + Send>) {
        self.ended = true;
        self.queue.abort(self.writes.core().epoch, Quiet(Some(on_quiet)));
    }
}

impl Drop for Handoff {
    fn drop(&mut self) {
        if !self.ended {
            self.queue.abort(self.writes.core().epoch, Quiet(None));
        }
    }
}
