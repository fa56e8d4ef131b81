//! Connects the prefill end to a decode worker: tries its paths, best first, until one works.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_handoff::{
    Connecting, Descriptor, FrameLimits, Host, JoinTicket, Meter, Over, PathTable, Paths, TransferError, TransferStats,
    TransportKind, join_until,
};
use baton_types::{KvDtype, PoolGeometry, WorkerId};
use rustix::io::Errno;

use crate::device::Pool;
use crate::handshake::{Caller, HandshakeEnd, Welcome};
use crate::link::{Link, Socket};
use crate::links::Links;
use crate::options::{SenderOptions, TransportChoice};
use crate::threads::lock;
use crate::tls::Tls;
use crate::transport::Transport;
use crate::ucx::UcxEngine;
use crate::wake::Wake;
use crate::{tcp, unix};

/// Wraps a session's transport, to inject faults.
#[cfg(feature = "testing")]
pub(crate) type Wrap = Arc<dyn Fn(Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync>;

/// What all sessions of a sender share.
pub(crate) struct SenderConfig {
    pub options: SenderOptions,
    /// Where unix sockets are found: in this network namespace, and in the folder of the options.
    pub namespace: Host,
    pub folder: Option<Host>,
    /// The pool as UCX knows it, or why there is no UCX.
    pub ucx: Result<Arc<UcxEngine>, String>,
    /// What is known of the paths to each decode worker.
    pub paths: Mutex<PathTable>,
    #[cfg(feature = "testing")]
    pub wrap: Option<Wrap>,
}

/// Which worker to reach, and with which settings.
pub(crate) struct Plan {
    pub config: Arc<SenderConfig>,
    pub target: Descriptor,
}

/// What ends connecting early.
#[derive(Clone, Copy)]
pub(crate) struct Interrupt<'a> {
    /// Rings when `stopped` may have become true.
    pub wake: &'a Wake,
    pub stopped: &'a dyn Fn() -> bool,
}

/// A session after its handshake.
pub(crate) struct Connected {
    pub links: Links,
    /// What blocks travel over.
    pub kind: TransportKind,
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

    pub(crate) fn pool(&self) -> &Pool {
        &self.config.options.pool
    }

    /// Reads or updates what is known of the paths to the peer.
    pub(crate) fn paths<T>(&self, act: impl FnOnce(&mut Paths) -> T) -> T {
        let mut all = lock(&self.config.paths);
        act(all.to(self.peer(), self.config.options.limits.connections, || self.new_paths()))
    }

    fn new_paths(&self) -> Paths {
        use TransportKind::{CudaIpc, Shm, Tcp, Ucx};
        let (here, there) = (self.pool().is_device(), self.target.device);
        let barred =
            |reasons: &[(bool, &str)]| reasons.iter().find(|(bars, _)| *bars).map(|(_, why)| (*why).to_owned());
        let elsewhere = (
            !self.near(),
            "it runs on another host or network namespace, and shares no folder of sockets (--transfer-sockets); choose transport auto or tcp",
        );
        let mapped =
            (there, "its pool is in a GPU's memory, which cannot be mapped; choose transport auto, cuda-ipc or tcp");
        let ours = (!here, "this worker's pool is not in a GPU's memory; choose another transport");
        let theirs = (!there, "its pool is not in a GPU's memory; choose another transport");
        let spread =
            (self.pool().is_spread(), "this worker's pool is spread over several GPUs; choose transport auto or tcp");
        let types =
            (self.pool_type() != self.target.layout.dtype, "its KV has another type, and is converted in host memory");
        let cuda_ipc = (CudaIpc, barred(&[ours, spread, theirs, elsewhere, types]));
        let shm = (Shm, barred(&[elsewhere, mapped]));
        let ucx = (Ucx, self.config.ucx.as_ref().err().cloned());
        let plain = || "it encrypts nothing, and TLS is set up; choose transport ucx to use it all the same".to_owned();
        let private = (Ucx, ucx.1.clone().or_else(|| self.config.options.tls.is_some().then(plain)));
        match self.config.options.transport {
            // Between workers without a GPU, listing CUDA IPC would only be noise.
            TransportChoice::Auto if !here && !there => Paths::new([shm, private, (Tcp, None)], true),
            TransportChoice::Auto => Paths::new([cuda_ipc, shm, private, (Tcp, None)], true),
            TransportChoice::CudaIpc => Paths::new([cuda_ipc], false),
            TransportChoice::Shm => Paths::new([shm], false),
            TransportChoice::Tcp => Paths::new([(Tcp, None)], false),
            TransportChoice::Ucx => Paths::new([ucx, (Tcp, None)], false),
        }
    }

    fn pool_type(&self) -> KvDtype {
        self.config.options.geometry.layout.dtype
    }

    fn near(&self) -> bool {
        let config = &self.config;
        config.namespace.same_as(&self.target.host) || self.folder().is_some()
    }

    /// The folder that the target's socket is in; None: it has an abstract name.
    fn folder(&self) -> Option<&Path> {
        let same = self.config.folder.is_some_and(|folder| folder.same_as(&self.target.host));
        self.config.options.sockets.as_deref().filter(|_| same)
    }

    /// Calls the target's unix socket.
    pub(super) fn call_unix(&self) -> Result<UnixStream, Errno> {
        unix::connect(&self.target.unix, self.folder())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn wrap(&self, transport: Box<dyn Transport>) -> Box<dyn Transport> {
        match &self.config.wrap {
            Some(wrap) => wrap(transport),
            None => transport,
        }
    }

    #[cfg(not(feature = "testing"))]
    pub(crate) fn wrap(&self, transport: Box<dyn Transport>) -> Box<dyn Transport> {
        transport
    }

    /// Connects and shakes hands.
    pub(crate) fn connect(&self, interrupt: Interrupt<'_>) -> Result<Connected, TransferError> {
        let handshake = self.config.options.limits.handshake;
        let mut connecting = self.paths(|paths| Connecting::new(paths, handshake, Instant::now()));
        while let Some((kind, until)) = connecting.next_path(Instant::now()) {
            let connected = match kind {
                TransportKind::Shm => self.connect_unix(interrupt, Over::Stream, until),
                TransportKind::CudaIpc => self.connect_unix(interrupt, Over::CudaIpc, until),
                TransportKind::Ucx => self.connect_ucx(interrupt, until),
                TransportKind::Tcp => self.connect_tcp(interrupt, Over::Stream, until),
            };
            match connected {
                Ok(connected) => {
                    self.paths(|paths| paths.begun(kind, connected.links.count()));
                    return Ok(connected);
                }
                Err(error) => {
                    connecting.failed(error.clone())?;
                    tracing::info!(peer = %self.peer(), transport = kind.as_str(), %error, "no session over this path");
                    self.failed(kind, &error);
                }
            }
        }
        let barred = || self.paths(|paths| paths.barred().unwrap_or("there is no path").to_owned());
        Err(connecting.failure().unwrap_or_else(|| self.caller(&self.unix_address(), Over::Stream).cannot(barred())))
    }

    /// Notes that a path could not be set up, broke with handoffs under way, or changed bytes.
    pub(crate) fn failed(&self, kind: TransportKind, error: &TransferError) {
        self.paths(|paths| paths.blamed(kind, error, Instant::now()));
        (self.config.options.on_trouble)(kind, error);
    }

    /// Notes that a handoff over a path has ended.
    pub(crate) fn ended(&self, kind: TransportKind, outcome: &Result<TransferStats, TransferError>, meter: &mut Meter) {
        self.paths(|paths| paths.ended(kind, outcome, meter, Instant::now()));
        if let Err(error @ TransferError::Verify { .. }) = outcome {
            (self.config.options.on_trouble)(kind, error);
        }
    }

    /// Connects over the unix socket if there is one, so that the peer can tell when this process has ended.
    fn connect_ucx(&self, interrupt: Interrupt<'_>, until: Instant) -> Result<Connected, TransferError> {
        if self.near() {
            match self.connect_unix(interrupt, Over::Ucx, until) {
                Err(error) if error.is_of_path() => tracing::debug!(%error, "no unix socket for UCX's frames"),
                other => return other,
            }
        }
        self.connect_tcp(interrupt, Over::Ucx, until)
    }

    pub(super) fn unix_address(&self) -> String {
        let name = String::from_utf8_lossy(&self.target.unix);
        self.folder().map_or_else(|| format!("@{name}"), |folder| format!("{}/{name}", folder.display()))
    }

    fn connect_unix(&self, interrupt: Interrupt<'_>, over: Over, until: Instant) -> Result<Connected, TransferError> {
        let address = self.unix_address();
        let caller = self.caller(&address, over);
        let stream = self.call_unix().map_err(|e| caller.cannot(e))?;
        self.greet(interrupt, &caller, Socket::Unix(stream), until)
    }

    fn connect_tcp(&self, interrupt: Interrupt<'_>, over: Over, until: Instant) -> Result<Connected, TransferError> {
        let (host, port) = (&self.target.address, self.target.port);
        let address = format!("{host}:{port}");
        let caller = self.caller(&address, over);
        let stream = || {
            let stream = tcp::connect(host, port, until).and_then(|stream| tcp::tune(&stream).map(|()| stream));
            stream.map_err(|e| caller.cannot(e))
        };
        let Some(tls) = &self.config.options.tls else {
            return self.greet(interrupt, &caller, Socket::Tcp(stream()?), until);
        };
        let socket = self.with_tls(tls, stream()?).map_err(|e| caller.cannot(e))?;
        let greeted = self.greet(interrupt, &caller, socket, until);
        match greeted {
            // It may have no TLS yet.
            Err(_) if tls.is_permissive() && Instant::now() < until => {
                self.greet(interrupt, &caller, Socket::Tcp(stream()?), until)
            }
            greeted => greeted,
        }
    }

    fn with_tls(&self, tls: &Tls, stream: TcpStream) -> Result<Socket, std::io::Error> {
        Ok(Socket::Tls(Box::new(tls.connect(stream, &self.target.address)?)))
    }

    pub(super) fn caller<'a>(&self, address: &'a str, over: Over) -> Caller<'a> {
        // The target's layout, not this pool's: blocks are written in the target's layout.
        let fingerprint = self.target.layout.fingerprint();
        Caller { me: self.me(), you: self.peer(), fingerprint, over, address }
    }

    pub(super) fn greet(
        &self,
        interrupt: Interrupt<'_>,
        caller: &Caller,
        socket: Socket,
        until: Instant,
    ) -> Result<Connected, TransferError> {
        let layout = &self.target.layout;
        let mut link = self.link(socket);
        let end = HandshakeEnd { wake: interrupt.wake, until, stopped: interrupt.stopped };
        let Welcome { blocks, ticket } = caller.greet(&mut link, &end)?;
        if blocks.len() != layout.groups.len() {
            return Err(caller.cannot(format!("its pool has {} groups of blocks", blocks.len())));
        }
        let remote = PoolGeometry { layout: layout.clone(), blocks };
        if !is_addressable(&remote) {
            return Err(caller.cannot(format!("no pool can have {:?} blocks", remote.blocks)));
        }
        let kind = TransportKind::of(link.is_unix(), caller.over);
        let more = ticket.filter(|_| kind == TransportKind::Tcp);
        let joined = more.map(|ticket| self.join(caller, &link, ticket, &end)).unwrap_or_default();
        let links = Links::new(link, joined);
        let connections = links.count();
        tracing::debug!(peer = %caller.you, transport = kind.as_str(), connections, "transfer session begun");
        Ok(Connected { links, kind, remote })
    }

    fn link(&self, socket: Socket) -> Link {
        let limits = FrameLimits::new(&self.config.options.limits, self.target.layout.groups.len());
        Link::new(socket, self.pool().clone(), limits)
    }

    /// Opens the further connections of a session, all at once, so that together they take two round trips.
    fn join(&self, caller: &Caller, own: &Link, ticket: JoinTicket, end: &HandshakeEnd) -> Vec<(u8, Link)> {
        let numbers = 1..self.config.options.tcp_connections as u8;
        let asked: Vec<_> = numbers.map(|number| (number, self.ask_to_join(caller, own, ticket, number))).collect();
        let end = HandshakeEnd { until: join_until(end.until, Instant::now()), ..*end };
        let mut joined = Vec::new();
        for (number, link) in asked {
            let link = link.and_then(|mut link| caller.joined(&mut link, &end).map(|()| link));
            match link {
                Ok(link) => joined.push((number, link)),
                Err(error) => tracing::info!(peer = %caller.you, number, %error, "a session has a connection less"),
            }
        }
        joined
    }

    fn ask_to_join(&self, caller: &Caller, own: &Link, ticket: JoinTicket, number: u8) -> Result<Link, TransferError> {
        // The address that the session's own connection reached: a name may stand for several hosts.
        let address = own.peer_address().ok_or_else(|| caller.cannot("it is gone"))?;
        // As the session's own connection, which may have no TLS although this worker has.
        let socket = tcp::begin(address).and_then(|stream| match &self.config.options.tls {
            Some(tls) if own.has_tls() => self.with_tls(tls, stream),
            _ => Ok(Socket::Tcp(stream)),
        });
        let socket = socket.map_err(|e| caller.cannot(e))?;
        let mut link = self.link(socket);
        caller.ask_to_join(&mut link, ticket, number);
        link.flush().map_err(|e| caller.cannot(e))?;
        Ok(link)
    }
}

/// Whether offsets into a peer's pool can be computed without overflow.
fn is_addressable(pool: &PoolGeometry) -> bool {
    let bytes =
        |(group, blocks): (usize, &u32)| pool.layout.block_bytes_all_layers(group) as u128 * u128::from(*blocks);
    isize::try_from(pool.blocks.iter().enumerate().map(bytes).sum::<u128>()).is_ok()
}
