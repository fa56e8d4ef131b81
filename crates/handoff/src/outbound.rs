//! The prefill end: what a handoff's owner writes, in which order the writes leave, and how the outcome is reported.

mod active;
mod done;
mod line;
mod op;
mod paths;
mod session;
mod terms;
mod turns;
mod writes;

pub use done::{Done, OnDone, Quiet, TransferStats};
pub use line::{Core, Line};
pub use op::Op;
pub use paths::{PathReport, Paths};
pub use session::{Effect, Outbound};
pub use terms::{Parties, Pools};
pub use writes::Writes;
