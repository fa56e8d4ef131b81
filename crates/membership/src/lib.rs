//! Members, their leases and the last known view, as state machines.
//!
//! Workers register here, and the router places requests by the view. No request passes through this crate.
//! `baton-cluster`, which makes the calls and waits, drives it, and so does the cluster's simulator. The crate is pure: no
//! clock, no I/O, no threads, no tokio. Time and randomness are arguments. It knows no registry's protocol.
//!
//! - [`Member`], [`View`]: one process, and all processes.
//! - [`Store`]: a registry's members and leases.
//! - [`Known`]: the members a watcher knows, also while the registry is away (I7).
//! - [`Renewal`]: when one member is registered, renewed and removed.
//! - [`Follow`]: how a watcher follows its registry, and returns to it after an outage.
//! - [`Restored`]: the view of a watcher that starts with saved members.
//! - [`Backoff`]: how long to wait before the next try.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods))] // Tests begin at some time.

mod backoff;
mod error;
mod follow;
mod known;
mod member;
mod renewal;
mod restored;
mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use backoff::Backoff;
pub use error::MembershipError;
pub use follow::{Follow, FollowAction, FollowInput, FollowNews, OPEN};
pub use known::{Known, SETTLE};
pub use member::{List, MAX_MEMBERS, MAX_TEXT, MAX_VIEW, Member, Role, View, check_ttl, is_host_port};
pub use renewal::{Renewal, RenewalAction, RenewalInput, RenewalNews};
pub use restored::Restored;
pub use store::Store;
