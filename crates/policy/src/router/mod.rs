//! The router's core: everything the router decides, without the router.
//!
//! Stands between the two front doors and the workers. [`Fleet`] is all workers of one router: who is there, who is lost,
//! what runs where, and where the next request goes. [`Choice`] is one answer on its way: it asks for workers, opens and
//! drops their streams, and says what its client gets. One fleet serves all choices.
//!
//! Two shells drive the same code. `baton-router` turns gRPC events into inputs and effects into calls; a simulator does the
//! same under a virtual clock. Neither decides anything. The core knows no connection, no text and no metric.
//!
//! - `fleet`, `capacity`: the workers. `choice`, `legs`: one answer.

mod capacity;
mod choice;
mod fleet;
mod legs;
#[cfg(test)]
mod tests;

pub use capacity::Capacity;
pub use choice::{Choice, ChoiceInput, Effect, NewRequest, SECOND_WORD, Sequence, Taken};
pub use fleet::{Ask, Changes, Fleet, PROBE_EVERY, Probe, WorkerLease, WorkerState};
pub use legs::{DecodeWord, LegEnd, PrefillWord};
