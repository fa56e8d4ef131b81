//! The handoff's data plane: moves KV blocks from a prefill worker's pool into a decode worker's, verified and fenced.
//!
//! [`Receiver`] is the decode end: it lends blocks under an epoch and a lease, and says when they are verified or safe
//! to reuse. [`Sender`] is the prefill end: it opens a [`Handoff`] to a reservation and writes layers as they are
//! computed. Between them a session per pair of workers, over shared memory, TCP or UCX. Knows nothing of models, requests
//! and the router; no async runtime, only its own threads and callbacks.

mod batch;
pub mod bench;
mod codec;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod convert;
mod cpus;
mod cuda_ipc;
mod descriptor;
mod device;
mod error;
mod greeting;
mod handshake;
mod host;
mod in_order;
mod limits;
mod link;
mod links;
mod load;
mod memory;
mod options;
pub mod protocol;
mod pulse;
mod receiver;
mod segment;
mod sender;
mod shm;
mod spread;
mod staging;
pub mod state;
mod tcp;
mod this_host;
mod threads;
mod tls;
mod transport;
mod ucx;
mod wake;
mod wire;
mod written;

pub use convert::{Conversion, Converter};
pub use cpus::Cpus;
pub use device::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, Pool, Reach, Registrable, Staged,
};
pub use error::TransferError;
pub use limits::{Limits, TransportKind};
pub use options::{
    MAX_TCP_CONNECTIONS, OnTrouble, ReceiverOptions, SenderOptions, TransportChoice, UcxOptions, UcxSettings,
};
pub use receiver::{FenceState, OnEvent, Receiver, ReceiverEvent, ReceiverStats, Wanted};
pub use segment::Segment;
pub use sender::{Carrier, Handoff, OnDone, PathReport, Sender, TransferStats};
pub use spread::SpreadMemory;
pub use tls::{Tls, TlsFiles};
