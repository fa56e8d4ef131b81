//! Continuous batching as a state machine: decides which tokens of which sequences the next step computes.
//!
//! The engine stands between a worker's service, which submits sequences and delivers events, and a [`ModelRunner`],
//! which computes batches. One step is
//!
//! ```text
//!   plan(now) ──▶ Step ──▶ with_batch(step, |batch| runner.launch(batch, …)) ──▶ with_batch(step, |batch| runner.collect(batch, …))
//!       ──▶ apply(step, out) or fail(step, error)
//! ```
//!
//! A second step can be planned and launched before the first is collected. A row of the second step may need a token
//! that the first step samples: the runner then takes the token from the first step itself ([`Row::follows`]). Steps
//! are collected and applied in the order in which they were planned. All other calls ([`Engine::submit`],
//! [`Engine::kv_arrived`], [`Engine::release`], [`Engine::abort`]) may come between any two of these calls.
//!
//! The engine orders work and never influences a value: an answer depends only on its sequence's tokens and parameters
//! (I1). The engine deliberately has no clock (time is an argument), no threads, no I/O, no transport and no model. The
//! nodes drive it with real time; the simulator drives the same code with virtual time.

#![forbid(unsafe_code)]

mod admit;
mod apply;
mod batch;
mod check;
mod chunk;
mod class;
mod config;
#[cfg(feature = "testing")]
pub mod conformance;
mod engine;
mod error;
mod event;
mod exchange;
#[cfg(feature = "testing")]
pub mod fake;
#[cfg(feature = "testing")]
mod holdings;
mod join;
mod plan;
mod saturation;
mod sequence;
mod share;
mod step;

pub use batch::{Batch, ModelRunner, Row, Sample, Score};
pub use config::{EngineConfig, Order};
pub use engine::{Aborted, Engine};
pub use error::{EngineError, RunError, SequenceError};
pub use event::Event;
pub use exchange::{Digest, Exchange};
#[cfg(feature = "testing")]
pub use holdings::{BlockAccount, Hold, Holding};
pub use saturation::Saturation;
pub use sequence::{NewSequence, Start};
pub use share::Share;
pub use step::{Step, StepRow, completed_blocks};

pub use baton_kv_cache::{
    BlockCopy, BlockCounts, BlockName, BlockTable, CacheChange, CacheConfig, CacheFeed, Cached, Eviction, HOLE,
    NameChain, NameSecret, Prefix, Tally,
};
pub use baton_types::Time;
