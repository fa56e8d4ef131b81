//! Continuous batching as a state machine: which tokens of which sequences are computed in the next step.
//!
//! Stands between a worker's service, which submits sequences and delivers events, and a [`ModelRunner`], which computes
//! a batch. One step is
//!
//! ```text
//!   plan(now) ──▶ Step ──▶ with_batch(step, |batch| runner.launch(batch, …)) ──▶ with_batch(step, |batch| runner.collect(batch, …))
//!       ──▶ apply(step, out) or fail(step, error)
//! ```
//!
//! One more step can be planned and launched before one is collected, as far as nothing in it depends on what that says: its token ids are
//! then taken from that step where it is computed ([`Row::follows`]). Steps are collected and applied in the order of planning. Everything else ([`Engine::submit`], [`Engine::kv_arrived`], [`Engine::release`], [`Engine::abort`]) may come
//! between any two of these calls. Deliberately knows no clock (time is an argument), no threads, no I/O, no transport and no
//! model: the nodes drive it with real time, the simulator drives the very same code with virtual time. It orders work and
//! never influences a value: what a sequence says is a function of its tokens and parameters only (I1).

#![forbid(unsafe_code)]

mod admit;
mod apply;
mod batch;
mod check;
mod config;
#[cfg(feature = "testing")]
pub mod conformance;
mod engine;
mod error;
mod event;
#[cfg(feature = "testing")]
pub mod fake;
mod plan;
mod saturation;
mod sequence;
mod step;
mod swap;
mod swapped;

pub use batch::{Batch, ModelRunner, Row, Sample};
pub use config::{EngineConfig, Order};
pub use engine::{Aborted, Engine};
pub use error::{EngineError, RunError, SequenceError};
pub use event::Event;
pub use saturation::Saturation;
pub use sequence::{NewSequence, Start};
pub use step::{Step, StepRow, completed_blocks};
pub use swap::{BlockSwap, SwapConfig, SwapRates};

pub use baton_kv_cache::{
    BlockCopy, BlockCounts, BlockTable, CacheConfig, Eviction, HOLE, Prefix, chain_hash, chain_hashes,
};
pub use baton_types::Time;
