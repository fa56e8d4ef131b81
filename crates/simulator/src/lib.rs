//! The handoff under a virtual clock, a seed and a hostile network: both ends' pure halves, on one thread.
//!
//! Decode workers and prefill workers here run the very code of `baton_handoff` that real ones run ([`Ledger`],
//! [`Members`], [`Inbound`], [`Outbound`], [`Line`], [`Written`], the frames' bytes) and the block pools of `baton_kv_cache`; only
//! sockets, threads and the clock are replaced. Sessions over TCP have up to four connections, each with an order, delays and
//! faults of its own, so that writes and completions overtake one another. Separate checkers look at what must always hold, and
//! share nothing with that code:
//!
//! - I2: what is announced as verified is, byte for byte, what the prefill worker computed for this request.
//! - I3: a block is written to only while its owner keeps it aside for that epoch; local blocks are read only until the
//!   handoff's end was reported; what lies in a block that was given back does not change.
//! - I5: every reservation and every handoff ends within its bound. That a silent peer is noticed before that is for the tests
//!   of the lease's table and of real processes.
//! - I6: blocks are conserved; in the end all are free, on both sides.
//! - Each outcome is reported once, on each side, and the two never contradict each other.
//! - Delivery: where nothing goes wrong no handoff fails but by its owner or its time, whatever overtakes what, and who has
//!   completed is soon told the outcome.
//!
//! A run is a function of its seed, so a failure is replayed by it.
//!
//! [`Ledger`]: baton_handoff::Ledger
//! [`Members`]: baton_handoff::Members
//! [`Inbound`]: baton_handoff::Inbound
//! [`Outbound`]: baton_handoff::Outbound
//! [`Line`]: baton_handoff::Line
//! [`Written`]: baton_handoff::Written

mod arrival;
mod arriving;
mod copying;
mod decode;
mod decode_session;
mod end;
mod events;
mod faults;
mod joining;
mod outbox;
mod prefill;
mod prefill_session;
mod random;
mod sabotage;
mod shapes;
mod stream;
mod strikes;
mod world;

use std::collections::BTreeMap;

use baton_types::{BatonError, ErrorKind};

pub use faults::Fault;
pub use sabotage::Sabotage;

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
}

impl BatonError for Violation {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Handoffs to begin.
    pub handoffs: u32,
    /// No faults at all, only random timing.
    pub calm: bool,
    /// Something broken on purpose.
    pub sabotage: Option<Sabotage>,
}

impl Default for Options {
    fn default() -> Options {
        Options { handoffs: 100, calm: false, sabotage: None }
    }
}

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Reservations made.
    pub handoffs: u64,
    /// Of these, verified.
    pub verified: u64,
    /// Of these, failed: by the error's name.
    pub failed: BTreeMap<&'static str, u64>,
    /// Of these, taken back by their owner or lost with it.
    pub withdrawn: u64,
    /// Connections that joined a session over TCP beside its own.
    pub joined: u64,
    /// Such that were left out: refused, broken or too late.
    pub left_out: u64,
    /// Completions that had overtaken writes on other connections, and waited until those had come.
    pub overtook: u64,
    /// Faults that struck.
    pub faults: BTreeMap<Fault, u64>,
    /// Events that were played.
    pub events: u64,
    /// Virtual time.
    pub micros: u64,
}

impl Summary {
    /// Adds another run's.
    pub fn add(&mut self, other: &Summary) {
        self.handoffs += other.handoffs;
        self.verified += other.verified;
        self.withdrawn += other.withdrawn;
        self.joined += other.joined;
        self.left_out += other.left_out;
        self.overtook += other.overtook;
        self.events += other.events;
        self.micros += other.micros;
        other.failed.iter().for_each(|(name, count)| *self.failed.entry(name).or_default() += count);
        other.faults.iter().for_each(|(fault, count)| *self.faults.entry(*fault).or_default() += count);
    }
}

/// Plays one run.
pub fn run(seed: u64, options: &Options) -> Result<Summary, Violation> {
    world::World::new(seed, options)?.play()
}
