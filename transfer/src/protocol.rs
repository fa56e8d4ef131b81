//! The session protocol without its sockets and threads: its bytes, and what each end makes of them.
//!
//! Everything here is pure, and it is what [`crate::Receiver`] and [`crate::Sender`] run. Workers use those; simulations and
//! fuzzers drive these parts under their own clock and network.

pub use crate::batch::{Batch, BlockWrite, Range, Run, TCP_BATCHES};
pub use crate::codec::Malformed;
pub use crate::descriptor::Descriptor;
pub use crate::greeting::visitor;
pub use crate::host::Host;
pub use crate::memory::PoolMemory;
pub use crate::receiver::{Inbound, Ledger, Members, Payload, SessionId, Target};
pub use crate::sender::{Core, Done, Effect, Line, Op, Outbound, Parties, Pools, Quiet, Writes};
pub use crate::wire::{
    Access, Frame, FrameHead, FrameLimits, Hello, MAX_STREAMS, Over, PREFIX, Refusal, Ticket, WriteHead, parse_body,
    parse_prefix,
};
pub use crate::written::Written;
