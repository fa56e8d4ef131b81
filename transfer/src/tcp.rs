//! Blocks over TCP: each Write frame goes over one of the session's connections. Also sets up the sockets of both ends.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use baton_handoff::{TCP_BATCHES, TransferError, TransportKind};
use baton_types::Epoch;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::cpus::Cpus;
use crate::links::Links;
use crate::load::Load;
use crate::threads;
use crate::transport::{Progress, Transport};

/// A batch on its way. It has left once connection `stream` has sent `end` bytes in total.
struct Sending {
    epoch: Epoch,
    stream: usize,
    end: u64,
}

/// The sending half. Each batch is a frame, then the blocks straight from the pool, over the connection with the least to send.
pub(crate) struct Tcp {
    depth: usize,
    under_way: VecDeque<Sending>,
}

impl Tcp {
    /// Over this many connections.
    pub(crate) fn new(connections: usize) -> Tcp {
        Tcp { depth: TCP_BATCHES * connections, under_way: VecDeque::new() }
    }
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, mut load: Load, links: &mut Links) -> Result<(), TransferError> {
        let staged = load.take_staged();
        let batch = &load.batch;
        let payload = u32::try_from(batch.bytes()).map_err(|_| TransferError::argument("payload", "4 GiB or more"))?;
        let (epoch, stream) = (batch.epoch, links.lightest());
        let link = links.write(stream, batch.head(payload));
        match staged {
            Some(bytes) => link.push_staged(bytes, epoch),
            None => batch.runs().for_each(|run| link.push_pool((run.source, run.len), epoch)),
        }
        self.under_way.push_back(Sending { epoch, stream, end: link.end() });
        Ok(())
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        let Some(oldest) = self.under_way.front() else { return Ok(Progress::Flushed) };
        if links.stream(oldest.stream).left() < oldest.end {
            return Ok(Progress::Blocked);
        }
        // A stream keeps order, so whatever is queued behind the payload arrives behind it.
        self.under_way.pop_front();
        Ok(Progress::Flushed)
    }

    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError> {
        // The announced length must still be sent. The peer writes the zeros to blocks it will not verify, or drops them.
        links.forget_pool(epoch);
        self.under_way.retain(|sending| sending.epoch != epoch);
        Ok(())
    }
}

/// Listens on `address`.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, TransferError> {
    let cause = |e: std::io::Error| TransferError::Argument { field: "tcp", problem: format!("{address}: {e}") };
    let listener = TcpListener::bind(address).map_err(cause)?;
    listener.set_nonblocking(true).map_err(cause)?;
    Ok(listener)
}

/// Resolves a host name, or fails at `until`. The system's own look-up has no time limit, so it runs on a thread of its own.
fn resolve(host: &str, port: u16, until: Instant) -> Result<Vec<SocketAddr>, std::io::Error> {
    // A receiver advertises an IPv6 address in brackets, because a port follows.
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let (tell, told) = mpsc::sync_channel(1);
    let name = host.to_owned();
    let look = move || drop(tell.send((name.as_str(), port).to_socket_addrs().map(Vec::from_iter)));
    threads::spawn("kv-name".to_owned(), &Cpus::default(), look).map_err(std::io::Error::other)?;
    let late = |_| std::io::Error::new(ErrorKind::TimedOut, "its name was not resolved in time");
    told.recv_timeout(until.saturating_duration_since(Instant::now())).map_err(late)?
}

/// Connects to the first address of `host` that answers by `until`.
pub(crate) fn connect(host: &str, port: u16, until: Instant) -> Result<TcpStream, std::io::Error> {
    let mut last = std::io::Error::other("the name stands for no address");
    let addresses = resolve(host, port, until)?;
    for (tried, address) in addresses.iter().enumerate() {
        // An address that does not answer leaves the others their share of the time.
        let share = until.saturating_duration_since(Instant::now()) / (addresses.len() - tried) as u32;
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Starts to connect. The socket is connected once it is writable. If connecting fails, the first use of the socket says why.
pub(crate) fn begin(address: SocketAddr) -> Result<TcpStream, std::io::Error> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = TcpStream::from(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?);
    tune(&stream)?;
    match rustix::net::connect(&stream, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(stream),
        Err(error) => Err(error.into()),
    }
}

/// Sets the socket options of a connection for handoffs, the same at both ends, and makes it non-blocking. Buffer sizes are left to the
/// kernel, which grows them as needed: fixed ones of 4 MiB measured no faster, and most systems cap fixed ones below that.
pub fn tune(stream: &TcpStream) -> Result<(), std::io::Error> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // A peer whose host vanished is noticed after 5 s of silence, or 10 s with bytes under way.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, 10_000)?;
    // Bulk transfer inside a data centre: pacing by bandwidth estimates (bbr) halves the rate on short paths.
    if let Err(error) = sockopt::set_tcp_congestion(stream, "cubic") {
        tracing::debug!(%error, "the system's default congestion control stays");
    }
    Ok(())
}
