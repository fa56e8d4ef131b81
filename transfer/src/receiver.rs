//! The decode end: lends blocks under an epoch and a lease, has a prefill worker fill them, verifies them, and knows when nobody can
//! write to them any more.
//!
//! Threads: one that accepts connections and watches leases, and one per connected prefill worker. Knows nothing of sequences: the
//! caller chooses which blocks are lent, and its pool keeps them aside until an event gives them back.

mod arrival;
mod hub;
mod reception;
mod session;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_handoff::{Descriptor, FenceState, Host, ReceiverEvent, ReceiverStats, TransferError};
use baton_types::{BlockId, Epoch, random_u64};

use crate::cpus::End;
use crate::options::{ReceiverOptions, check_pool};
use crate::unix::{PREFIX, this_folder, this_namespace};
use crate::{tcp, threads, unix};
use hub::Hub;
use reception::Doors;

/// What a reservation holds: a sequence's KV blocks from `first` on, as far as the next token sees them. Earlier blocks are here
/// already.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Per group: index, in the sequence, of the first block that travels.
    pub first: &'a [u32],
    /// Per group: the blocks that are lent, in token order.
    pub blocks: &'a [Vec<BlockId>],
}

/// Called with every event, on transfer threads, in order, one at a time. Must not block; may call the receiver.
pub type OnEvent = Box<dyn Fn(ReceiverEvent) + Send + Sync>;

/// The decode end. Dropping it closes all connections; reservations still open are never verified.
pub struct Receiver {
    hub: Arc<Hub>,
    address: SocketAddr,
    advertised: String,
    /// Name of the unix socket.
    name: String,
    host: Host,
    reception: Option<JoinHandle<()>>,
}

impl Receiver {
    /// Listens for prefill workers on TCP and on a unix socket.
    pub fn bind(options: ReceiverOptions, on_event: OnEvent) -> Result<Receiver, TransferError> {
        check_pool(&options.geometry, &options.pool)?;
        let options = ReceiverOptions { cpus: options.cpus.of(End::Receiver)?, ..options };
        let tcp = tcp::listen(options.tcp)?;
        let address = tcp.local_addr().map_err(|e| TransferError::os("read the listening address", e))?;
        let advertised = advertised(&options, address)?;
        let name = format!("{PREFIX}{:x}-{:016x}", options.worker.0, random_u64());
        let folder = options.sockets.as_deref();
        let host = folder.map_or_else(|| Ok(this_namespace()), this_folder)?;
        let doors = Doors { tcp, unix: unix::listen(&name, folder)? };
        let cpus = options.cpus.clone();
        let hub = Arc::new(Hub::new(options, on_event)?);
        let desk = hub.clone();
        let reception = Some(threads::spawn("kv-accept".into(), &cpus, move || reception::run(desk, doors))?);
        Ok(Receiver { hub, address, advertised, name, host, reception })
    }

    /// The TCP address bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Lends the blocks of `wanted`, for `lease`, to whoever presents the descriptor returned here. Blocks that belong to an epoch that
    /// has not ended are refused (I3).
    pub fn reserve(&self, epoch: Epoch, wanted: &Wanted<'_>, lease: Duration) -> Result<Vec<u8>, TransferError> {
        let Wanted { tokens, first, blocks } = *wanted;
        if first.len() != blocks.len() {
            let problem = format!("{} groups, there are blocks for {}", first.len(), blocks.len());
            return Err(TransferError::argument("wanted.first", problem));
        }
        let key = random_u64();
        let expires = Instant::now().checked_add(lease);
        let expires = expires.ok_or_else(|| TransferError::argument("lease", format!("{lease:?} is too long")))?;
        self.hub.with(|ledger| ledger.reserve(epoch, key, blocks, expires))?;
        let descriptor = Descriptor {
            worker: self.hub.options.worker,
            epoch,
            key,
            tokens,
            first: first.to_vec(),
            counts: blocks.iter().map(|list| list.len() as u32).collect(),
            layout: self.hub.options.geometry.layout.clone(),
            device: self.hub.options.pool.is_device(),
            host: self.host,
            unix: self.name.clone().into_bytes(),
            address: self.advertised.clone(),
            port: self.address.port(),
        };
        Ok(descriptor.encode())
    }

    /// Ends the lease after `Verified`. The peer has nothing in flight: its completion followed all its writes.
    pub fn release(&self, epoch: Epoch) {
        self.hub.with(|ledger| ledger.release(epoch));
    }

    /// Takes the reservation back, whatever its state. No new peer is let in, and a peer that was let in is stopped.
    pub fn fence(&self, epoch: Epoch) -> FenceState {
        self.hub.with(|ledger| ledger.fence(epoch))
    }

    /// Opens UCX and registers the pool now, instead of at the first peer that uses UCX. So a missing library shows early, and no peer
    /// waits while a network card pins a large pool.
    pub fn prepare_ucx(&self) -> Result<(), TransferError> {
        self.hub.ucx().map(drop)
    }

    /// Counts for metrics.
    pub fn stats(&self) -> ReceiverStats {
        self.hub.stats()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.hub.stop();
        self.reception.take().into_iter().for_each(threads::join);
    }
}

/// The host part of the address that peers connect to.
fn advertised(options: &ReceiverOptions, bound: SocketAddr) -> Result<String, TransferError> {
    match &options.advertise {
        Some(host) if host.is_empty() || host.len() > 255 => {
            Err(TransferError::argument("advertise", format!("{} bytes; a host name has 1 to 255", host.len())))
        }
        Some(host) => Ok(host.clone()),
        None if bound.ip().is_unspecified() => {
            let problem = format!("missing; peers cannot connect to {}, so name an address of this host", bound.ip());
            Err(TransferError::argument("advertise", problem))
        }
        // Brackets, because a port follows.
        None if bound.is_ipv6() => Ok(format!("[{}]", bound.ip())),
        None => Ok(bound.ip().to_string()),
    }
}
