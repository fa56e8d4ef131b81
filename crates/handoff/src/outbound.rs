//! The prefill end: what a handoff's owner writes, in which order the writes leave, and how the outcome is reported; how the session that
//! carries them begins, is replaced and ends.

mod active;
mod connecting;
mod core;
mod done;
mod ending;
mod line;
mod meter;
mod op;
mod path_table;
mod paths;
mod session;
mod terms;
mod turns;
mod writes;

pub use connecting::{Connecting, join_until};
pub use core::{Core, Known};
pub use done::{Done, OnDone, Quiet, TransferStats};
pub use ending::{Excuse, FAREWELL, blames_path, tells_peer};
pub use line::Line;
pub use meter::Meter;
pub use op::Op;
pub use path_table::PathTable;
pub use paths::{PathReport, Paths};
pub use session::{Effect, Outbound};
pub use terms::{Parties, Pools};
pub use writes::Writes;
