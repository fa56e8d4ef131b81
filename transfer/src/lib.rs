//! The handoff's data plane: moves KV blocks from a prefill worker's pool into a decode worker's, verified and fenced.
//!
//! - [`Receiver`] is the decode end. It lends blocks under an epoch and a lease, and reports when they are verified or safe to reuse.
//! - [`Sender`] is the prefill end. It opens a [`Handoff`] to a reservation and writes layers as they are computed.
//! - Each pair of workers has one session, over shared memory, TCP, UCX or CUDA IPC.
//!
//! The crate `baton-handoff` defines what frames mean and what each end may do. This crate has the sockets, threads, transports and
//! devices. It knows nothing of models, requests or the router. It has no async runtime, only its own threads and callbacks.

#[cfg(feature = "testing")]
pub mod conformance;
mod convert;
mod cpus;
mod cuda_ipc;
mod device;
mod handshake;
mod in_order;
mod link;
mod links;
mod load;
mod options;
mod receiver;
mod segment;
mod sender;
mod shm;
mod spread;
mod staging;
mod tcp;
mod threads;
mod tls;
mod transport;
mod ucx;
mod unix;
mod wake;

pub use baton_handoff::{
    FenceState, Known, OnDone, PathReport, Range, ReceiverEvent, ReceiverStats, TransferError, TransferLimits,
    TransferStats, TransportKind,
};
pub use convert::{Conversion, Converter};
pub use cpus::Cpus;
pub use device::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, OpenedBy, Pool, PoolHandle,
    Registrable, Staged,
};
pub use options::{
    MAX_TCP_CONNECTIONS, OnTrouble, ReceiverOptions, SenderOptions, TransportChoice, UcxOptions, UcxSettings,
};
pub use receiver::{OnEvent, Receiver, Wanted};
pub use segment::Segment;
pub use sender::{Carrier, Handoff, Sender};
pub use spread::SpreadMemory;
pub use tcp::tune;
pub use tls::Tls;
