//! The latency model: how long work takes on a worker, learned from its steps while it runs.
//!
//! One small function for all who ask: placement, admission, and the choice between loading KV and computing it. A worker learns its own
//! [`StepCost`] with a [`StepModel`] and tells routers; a router predicts with what it was told. Pure: no clock, no I/O.
//!
//! - [`StepWork`] → [`StepCost::step`]: one step of a worker
//! - [`StepCost::prompt`]: the time to compute what is missing of a prompt
//! - [`TransferCost::of`]: the time to hand KV over

#![forbid(unsafe_code)]

mod fit;
mod step;
mod transfer;

pub use step::{StepCost, StepModel, StepWork};
pub use transfer::{TransferCost, TransferModel};
