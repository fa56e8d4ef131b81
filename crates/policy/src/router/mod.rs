//! The router's core: all of the router's decisions, without its I/O.
//!
//! It stands between the two front doors and the workers:
//!
//! - [`Fleet`]: all workers of one router. It knows which are present, which are lost and what runs where, and it places the
//!   next request.
//! - [`Choice`]: one answer in progress. It asks for workers, opens and drops their streams, and decides what its client
//!   gets. One fleet serves all choices.
//!
//! Two shells drive this code. `baton-router` turns gRPC events into inputs, and effects into calls. A simulator does the
//! same under a virtual clock. Neither decides anything. The core knows no connection, no text and no metric.
//!
//! Files: `fleet`, `load`, `outliers` and `capacity` are about the workers, `choice`, `pace` and `legs` about one answer.

mod capacity;
mod choice;
mod fleet;
mod legs;
mod load;
mod outliers;
mod pace;
#[cfg(test)]
mod tests;

pub use capacity::Capacity;
pub use choice::{Choice, ChoiceInput, Effect, NewRequest, Patience, SECOND_WORD, Sequence, Taken};
pub use fleet::{Ask, Changes, Fleet, Keep, KeepSizes, Known, PROBE_EVERY, Probe, Recall, WorkerLease, WorkerState};
pub use legs::{Broken, DecodeWord, LegEnd, PrefillWord};
pub use outliers::{Judgement, Outcome, Subject, Verdict};
