//! Members, their leases and the last known view, as state machines.
//!
//! Stands beside the flow: workers register, the router places requests by the view. Driven by `baton-cluster`, which does
//! the calls and waits, and by the cluster's simulator. Pure: no clock, no I/O, no threads, no tokio; time and randomness
//! are arguments. It knows no registry's protocol and no request.
//!
//! - [`Member`], [`View`]: one process, and all of them.
//! - [`Store`]: a registry's members and leases.
//! - [`Known`]: what a watcher knows, also while the registry is away (I7).
//! - [`Renewal`]: when one member is registered, renewed and removed.
//! - [`Follow`]: how a watcher listens to its registry, and comes back to it after an outage.
//! - [`Backoff`]: how long to wait before the next try.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods))] // Tests begin at some time.

mod backoff;
mod error;
mod follow;
mod known;
mod member;
mod renewal;
mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use backoff::Backoff;
pub use error::MembershipError;
pub use follow::{Follow, FollowAction, FollowInput, FollowNews, OPEN};
pub use known::{Known, SETTLE};
pub use member::{MAX_MEMBERS, MAX_TEXT, Member, Role, View, check_ttl, is_host_port};
pub use renewal::{Renewal, RenewalAction, RenewalInput, RenewalNews};
pub use store::Store;
