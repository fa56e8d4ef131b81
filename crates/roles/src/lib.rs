//! What a prefill worker, a decode worker and a KV store do, as pure state machines: the shell feeds inputs and carries out effects.
//!
//! A core stands between the engine and a worker's shell, which has the model, the transfer engine and the requests'
//! streams. [`DecodeCore`] and [`PrefillCore`] are one step loop, [`WorkerCore`], each with its own [`RoleCore`]. The
//! nodes drive them with real time; the simulator drives the same code with virtual time. A core deliberately has no
//! clock, no thread, no socket and no metrics.
//!
//! [`Drain`] says in which order a worker leaves the cluster.
//!
//! The shell's part of the contract:
//!
//! - It feeds one input ([`WorkerCore::feed`]), then takes and carries out effects ([`WorkerCore::next_effect`]) until none is
//!   left. Then it feeds the commands that have come, and after them [`Input::Turn`].
//! - Some effects have an answer ([`decode::Effect::Lend`], [`decode::Effect::Fence`]). It feeds the answer before it takes the
//!   next effect. What follows from the answer is carried out first, then the rest.
//! - It answers [`Effect::Launch`] and [`Effect::Collect`] with [`Input::Launched`] and [`Input::Collected`]. Other
//!   inputs wait until then.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod decode;
mod drain;
pub mod exchange;
mod first_token;
mod kv_store;
mod launch;
mod load;
mod loans;
pub mod prefill;
mod rate;
mod scored;
mod submit;
#[cfg(test)]
mod tests;
pub mod tiers;
mod todo;
mod worker;

pub use decode::Decode;
pub use drain::{Drain, DrainEffect, DrainInput};
pub use exchange::Exchange;
pub use first_token::{FirstTokenError, parse_first_token, write_first_token};
pub use kv_store::KvStore;
pub use launch::{Outgoing, StepLaunch, Write};
pub use load::{Load, backlog, work};
pub use loans::Loan;
pub use prefill::Prefill;
pub use scored::MOST_SCORED;
pub use submit::{Desk, Refused, Ticket};
pub use worker::{Effect, IDLE_TICK, Input, RoleCore, Snapshot, StepDone, WorkerCore};

/// A decode worker.
pub type DecodeCore = WorkerCore<Decode>;
/// A prefill worker.
pub type PrefillCore = WorkerCore<Prefill>;
