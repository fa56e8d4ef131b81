//! The whole cluster under a virtual clock, a seed and a hostile world, on one thread.
//!
//! Routers, workers and the registry here run the very code that real ones run: placement, the request's state machine and its
//! streams ([`baton_policy::Fleet`], [`baton_policy::Choice`]), membership ([`baton_membership`]), the two roles and their step
//! loop ([`baton_roles`]), the engine and its block pools over the fake model, and the handoff's protocol to the last byte
//! ([`baton_handoff`]). Only sockets, threads, clocks and the model are replaced. Separate checkers look at what must always hold, and
//! share nothing with that code:
//!
//! - I1: each client's tokens are those that its request gives alone.
//! - I2: what is announced as verified is, byte for byte, the KV of the sequence's tokens.
//! - I3: a block is written to by a peer only while it is lent under that epoch, and no step touches it meanwhile; local blocks are read
//!   only until the handoff's end was reported, and no step writes to them meanwhile.
//! - I4: each token's index reaches the client once, in order, and nothing after the end.
//! - I5: after the last fault every request ends, and the run does.
//! - I6: blocks are conserved at every step; in the end all are free, on both sides, and nobody holds a stream or a reservation.
//! - I7: while the registry is away, no router forgets who serves.
//! - Each outcome is reported once, on each side, and the two never contradict each other.
//! - Delivery: where nothing goes wrong nothing fails but by its owner, its time, or for want of room.
//!
//! A run is a function of its seed, so a failure is replayed by it; [`shrink`] finds a smaller one.

#![forbid(unsafe_code)]

mod arrival;
mod arriving;
mod client;
mod clocks;
mod control;
mod copying;
mod decode;
mod decode_session;
mod end;
mod engine;
mod events;
mod faults;
mod handoffs;
mod joining;
mod lending;
mod lifecycle;
mod membership;
mod outbox;
mod pool;
mod prefill;
mod prefill_session;
mod processes;
mod router;
mod sabotage;
mod scenario;
mod settings;
mod stages;
mod stream;
mod strikes;
mod summary;
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
    /// Which one.
    pub invariant: &'static str,
    /// Virtual time since the start.
    pub at_micros: u64,
    /// What was seen.
    pub what: String,
    /// The run's story until then, with [`Options::trace`].
    pub trace: Vec<String>,
}

impl BatonError for Violation {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// How many of what a cluster begins with; what is not said the seed chooses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Routers.
    pub routers: Option<u32>,
    /// Prefill workers.
    pub prefills: Option<u32>,
    /// Decode workers.
    pub decodes: Option<u32>,
}

/// What to simulate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Requests that come.
    pub requests: u32,
    /// From one to the next, at most, microseconds; None: the seed chooses.
    pub every: Option<u64>,
    /// How long decode workers lend blocks, microseconds; None: the seed chooses.
    pub lease: Option<u64>,
    /// The cluster's size.
    pub sizes: Sizes,
    /// No faults at all, only random timing.
    pub calm: bool,
    /// These faults, in place of those that the seed chooses.
    pub faults: Option<Faults>,
    /// Faults that strike at a time of their own.
    pub rules: Vec<Rule>,
    /// Faults that are left out.
    pub without: BTreeSet<Fault>,
    /// Something broken on purpose.
    pub sabotage: Option<Sabotage>,
    /// Tell the run's story.
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

/// Finds a smaller run that fails in the same way: fewer requests, fewer kinds of faults. Answers how, with its violation.
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
