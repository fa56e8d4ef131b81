//! The prefill end: what a handoff's owner writes, in which order it leaves, and how its end is told.

mod active;
mod done;
mod line;
mod paths;
mod session;
#[cfg(test)]
mod testing;
mod turns;
mod writes;

pub use done::{Done, OnDone, Quiet, TransferStats};
pub use line::{Core, Line, Op};
pub use paths::{PathReport, Paths};
pub use session::{Effect, Outbound, Parties, Pools};
pub use writes::Writes;
