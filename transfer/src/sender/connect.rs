//! How the prefill end reaches a decode worker: shared memory when both are on one host, else TCP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use baton_types::{PoolGeometry, WorkerId};

use super::queue::Queue;
use crate::descriptor::Descriptor;
use crate::error::TransferError;
use crate::handshake::{Caller, Patience};
use crate::host::Host;
use crate::link::{Link, Socket};
use crate::options::{SenderOptions, TransportChoice};
use crate::segment::Segment;
use crate::transport::Transport;
use crate::wire::FrameLimits;
use crate::{shm, tcp};

/// Puts itself between a session and its transport, to make faults.
#[cfg(test)]
pub(crate) type Wrap = Arc<dyn Fn(Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync>;

/// What all sessions of a sender share.
pub(crate) struct Config {
    pub options: SenderOptions,
    pub host: Host,
    /// Set once mapping a peer's pool has failed here.
    pub shm_fails: AtomicBool,
    #[cfg(test)]
    pub wrap: Option<Wrap>,
}

/// Whom to reach and where.
pub(crate) struct Plan {
    pub config: Arc<Config>,
    pub target: Descriptor,
}

/// A session after its handshake.
pub(crate) struct Connected {
    pub link: Link,
    /// Shape of the peer's pool.
    pub remote: PoolGeometry,
}

impl Plan {
    pub(crate) fn me(&self) -> WorkerId {
        self.config.options.worker
    }

    pub(crate) fn peer(&self) -> WorkerId {
        self.target.worker
    }

    pub(crate) fn segment(&self) -> Arc<Segment> {
        self.config.options.segment.clone()
    }

    /// Sessions opened from now on use TCP if they may choose.
    pub(crate) fn avoid_shm(&self) {
        self.config.shm_fails.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn wrap(&self, transport: Box<dyn Transport>) -> Box<dyn Transport> {
        match &self.config.wrap {
            Some(wrap) => wrap(transport),
            None => transport,
        }
    }

    #[cfg(not(test))]
    pub(crate) fn wrap(&self, transport: Box<dyn Transport>) -> Box<dyn Transport> {
        transport
    }

    /// Connects and shakes hands.
    pub(crate) fn connect(&self, queue: &Queue) -> Result<Connected, TransferError> {
        let choice = self.config.options.transport;
        let near = self.config.host.same_as(&self.target.host);
        let until = Instant::now() + self.config.options.limits.handshake;
        if choice == TransportChoice::Shm || choice == TransportChoice::Auto && near && !self.shm_fails() {
            match self.connect_shm(queue, near, until) {
                Err(error) if choice == TransportChoice::Auto && may_fall_back(&error) => {
                    tracing::info!(peer = %self.peer(), %error, "no shared memory; using TCP");
                }
                other => return other,
            }
        }
        self.connect_tcp(queue, until)
    }

    fn shm_fails(&self) -> bool {
        self.config.shm_fails.load(Ordering::Relaxed)
    }

    fn connect_shm(&self, queue: &Queue, near: bool, until: Instant) -> Result<Connected, TransferError> {
        let address = format!("@{}", String::from_utf8_lossy(&self.target.unix));
        let caller = self.caller(&address);
        if !near {
            return Err(caller.cannot("it runs on another host or network; choose transport auto or tcp"));
        }
        let stream = shm::connect(&self.target.unix).map_err(|e| caller.cannot(e))?;
        self.greet(queue, &caller, Socket::Unix(stream), until)
    }

    fn connect_tcp(&self, queue: &Queue, until: Instant) -> Result<Connected, TransferError> {
        let (host, port) = (&self.target.address, self.target.port);
        let address = format!("{host}:{port}");
        let caller = self.caller(&address);
        let stream = tcp::connect(host, port, until).and_then(|stream| tcp::tune(&stream).map(|()| stream));
        self.greet(queue, &caller, Socket::Tcp(stream.map_err(|e| caller.cannot(e))?), until)
    }

    /// After a session over shared memory has ended without the peer's leave: tells the peer, by another session that ends
    /// at once, that its pool is not mapped here any more. Otherwise it would keep the blocks aside until this process
    /// ends or has something new for it (I3).
    pub(crate) fn excuse(&self, queue: &Queue) -> Result<(), TransferError> {
        let until = Instant::now() + self.config.options.limits.handshake;
        self.connect_shm(queue, true, until).map(drop)
    }

    fn caller<'a>(&self, address: &'a str) -> Caller<'a> {
        // Whatever this side's own pool looks like: what is written is of the target's layout.
        let fingerprint = self.target.layout.fingerprint();
        Caller { me: self.me(), you: self.peer(), fingerprint, address }
    }

    fn greet(
        &self,
        queue: &Queue,
        caller: &Caller,
        socket: Socket,
        until: Instant,
    ) -> Result<Connected, TransferError> {
        let layout = &self.target.layout;
        let limits = &self.config.options.limits;
        let mut link = Link::new(socket, self.segment(), FrameLimits::new(limits, layout.groups.len()));
        let patience = Patience { wake: &queue.wake, until, stopped: &|| queue.stopped() };
        let blocks = caller.greet(&mut link, &patience)?;
        if blocks.len() != layout.groups.len() {
            return Err(caller.cannot(format!("its pool has {} groups of blocks", blocks.len())));
        }
        let remote = PoolGeometry { layout: layout.clone(), blocks };
        if !is_addressable(&remote) {
            return Err(caller.cannot(format!("no pool can have {:?} blocks", remote.blocks)));
        }
        tracing::debug!(peer = %caller.you, transport = link.kind().as_str(), "transfer session begun");
        Ok(Connected { link, remote })
    }
}

/// Whether offsets into a peer's pool can be computed without overflow.
fn is_addressable(pool: &PoolGeometry) -> bool {
    let bytes =
        |(group, blocks): (usize, &u32)| pool.layout.block_bytes_all_layers(group) as u128 * u128::from(*blocks);
    isize::try_from(pool.blocks.iter().enumerate().map(bytes).sum::<u128>()).is_ok()
}

/// Layouts differ over every transport, and who stops here does not want another.
fn may_fall_back(error: &TransferError) -> bool {
    !matches!(error, TransferError::Layout(_) | TransferError::Closed)
}
