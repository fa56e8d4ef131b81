//! What is measured, and the figures.

use std::path::PathBuf;

use baton_transfer::{Cpus, TransportKind, UcxSettings};
use baton_types::PoolGeometry;

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Shape of both pools.
    pub geometry: PoolGeometry,
    /// Numbers of blocks in a handoff, measured in turn. None may exceed the pool's.
    pub blocks: Vec<u32>,
    /// Rounds, at least 1.
    pub rounds: u32,
    /// Transfers of one block timed for latency, for each way; 0: none.
    pub round_trips: u32,
    /// Transports to measure handoffs over.
    pub transports: Vec<TransportKind>,
    /// Numbers of connections for handoffs over TCP, measured in turn.
    pub connections: Vec<usize>,
    /// Whether to measure handoffs without verification, too, to see what it costs. Workers always verify.
    pub unverified: bool,
    /// Seed of the order of blocks in the pools, scattered as in a busy pool. None: one after the other.
    pub scattered: Option<u64>,
    /// How UCX is set up at this end.
    pub ucx: UcxSettings,
    /// The folder of sockets that both ends share, if they do.
    pub sockets: Option<PathBuf>,
    /// CPUs this end runs on.
    pub cpus: Cpus,
}

/// A way for bytes to move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Copying block by block, inside the driving process.
    Memcpy,
    /// One TCP stream, nothing checked.
    PlainTcp,
    /// A handoff.
    Handoff {
        /// Its transport.
        transport: TransportKind,
        /// Connections that carry its blocks.
        connections: usize,
        /// Whether arriving blocks are compared with their digests.
        verified: bool,
    },
}

/// Values in ascending order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn new(mut values: Vec<f64>) -> Samples {
        values.sort_by(f64::total_cmp);
        Samples(values)
    }

    /// The smallest value such that at least `share` (0 to 1) of all values are at or below it; NaN when there are none.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    /// Number of values.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Bandwidth of one way with one number of blocks.
#[derive(Clone, PartialEq, Debug)]
pub struct Bandwidth {
    /// The way.
    pub way: Way,
    /// Blocks moved at once, of each group.
    pub blocks: u32,
    /// Their bytes, over all layers.
    pub bytes: u64,
    /// Bytes a second, one value for each round.
    pub rates: Samples,
}

/// Latency of one way with one block.
#[derive(Clone, PartialEq, Debug)]
pub struct Latency {
    /// The way.
    pub way: Way,
    /// Bytes of the block, over all layers.
    pub bytes: u64,
    /// Seconds from opening to the answer.
    pub seconds: Samples,
}

/// What was measured.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchReport {
    /// Processor and system of the driving end.
    pub here: String,
    /// Processor and system of the receiving end.
    pub there: String,
    /// By number of blocks, then by way.
    pub bandwidth: Vec<Bandwidth>,
    /// By way.
    pub latency: Vec<Latency>,
    /// Verified handoffs by what has carried them, those that warm up included; as workers count them.
    pub handoffs: Vec<(TransportKind, u64)>,
}
