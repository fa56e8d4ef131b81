//! What a prefill and a decode worker do, as pure state machines: `step(input, now)` appends effects.
//!
//! A core stands between the engine and a worker's shell, which has the model, the transfer engine and the requests'
//! streams. [`DecodeCore`] and [`PrefillCore`] are one step loop, [`WorkerCore`], each with its own [`RoleCore`]. The
//! nodes drive them with real time; the simulator drives the same code with virtual time. A core deliberately has no
//! clock, no thread, no socket and no metrics.
//!
//! The shell's part of the contract:
//!
//! - It carries out effects in order. Some effects have an answer ([`decode::Effect::Lend`],
//!   [`decode::Effect::Fence`]): it is given as a command before the next effect is carried out.
//! - It answers [`Effect::Launch`] and [`Effect::Collect`] with [`Input::Launched`] and [`Input::Collected`]. Other
//!   inputs wait until then.
//! - When no effect is left to carry out, it passes on the commands that have come, then [`Input::Turn`].

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod decode;
mod first_token;
mod launch;
pub mod prefill;
mod rate;
mod submit;
#[cfg(test)]
mod tests;
mod worker;

pub use decode::Decode;
pub use first_token::{FirstTokenError, parse_first_token, write_first_token};
pub use launch::{Outgoing, StepLaunch, Write};
pub use prefill::Prefill;
pub use submit::{Desk, Refused, Ticket};
pub use worker::{Effect, IDLE_TICK, Input, RoleCore, Snapshot, StepDone, WorkerCore};

/// A decode worker.
pub type DecodeCore = WorkerCore<Decode>;
/// A prefill worker.
pub type PrefillCore = WorkerCore<Prefill>;
