//! The handoff protocol: both ends as state machines, and the bytes between them.
//!
//! - The decode end lends blocks ([`Ledger`]), tracks its sessions ([`Members`]), and handles the frames and payload of each ([`Inbound`]).
//! - The prefill end checks what a handoff's owner writes ([`Writes`]), queues the requests to each session ([`Line`]), and turns them into
//!   frames and batches ([`Outbound`]). A session begins over one of the [`Paths`] ([`Connecting`]), is replaced ([`Line::goes_on`]), and ends
//!   ([`blames_path`], [`tells_peer`]).
//! - Both ends step the same transition table ([`state`]).
//!
//! Pure: no clock, no I/O, no threads; time is an argument. Pools are reached through one trait, [`PoolMemory`]. The crate knows nothing of
//! sockets, transports or devices: `baton-transfer` drives it with real ones, simulations and fuzz targets with their own.

#![forbid(unsafe_code)]
// Tests may read the clock.
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
    FenceState, Inbound, Ledger, Members, Payload, PayloadTarget, PeerReach, ReceiverEvent, ReceiverStats, SessionId,
};
pub use limits::{TransferLimits, TransportKind};
pub use memory::PoolMemory;
pub use outbound::{
    Connecting, Core, Done, Effect, Excuse, FAREWELL, Known, Line, Meter, OnDone, Op, Outbound, Parties, PathReport,
    PathTable, Paths, Pools, Quiet, TransferStats, Writes, blames_path, join_until, tells_peer,
};
pub use wire::{
    Access, Frame, FrameHead, FrameLimits, Hello, JoinTicket, MAX_STREAMS, Over, PREFIX, Refusal, WriteHead,
    parse_body, parse_prefix,
};
pub use written::Written;
