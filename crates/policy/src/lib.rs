//! Decisions about requests: where one runs, and what happens to it when something fails.
//!
//! The router drives this crate, and so does a simulator that tries the same decisions under a virtual clock. The crate is
//! pure: no clock, no I/O, no randomness, no threads, no tokio. Time is an argument. It never sees a connection, a token's
//! text or a KV block.
//!
//! - [`Fleet`], [`Choice`]: the router's core. A fleet is all workers; a choice is one answer.
//! - [`RequestMachine`]: one request's states, inputs and actions, recovery included.
//! - [`Placement`]: which decode worker and which prefill worker a request gets; [`Predicted`], [`RoundRobin`] and [`LeastLoaded`].
//! - [`TenantMeter`]: what one tenant may use; [`Gate`]: which waiting request begins next, in the order of a fair queue.
//! - [`KvIndex`]: which worker holds which prefix, as workers say.
//! - [`bottleneck`]: what bounds the cluster now, in one sentence.
//! - [`Prefixes`]: where a prompt's prefix was sent before, as a hint for placement.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods))] // Tests begin at some time.

mod bottleneck;
mod fair;
mod gate;
mod kv_index;
mod placement;
mod prefixes;
mod request;
mod returns;
mod router;
mod tenants;

pub use baton_kv_cache::{BlockName, NameChain, NameSecret, Tally};
pub use baton_latency::{Backlog, BatchWork, Coming, StepCost, StepWork};
pub use bottleneck::{Bottleneck, Bound, Lately, Targets, WorkerLoad, bottleneck};
pub use fair::Ticket;
pub use gate::{Asks, Begun, Gate, GateRoom};
pub use kv_index::{Followed, Holder, KvChange, KvIndex};
pub use placement::{
    Candidate, Chosen, Delays, Fetch, Held, LeastLoaded, Links, Load, Missed, Placed, Placement, PlacementError,
    PlacementInput, Predicted, Reserve, RoundRobin, Slo, Terms, Why,
};
pub use prefixes::{Prefixes, Sent};
pub use request::{Action, Condition, Failure, Input, Leg, NEW_WAITS, RequestLimits, RequestMachine, State};
pub use returns::Returns;
pub use router::{
    Ask, Broken, Capacity, Changes, Choice, ChoiceInput, DecodeWord, Effect, Fleet, Judgement, Keep, KeepSizes, Known,
    LegEnd, NewRequest, Outcome, PROBE_EVERY, Patience, PrefillWord, Probe, Recall, SECOND_WORD, Sequence, Subject,
    Taken, Verdict, WorkerLease, WorkerState,
};
pub use tenants::{Left, OverLimit, TenantLimits, TenantMeter};
