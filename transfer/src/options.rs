//! Options of both ends. Values come from the nodes' configuration; nothing is read from outside.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use baton_handoff::{MAX_STREAMS, TransferError, TransferLimits, TransportKind};
use baton_types::{Courtesy, Expects, PoolGeometry, WorkerId};

use crate::convert::Converter;
use crate::cpus::Cpus;
use crate::device::Pool;
use crate::tls::Tls;

/// How to reach a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransportChoice {
    /// The best path that works:
    /// - on one host, GPU to GPU or shared memory, depending on where the pools are
    /// - else UCX, if it is set up, or TCP, whichever is measured to be faster
    ///
    /// While a path fails, the next one is used.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP.
    Tcp,
    /// UCX, or TCP to a worker that UCX cannot reach.
    Ucx,
    /// From GPU to GPU on one host only.
    CudaIpc,
}

baton_types::words!(TransportChoice { Auto = "auto", Shm = "shm", Tcp = "tcp", Ucx = "ucx", CudaIpc = "cuda-ipc" });

/// How UCX is found and set up, where it is used.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UcxSettings {
    /// Directory of libucp.so.0. None: where the dynamic linker looks.
    pub directory: Option<PathBuf>,
    /// Settings that override those in the environment, which UCX reads by itself.
    pub options: UcxOptions,
}

/// UCX settings, as pairs of name and value. Names are UCX's own, with or without the prefix UCX_. As text: NAME=VALUE, separated by
/// spaces.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UcxOptions(pub Vec<(String, String)>);

impl Expects for UcxOptions {
    const EXPECTS: &'static str = "settings as NAME=VALUE, separated by spaces";
}

impl FromStr for UcxOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<UcxOptions, String> {
        let pair = |item: &str| match item.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
            _ => Err(format!("{item:?} is not NAME=VALUE")),
        };
        text.split_whitespace().map(pair).collect::<Result<_, _>>().map(UcxOptions)
    }
}

impl fmt::Display for UcxOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&pairs.join(" "))
    }
}

/// Options of the decode end.
#[derive(Clone, Debug)]
pub struct ReceiverOptions {
    /// Id of this worker.
    pub worker: WorkerId,
    /// TCP address to listen on; port 0 takes any free one.
    pub tcp: SocketAddr,
    /// Host name or address peers should connect to; needed when `tcp` is unspecified (0.0.0.0), else its address.
    pub advertise: Option<String>,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub pool: Pool,
    /// UCX settings, for peers that use UCX.
    pub ucx: UcxSettings,
    /// TLS for peers that use TCP. None: no TLS.
    pub tls: Option<Tls>,
    /// Folder for the unix socket, which peers on this machine have too. None: a name that only processes of this network namespace reach.
    pub sockets: Option<PathBuf>,
    /// CPUs that its threads run on. If none are named and there are few, the two ends of a handoff have different ones.
    pub cpus: Cpus,
    /// When its threads give way to those that compute.
    pub courtesy: Courtesy,
    /// Bounds on memory and time (I5).
    pub limits: TransferLimits,
    /// Whether arriving blocks are compared with their digests (I2). Only a benchmark may set false.
    pub verify: bool,
}

/// Most connections that carry blocks to one worker.
pub const MAX_TCP_CONNECTIONS: usize = MAX_STREAMS;

/// Options of the prefill end.
#[derive(Clone, Debug)]
pub struct SenderOptions {
    /// Id of this worker.
    pub worker: WorkerId,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub pool: Pool,
    /// How to reach decode workers.
    pub transport: TransportChoice,
    /// UCX settings, for [`TransportChoice::Ucx`] and, unless they are the default, for [`TransportChoice::Auto`].
    pub ucx: UcxSettings,
    /// TLS for TCP. None: no TLS. With TLS, [`TransportChoice::Auto`] leaves out UCX, which encrypts nothing.
    pub tls: Option<Tls>,
    /// Connections that carry blocks to a worker over TCP: 1 to [`MAX_TCP_CONNECTIONS`]. One is fastest unless something limits a single
    /// connection. Several help where packet loss on a long path does, or the network's own limit for each connection.
    pub tcp_connections: usize,
    /// Folder where decode workers of this machine may have their unix sockets; see [`ReceiverOptions::sockets`].
    pub sockets: Option<PathBuf>,
    /// CPUs that its threads run on. If none are named and there are few, the two ends of a handoff have different ones.
    pub cpus: Cpus,
    /// When its threads give way to those that compute.
    pub courtesy: Courtesy,
    /// Bounds on memory and time (I5).
    pub limits: TransferLimits,
    /// Converts KV for decode pools of another type. None: both pools must have the same type.
    pub convert: Option<Converter>,
    /// Whether sent blocks are digested (I2). Only a benchmark may set false; see [`ReceiverOptions::verify`].
    pub verify: bool,
    /// Called on a transfer thread when a path to a decode worker fails. Must not block. The path failed in one of these ways:
    /// - It could not be set up, or broke with handoffs under way. Another path is tried then.
    /// - It changed bytes of a handoff or a frame.
    pub on_trouble: OnTrouble,
}

/// See [`SenderOptions::on_trouble`]. Meant for counting: a call says nothing about the outcome of a handoff.
pub type OnTrouble = fn(TransportKind, &TransferError);

/// Checks that a pool's geometry fits its memory. Must pass before any of the pool's offsets is used.
pub(crate) fn check_pool(geometry: &PoolGeometry, pool: &Pool) -> Result<(), TransferError> {
    if geometry.blocks.len() != geometry.layout.groups.len() || geometry.blocks.is_empty() {
        let problem =
            format!("{} block counts for {} layer groups", geometry.blocks.len(), geometry.layout.groups.len());
        return Err(TransferError::argument("geometry.blocks", problem));
    }
    if geometry.bytes() > pool.bytes() {
        let problem = format!("{} bytes, but its geometry needs {}", pool.bytes(), geometry.bytes());
        return Err(TransferError::argument("pool", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_options_are_pairs() {
        let options: UcxOptions = " TLS=tcp,cma  UCX_NET_DEVICES=eth0 EMPTY= A=b=c".parse().unwrap();
        let pairs = [("TLS", "tcp,cma"), ("UCX_NET_DEVICES", "eth0"), ("EMPTY", ""), ("A", "b=c")];
        assert_eq!(options, UcxOptions(pairs.map(|(name, value)| (name.into(), value.into())).into()));
        assert_eq!(options.to_string().parse(), Ok(options));
        for bad in ["TLS", "=tcp", "TLS=tcp NET DEVICES=eth0"] {
            assert!(bad.parse::<UcxOptions>().unwrap_err().contains("is not NAME=VALUE"), "{bad}");
        }
    }
}
