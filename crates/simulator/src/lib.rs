//! Simulates the whole cluster on one thread, with a virtual clock, a seed and random faults.
//!
//! Routers, workers and the registry run the production code:
//!
//! - placement, the request's state machine and its streams ([`baton_policy::Fleet`], [`baton_policy::Choice`]);
//! - membership ([`baton_membership`]);
//! - the two roles, their step loop, and how a worker drains ([`baton_roles`]);
//! - the engine and its block pools, over the fake model;
//! - the handoff protocol, byte for byte ([`baton_handoff`]), for requests and for prefixes that workers fetch from others;
//! - in a third of the runs, a store below each worker's pool ([`baton_kv_store`]), what is loaded from it and what is saved there;
//! - in a third of the runs, KV stores that are processes of their own: routers have them take what workers computed
//!   ([`baton_policy::Fleet::keep`]), and workers fetch from them. Some have tiers below their pools.
//!
//! Only sockets, threads, clocks and the model are replaced. Separate checkers, with records of their own, check these invariants:
//!
//! - I1: each client receives the tokens that its request yields when it runs alone.
//! - I2: KV announced as verified equals, byte for byte, the KV of the sequence's tokens.
//! - I3: a peer writes to a block only while the block is lent under that epoch, and no step touches the block meanwhile. Local blocks
//!   are read only until the handoff's end has been reported, and no step writes to them meanwhile. So too for prefixes that move, and for blocks
//!   that are loaded from a store or saved there.
//! - I4: each token index reaches the client once, in order, and none after the end.
//! - I5: after the last fault every request ends, and so does the run. Deadlines and leases end what they bound; routers ask lost workers
//!   whether they are back, and let go of those that have left.
//! - I6: every block has one state at every step, by a count of the checker's own, and whatever is set aside has somebody who will end it. At
//!   the end all are free or cached on both sides, and no stream or reservation is left.
//! - I7: while the registry is down, no router forgets a serving worker.
//! - Leases: a request that waits for a worker has no stream open, and at the end no router counts a request on a worker.
//! - KV stores: what a router has one take is KV that it lacks, from a worker with the same kind of KV, and nothing is asked of one that drains or
//!   was silent just now. No prompt is placed on one. Whatever happens to stores, no request fails.
//! - Reported once, agreement: each side reports each outcome once, and the two sides never contradict each other.
//! - Delivery: without faults, something fails only because its owner withdrew it, its deadline passed, or there was no room.
//!
//! A run is a function of its seed, so the seed replays a failure. [`shrink`] looks for a smaller run that fails in the same way.

#![forbid(unsafe_code)]

mod accounting;
mod arrival;
mod arriving;
mod books;
mod cache_news;
mod client;
mod clocks;
mod control;
mod copying;
mod decode;
mod end;
mod ends;
mod engine;
mod events;
mod exchange;
mod faults;
mod fetched;
mod handoffs;
mod joining;
mod kept;
mod kv_store;
mod kv_store_life;
mod lending;
mod lifecycle;
mod membership;
mod opening;
mod outbox;
mod pool;
mod prefill;
mod prefixes;
mod processes;
mod receiver_session;
mod router;
mod sabotage;
mod scenario;
mod sender_session;
pub mod serving;
mod session_life;
mod settings;
mod stages;
mod storing;
mod stream;
mod strikes;
mod summary;
pub mod tiers;
mod verdicts;
mod world;

use std::collections::BTreeSet;
use std::panic::catch_unwind;

use baton_types::{BatonError, ErrorKind};

pub use faults::{Fault, Faults};
pub use sabotage::Sabotage;
pub use scenario::{Rule, Scenario, ScenarioError};
pub use summary::Summary;

/// An invariant that did not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{invariant} at {at_micros} µs: {what}")]
pub struct Violation {
    /// Name of the invariant, such as `I3`.
    pub invariant: &'static str,
    /// Virtual time since the start.
    pub at_micros: u64,
    /// What was observed.
    pub what: String,
    /// Trace of the run until then; empty unless [`Options::trace`] is set.
    pub trace: Vec<String>,
}

impl BatonError for Violation {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// Number of processes a cluster starts with. For None the seed chooses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Routers.
    pub routers: Option<u32>,
    /// Prefill workers.
    pub prefills: Option<u32>,
    /// Decode workers.
    pub decodes: Option<u32>,
    /// KV stores.
    pub stores: Option<u32>,
}

/// What to simulate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Number of requests.
    pub requests: u32,
    /// Longest time between two arrivals, microseconds; None: the seed chooses.
    pub every: Option<u64>,
    /// Lease of the blocks that decode workers lend, microseconds; None: the seed chooses.
    pub lease: Option<u64>,
    /// The cluster's size.
    pub sizes: Sizes,
    /// Prefixes move only to KV stores: no worker fetches any.
    pub only_keeps: bool,
    /// No faults at all, only random timing.
    pub calm: bool,
    /// Faults to use instead of those the seed chooses.
    pub faults: Option<Faults>,
    /// Faults that strike at a given time or after a given event.
    pub rules: Vec<Rule>,
    /// Faults to leave out.
    pub without: BTreeSet<Fault>,
    /// A rule to break on purpose.
    pub sabotage: Option<Sabotage>,
    /// Record a trace of the run.
    pub trace: bool,
}

impl Default for Options {
    fn default() -> Options {
        let (sizes, rules, without) = (Sizes::default(), Vec::new(), BTreeSet::new());
        Options {
            requests: 30,
            every: None,
            lease: None,
            sizes,
            only_keeps: false,
            calm: false,
            faults: None,
            rules,
            without,
            sabotage: None,
            trace: false,
        }
    }
}

/// Plays one run.
pub fn run(seed: u64, options: &Options) -> Result<Summary, Violation> {
    let played = catch_unwind(|| world::World::new(seed, options)?.play());
    played.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let what = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
        Err(Violation { invariant: "no panic", at_micros: 0, what, trace: Vec::new() })
    })
}

/// Finds a smaller run that violates the same invariant: fewer requests, fewer kinds of faults. Returns its options and its violation.
pub fn shrink(seed: u64, options: &Options, violation: Violation) -> (Options, Violation) {
    let (mut best, mut found) = (options.clone(), violation);
    let same = |options: &Options, invariant| run(seed, options).err().filter(|other| other.invariant == invariant);
    for fault in Fault::ALL {
        let mut less = best.clone();
        less.without.insert(fault);
        if let Some(other) = same(&less, found.invariant) {
            (best, found) = (less, other);
        }
    }
    while best.requests > 1 {
        let fewer = [best.requests / 2, best.requests - 1].into_iter().find_map(|requests| {
            let less = Options { requests, ..best.clone() };
            same(&less, found.invariant).map(|other| (less, other))
        });
        match fewer {
            Some(smaller) => (best, found) = smaller,
            None => break,
        }
    }
    best.trace = true;
    found = same(&best, found.invariant).unwrap_or(found);
    (best, found)
}
