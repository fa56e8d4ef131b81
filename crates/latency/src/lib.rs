//! The latency model: how long work takes on a worker, learned from its steps while it runs. Pure: no clock, no I/O.
//!
//! - [`StepModel`] learns a worker's [`StepCost`] from its steps. How well it predicts them is a metric.
//! - [`Backlog`] is what a worker has to do; it says how long more would take there. [`Calibration`] learns what such predictions leave out.
//! - [`StepCost::step`] predicts one step from its [`StepWork`], [`StepCost::prompts`] what is missing of prompts.

#![forbid(unsafe_code)]

mod backlog;
mod calibration;
mod fit;
mod step;

pub use backlog::{Backlog, BatchWork, Coming};
pub use calibration::Calibration;
pub use step::{StepCost, StepModel, StepWork};
