//! Decisions about requests: where one runs, and what happens to it when something fails.
//!
//! Driven by the router (and by anything else that wants to try the same decisions under a virtual clock). Pure: no
//! clock, no I/O, no randomness, no tokio. It sees workers as [`Candidate`]s and failures as [`Failure`]s; it never sees
//! a connection, a token's text or a KV block.
//!
//! - [`Placement`]: which decode worker and which prefill worker; [`RoundRobin`] and [`LeastLoaded`].
//! - [`Prefixes`]: where a prompt's beginning was sent before, as a hint for it.
//! - [`RequestMachine`]: one request's states, inputs and actions, recovery included.

mod placement;
mod prefixes;
mod request;

pub use placement::{Candidate, LeastLoaded, Placed, Placement, PlacementError, PlacementInput, Role, RoundRobin};
pub use prefixes::Prefixes;
pub use request::{Action, Failure, Input, Leg, Limits, RequestMachine, State};
