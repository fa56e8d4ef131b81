//! The handoff's protocol: both ends as state machines, and the bytes between them.
//!
//! The decode end lends blocks ([`Ledger`]), knows its sessions ([`Members`]), and takes in what each session's peer says and writes
//! ([`Inbound`]). The prefill end checks what a handoff's owner writes ([`Writes`]), keeps what is asked of a session in order ([`Line`]),
//! and makes frames and batches of it ([`Outbound`]). Both step one table ([`state`]).
//!
//! Pure: no clock, no I/O, no threads; time is an argument. Pools are reached by one trait, [`PoolMemory`]. Knows nothing of sockets,
//! transports and devices: `baton-transfer` drives this with real ones, simulations and fuzz targets as they like.

#![forbid(unsafe_code)]
// Tests have a clock.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod batch;
mod codec;
mod descriptor;
mod error;
mod greeting;
mod host;
mod inbound;
mod limits;
mod memory;
mod outbound;
mod pulse;
pub mod state;
#[cfg(feature = "testing")]
pub mod testing;
mod wire;
mod written;

pub use batch::{BATCH_BYTES, BlockRun, BlockWrite, Range, TCP_BATCHES, WriteBatch};
pub use codec::Malformed;
pub use descriptor::{Descriptor, encode_layout, fingerprint_mismatch, parse_layout};
pub use error::TransferError;
pub use greeting::visitor;
pub use host::Host;
pub use inbound::{
    FenceState, Inbound, Ledger, Members, Payload, PayloadTarget, ReceiverEvent, ReceiverStats, SessionId,
};
pub use limits::{TransferLimits, TransportKind};
pub use memory::PoolMemory;
pub use outbound::{
    Core, Done, Effect, Line, OnDone, Op, Outbound, Parties, PathReport, Paths, Pools, Quiet, TransferStats, Writes,
};
pub use wire::{
    Access, Frame, FrameHead, FrameLimits, Hello, JoinTicket, MAX_STREAMS, Over, PREFIX, Refusal, WriteHead,
    parse_body, parse_prefix,
};
pub use written::Written;
