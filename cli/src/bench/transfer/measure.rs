//! Measures how fast handoffs are, compared with what the machines can do at all. One process drives, another receives, on this host or
//! another.
//!
//! - In each round the same blocks go through memcpy, a plain TCP stream and a handoff over each transport, one after the other, so that
//!   all see the same machines. All rounds are reported.
//! - A handoff is timed from opening to its verified answer, so digests on both sides are included. Memcpy and the plain stream check
//!   nothing.
//! - Latency is the time of a handoff of one block. That takes two round trips: access, then data and its verification.
//!
//! This module only measures; the caller prints tables.

mod control;
pub(crate) mod hex;
mod peer;
mod request;
mod serve;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baton_handoff::{TransferError, TransferLimits, TransportKind};
use baton_types::{BlockId, PoolGeometry, WorkerId, hash_bytes};

use crate::cpus::Cpus;
use crate::options::{SenderOptions, TransportChoice, UcxSettings};
use crate::segment::Segment;
use crate::sender::Sender;
use control::{HANDOFF_PATIENCE, machine};
pub use peer::Peer;
use peer::Plain;
pub use request::Request;
pub use serve::{ServeOptions, Served, serve};

/// Prefix of the line in which a child says its address, since its output may hold other lines.
pub const MARK: &str = "@ ";

/// Handoffs of one block that are not counted, before those that are.
const WARM_UP: u32 = 5;

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
    fn new(mut values: Vec<f64>) -> Samples {
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
}

/// Measures handoffs to `peer`, which must not have been used before.
pub fn run(options: &BenchOptions, peer: Peer) -> Result<BenchReport, TransferError> {
    check(options)?;
    options.cpus.check()?;
    // Pins memcpy and the plain stream, too, so that all ways have the same CPUs.
    options.cpus.pin();
    let mut bench = Bench::new(options, peer)?;
    let (here, there) = (machine(), bench.peer.machine().to_owned());
    let mut bandwidth = Vec::new();
    for &blocks in &options.blocks {
        bandwidth.extend(bench.bandwidth(blocks)?);
    }
    let ways = bench.ways().into_iter().filter(|way| options.round_trips > 0 && *way != Way::Memcpy);
    let latency = ways.map(|way| bench.latency(way)).collect::<Result<_, _>>()?;
    Ok(BenchReport { here, there, bandwidth, latency })
}

fn check(options: &BenchOptions) -> Result<(), TransferError> {
    let most = options.geometry.blocks.iter().copied().max().unwrap_or(0);
    if options.rounds == 0 {
        return Err(TransferError::argument("rounds", "0; at least 1 is needed"));
    }
    if options.blocks.is_empty() {
        return Err(TransferError::argument("blocks", "none; name at least one number of blocks"));
    }
    if options.connections.is_empty() {
        return Err(TransferError::argument("connections", "none; name at least one number of connections"));
    }
    match options.blocks.iter().find(|blocks| **blocks == 0 || **blocks > most) {
        Some(blocks) => Err(TransferError::argument("blocks", format!("{blocks}; the pool has 1 to {most}"))),
        None => Ok(()),
    }
}

/// Blocks of each group in the order in which they are used.
pub(crate) fn order(geometry: &PoolGeometry, seed: Option<u64>) -> Vec<Vec<BlockId>> {
    let of = |count: &u32| {
        let mut blocks: Vec<_> = (0..*count).map(BlockId).collect();
        if let Some(seed) = seed {
            blocks.sort_by_key(|block| hash_bytes(seed, &block.0.to_le_bytes()));
        }
        blocks
    };
    geometry.blocks.iter().map(of).collect()
}

struct Bench<'a> {
    options: &'a BenchOptions,
    peer: Peer,
    pool: Arc<Segment>,
    scratch: Segment,
    /// Per group: blocks in the order in which they are used.
    order: Vec<Vec<BlockId>>,
    /// Each with a session of its own.
    senders: Vec<(Way, Sender)>,
}

impl Bench<'_> {
    fn new(options: &BenchOptions, mut peer: Peer) -> Result<Bench<'_>, TransferError> {
        let geometry = &options.geometry;
        let pool = filled(geometry)?;
        let scratch = Segment::create("bench-scratch", geometry.bytes())?;
        let ways = (1..).zip(handoffs(options));
        let senders = ways.map(|(number, way)| Ok((way, sender(number, way, options, &pool)?)));
        let senders = senders.collect::<Result<_, TransferError>>()?;
        // The peer gets another order: two busy pools have nothing in common.
        peer.begin(geometry, options.scattered.map(|seed| seed.wrapping_add(1)))?;
        let order = order(geometry, options.scattered);
        Ok(Bench { options, peer, pool, scratch, order, senders })
    }

    fn ways(&self) -> Vec<Way> {
        [Way::Memcpy, Way::PlainTcp].into_iter().chain(self.senders.iter().map(|(way, _)| *way)).collect()
    }

    fn bandwidth(&mut self, blocks: u32) -> Result<Vec<Bandwidth>, TransferError> {
        let (ways, bytes) = (self.ways(), self.bytes(blocks));
        let mut rates = vec![Vec::new(); ways.len()];
        // Round 0 does not count: it touches every page and fills every cache.
        for round in 0..=self.options.rounds {
            for (way, rates) in ways.iter().zip(&mut rates) {
                let seconds = self.once(*way, blocks)?;
                if round > 0 {
                    rates.push(bytes as f64 / seconds);
                }
            }
        }
        let row = |(way, rates)| Bandwidth { way, blocks, bytes, rates: Samples::new(rates) };
        Ok(ways.into_iter().zip(rates).map(row).collect())
    }

    fn latency(&mut self, way: Way) -> Result<Latency, TransferError> {
        let mut seconds = Vec::new();
        for number in 0..WARM_UP + self.options.round_trips {
            let taken = self.once(way, 1)?;
            if number >= WARM_UP {
                seconds.push(taken);
            }
        }
        Ok(Latency { way, bytes: self.bytes(1), seconds: Samples::new(seconds) })
    }

    /// Moves the first `blocks` blocks of each group; returns the seconds it took.
    fn once(&mut self, way: Way, blocks: u32) -> Result<f64, TransferError> {
        let of_way = self.senders.iter().find(|(of, _)| *of == way);
        match (way, of_way) {
            (Way::Handoff { transport, verified, .. }, Some((_, sender))) => {
                let target = self.peer.reserve(blocks, verified)?;
                hand_over(sender, transport, &self.options.geometry, &self.order, &target)
            }
            (Way::Memcpy, _) => Ok(self.copy(blocks)),
            _ => self.peer.send_plainly(&Plain { pool: &self.pool, bytes: self.bytes(blocks) as usize }),
        }
    }

    fn bytes(&self, blocks: u32) -> u64 {
        self.ranges(blocks).map(|range| range.len() as u64).sum()
    }

    /// Ranges in the pool: every layer's part of each of the first `blocks` blocks.
    fn ranges(&self, blocks: u32) -> impl Iterator<Item = std::ops::Range<usize>> {
        let geometry = &self.options.geometry;
        let of = move |(g, list): (usize, &'_ Vec<BlockId>)| {
            let list = list.iter().take(blocks as usize).copied().collect::<Vec<_>>();
            (0..geometry.layout.groups[g].layers.len())
                .flat_map(move |l| list.clone().into_iter().map(move |block| geometry.block_range(g, l, block)))
        };
        self.order.iter().enumerate().flat_map(of)
    }

    fn copy(&self, blocks: u32) -> f64 {
        let ranges: Vec<_> = self.ranges(blocks).collect();
        let start = Instant::now();
        for range in ranges {
            let ends = (self.pool.at(range.start, range.len()), self.scratch.at(range.start, range.len()));
            if let (Some(source), Some(target)) = ends {
                // SAFETY: checked ranges of two mappings; nothing writes to either meanwhile.
                unsafe { std::ptr::copy_nonoverlapping(source, target, range.len()) };
            }
        }
        start.elapsed().as_secs_f64()
    }
}

/// A pool in which no two blocks are equal.
fn filled(geometry: &PoolGeometry) -> Result<Arc<Segment>, TransferError> {
    let segment = Segment::create("bench-pool", geometry.bytes())?;
    let words = geometry.bytes().div_ceil(8) as u64;
    let bytes: Vec<u8> = (0..words).flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    // SAFETY: nobody else knows the segment yet.
    unsafe { segment.write(0, &bytes[..geometry.bytes()]) };
    Ok(Arc::new(segment))
}

/// Every kind of handoff that is asked for.
fn handoffs(options: &BenchOptions) -> Vec<Way> {
    let checks: &[bool] = if options.unverified { &[true, false] } else { &[true] };
    let mut ways = Vec::new();
    for &transport in &options.transports {
        let connections = if transport == TransportKind::Tcp { &options.connections[..] } else { &[1] };
        for &connections in connections {
            ways.extend(checks.iter().map(|&verified| Way::Handoff { transport, connections, verified }));
        }
    }
    ways
}

fn sender(number: u64, way: Way, options: &BenchOptions, segment: &Arc<Segment>) -> Result<Sender, TransferError> {
    let Way::Handoff { transport, connections, verified: verify } = way else { return Err(TransferError::Closed) };
    let transport = match transport {
        TransportKind::Shm => TransportChoice::Shm,
        TransportKind::Tcp => TransportChoice::Tcp,
        TransportKind::Ucx => TransportChoice::Ucx,
        // Fails with the reason, since this pool is in host memory.
        TransportKind::CudaIpc => TransportChoice::CudaIpc,
    };
    Sender::new(SenderOptions {
        worker: WorkerId(number),
        geometry: options.geometry.clone(),
        pool: segment.clone().into(),
        transport,
        ucx: options.ucx.clone(),
        tls: None,
        tcp_connections: connections,
        cpus: options.cpus.clone(),
        limits: TransferLimits::default(),
        convert: None,
        verify,
        on_trouble: |_, _| {},
    })
}

/// Hands over the first blocks of `order`, as many as the target wants; returns the seconds it took.
fn hand_over(
    sender: &Sender,
    transport: TransportKind,
    geometry: &PoolGeometry,
    order: &[Vec<BlockId>],
    target: &[u8],
) -> Result<f64, TransferError> {
    let (tell, told) = mpsc::channel();
    let start = Instant::now();
    let mut handoff = sender.open(target, start + HANDOFF_PATIENCE)?;
    let counts = handoff.block_counts().to_vec();
    for (group, (list, count)) in order.iter().zip(counts).enumerate() {
        let pairs: Vec<_> = list.iter().copied().zip(0..count).collect();
        for layer in 0..geometry.layout.groups[group].layers.len() {
            handoff.write(group, layer, &pairs)?;
        }
    }
    handoff.complete(Vec::new(), Box::new(move |outcome| drop(tell.send(outcome))));
    let stats = told.recv().map_err(|_| TransferError::Closed)??;
    let seconds = start.elapsed();
    if stats.transport != transport {
        let (asked, used) = (transport.as_str(), stats.transport.as_str());
        let paths = sender.paths().into_iter().flat_map(|(_, paths)| paths);
        let why = paths.filter(|path| path.transport == transport).find_map(|path| path.unused).unwrap_or_default();
        return Err(TransferError::os("measure", format!("asked for {asked}, the handoff went over {used}: {why}")));
    }
    Ok(seconds.max(Duration::from_nanos(1)).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use baton_types::{KvDtype, KvGroup, KvLayout};

    use super::*;
    use crate::conformance::{child_process, ucx, ucx_is_here};

    fn options() -> BenchOptions {
        let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 1, head_dim: 64, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let mut transports = vec![TransportKind::Shm, TransportKind::Tcp];
        transports.extend(ucx_is_here().then_some(TransportKind::Ucx));
        BenchOptions {
            geometry: PoolGeometry::uniform(layout, 4),
            blocks: vec![4, 2],
            rounds: 2,
            round_trips: 3,
            transports,
            connections: vec![1, 3],
            unverified: true,
            scattered: Some(7),
            ucx: ucx(),
            cpus: Cpus::default(),
        }
    }

    #[test]
    fn hex_survives_and_other_text_is_refused() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(hex::decode(&hex::encode(&bytes)), Some(bytes));
        for text in ["0", "0g", "é", "00 0"] {
            assert_eq!(hex::decode(text), None, "{text}");
        }
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let samples = Samples::new((1..=200).rev().map(f64::from).collect());
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| samples.quantile(share)), [1.0, 100.0, 198.0, 200.0]);
        assert!(Samples::default().quantile(0.5).is_nan());
    }

    #[test]
    fn a_scattered_pool_has_all_its_blocks_in_an_order_of_its_seed() {
        let geometry = PoolGeometry::uniform(options().geometry.layout, 64);
        let [plain, one, same, two] = [None, Some(1), Some(1), Some(2)].map(|seed| order(&geometry, seed).remove(0));
        assert_eq!(one, same);
        assert!(one != two && one != plain);
        let mut sorted = one.clone();
        sorted.sort();
        assert_eq!(sorted, plain);
    }

    #[test]
    fn a_run_measures_what_is_asked_for() {
        let options = options();
        let report = run(&options, Peer::child(child_process("bench")).unwrap()).unwrap();
        let ways = 2 + 2 * (options.transports.len() + 1);
        assert_eq!((report.bandwidth.len(), report.latency.len()), (2 * ways, ways - 1));
        let bytes: Vec<_> = report.bandwidth.iter().map(|row| (row.blocks, row.bytes)).collect();
        assert_eq!((bytes[0], bytes[ways]), ((4, 2 * 4 * 4096), (2, 2 * 2 * 4096)));
        for row in &report.bandwidth {
            assert!(row.rates.count() == 2 && row.rates.quantile(0.0) > 0.0, "{row:?}");
        }
        for row in &report.latency {
            assert_eq!((row.bytes, row.seconds.count()), (2 * 4096, 3), "{row:?}");
        }
        assert!(!report.here.is_empty() && report.here == report.there);
    }

    #[test]
    fn what_cannot_be_measured_is_an_error() {
        assert!(Peer::child(Command::new("false")).is_err());
        for (blocks, rounds) in [(vec![5], 1), (vec![0], 1), (vec![], 1), (vec![1], 0)] {
            let error = check(&BenchOptions { blocks, rounds, ..options() }).unwrap_err();
            assert!(matches!(error, TransferError::Argument { .. }), "{error}");
        }
        let mut huge = options();
        huge.geometry.layout.groups[0].layers = (0..60_000).collect();
        huge.geometry.layout.groups[0].kv_heads = u32::MAX;
        let mut peer = Peer::child(child_process("bench")).unwrap();
        let refused = peer.begin(&huge.geometry, None).unwrap_err();
        assert!(refused.to_string().contains("more than"), "{refused}");
    }
}
