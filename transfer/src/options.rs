//! What the two ends are told when they start. Values come from the nodes' configuration; nothing is read from outside.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use baton_handoff::{MAX_STREAMS, TransferError, TransferLimits, TransportKind};
use baton_types::{Expects, PoolGeometry, WorkerId};

use crate::convert::Converter;
use crate::cpus::Cpus;
use crate::device::Pool;
use crate::tls::Tls;

/// How to reach a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransportChoice {
    /// On one host from GPU to GPU or through shared memory, wherever the pools are; else UCX, where it is set up, or TCP, whichever is
    /// measured to be faster; while one of them fails, the next.
    #[default]
    Auto,
    /// Shared memory or nothing.
    Shm,
    /// TCP.
    Tcp,
    /// UCX; to a worker that cannot be reached by it, TCP.
    Ucx,
    /// From GPU to GPU on one host, or nothing.
    CudaIpc,
}

baton_types::words!(TransportChoice { Auto = "auto", Shm = "shm", Tcp = "tcp", Ucx = "ucx", CudaIpc = "cuda-ipc" });

/// How UCX is found and set up, where it is used.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UcxSettings {
    /// Where libucp.so.0 is; default: where the dynamic linker looks.
    pub directory: Option<PathBuf>,
    /// They go before those in the environment, which UCX reads by itself.
    pub options: UcxOptions,
}

/// Settings of UCX by its own names, with or without the prefix UCX_, and their values. As text: NAME=VALUE, separated
/// by spaces.
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

/// The decode end.
#[derive(Clone, Debug)]
pub struct ReceiverOptions {
    /// This worker.
    pub worker: WorkerId,
    /// Where to listen; port 0 takes any free one.
    pub tcp: SocketAddr,
    /// Host name or address peers should connect to; needed when `tcp` is unspecified (0.0.0.0), else its address.
    pub advertise: Option<String>,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub pool: Pool,
    /// For peers that come over UCX.
    pub ucx: UcxSettings,
    /// For peers that come over TCP; None: no TLS.
    pub tls: Option<Tls>,
    /// Where its threads run.
    pub cpus: Cpus,
    /// Bounds.
    pub limits: TransferLimits,
    /// Whether what arrives is compared with its digests (I2). Only a benchmark may say no.
    pub verify: bool,
}

/// The most connections that blocks go over to one worker.
pub const MAX_TCP_CONNECTIONS: usize = MAX_STREAMS;

/// The prefill end.
#[derive(Clone, Debug)]
pub struct SenderOptions {
    /// This worker.
    pub worker: WorkerId,
    /// Shape of the pool.
    pub geometry: PoolGeometry,
    /// The pool.
    pub pool: Pool,
    /// How to reach decode workers.
    pub transport: TransportChoice,
    /// For [`TransportChoice::Ucx`].
    pub ucx: UcxSettings,
    /// For TCP; None: no TLS. With it [`TransportChoice::Auto`] leaves out UCX, which encrypts nothing.
    pub tls: Option<Tls>,
    /// Connections that blocks go over to a worker that is reached over TCP: 1 to [`MAX_TCP_CONNECTIONS`]. One is fastest where nothing
    /// limits a single one; several help where loss on a long way, or the network's own bound for each, does.
    pub tcp_connections: usize,
    /// Where its threads run.
    pub cpus: Cpus,
    /// Bounds.
    pub limits: TransferLimits,
    /// Writes KV in the type of decode pools that have another; None: both sides must have the same.
    pub convert: Option<Converter>,
    /// Whether what leaves is digested (I2). Only a benchmark may say no; see [`ReceiverOptions::verify`].
    pub verify: bool,
    /// Called, on a transfer thread, when a path to a decode worker could not be set up or broke with handoffs under way, so
    /// that another is tried, and when it changed bytes of a handoff or a frame. Must not block.
    pub on_trouble: OnTrouble,
}

/// See [`SenderOptions::on_trouble`]. For counting: what it is told says nothing of a handoff.
pub type OnTrouble = fn(TransportKind, &TransferError);

/// A pool's geometry must fit its memory before any of its offsets is used.
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
