//! Measures how fast handoffs are, compared with what the machines can do at all. One process drives, another receives, on this host or
//! another.
//!
//! - In each round the same blocks go through memcpy, a plain TCP stream and a handoff over each transport, one after the other, so that
//!   all see the same machines. All rounds are reported.
//! - A handoff is timed from opening to its verified answer, so digests on both sides are included. Memcpy and the plain stream check
//!   nothing.
//! - Latency is the time of a handoff of one block. That takes two round trips: access, then data and its verification.
//!
//! Prints nothing: `table.rs` does.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use baton_transfer::{Pool, Sender, SenderOptions, TransferError, TransferLimits, TransportChoice, TransportKind};
use baton_types::{BlockId, Decoding, PoolGeometry, WorkerId, hash_bytes};

use super::control::{HANDOFF_PATIENCE, machine};
use super::memory::Memory;
use super::peer::Peer;
use super::report::{Bandwidth, BenchOptions, BenchReport, Latency, Samples, Way};

/// Handoffs of one block that are not counted, before those that are.
const WARM_UP: u32 = 5;

/// Measures handoffs to `peer`, which must not have been used before.
pub(super) fn run(options: &BenchOptions, peer: Peer) -> anyhow::Result<BenchReport> {
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
    let handoffs = bench.handoffs();
    Ok(BenchReport { here, there, bandwidth, latency, handoffs })
}

pub(super) fn check(options: &BenchOptions) -> anyhow::Result<()> {
    let most = options.geometry.blocks.iter().copied().max().unwrap_or(0);
    ensure!(options.rounds > 0, "rounds is 0; at least 1 is needed");
    ensure!(!options.blocks.is_empty(), "blocks: none; name at least one number of blocks");
    ensure!(!options.connections.is_empty(), "connections: none; name at least one number of connections");
    match options.blocks.iter().find(|blocks| **blocks == 0 || **blocks > most) {
        Some(blocks) => bail!("blocks is {blocks}; the pool has 1 to {most}"),
        None => Ok(()),
    }
}

/// Blocks of each group in the order in which they are used.
pub(super) fn order(geometry: &PoolGeometry, seed: Option<u64>) -> Vec<Vec<BlockId>> {
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
    memory: Memory,
    /// Per group: blocks in the order in which they are used.
    order: Vec<Vec<BlockId>>,
    /// Each with a session of its own.
    senders: Vec<(Way, Sender)>,
}

impl Bench<'_> {
    fn new(options: &BenchOptions, mut peer: Peer) -> anyhow::Result<Bench<'_>> {
        let geometry = &options.geometry;
        let memory = Memory::new(geometry.bytes())?;
        let ways = (1..).zip(handoffs(options));
        let senders = ways.map(|(number, way)| Ok((way, sender(number, way, options, memory.pool())?)));
        let senders = senders.collect::<Result<_, TransferError>>()?;
        // The peer gets another order: two busy pools have nothing in common.
        peer.begin(geometry, options.scattered.map(|seed| seed.wrapping_add(1)))?;
        let order = order(geometry, options.scattered);
        Ok(Bench { options, peer, memory, order, senders })
    }

    /// Handoffs so far, by what has carried them.
    fn handoffs(&self) -> Vec<(TransportKind, u64)> {
        let paths: Vec<_> =
            self.senders.iter().flat_map(|(_, sender)| sender.paths()).flat_map(|(_, all)| all).collect();
        let of = |kind| paths.iter().filter(|path| path.transport == kind).map(|path| path.handoffs).sum();
        TransportKind::ALL.into_iter().map(|kind| (kind, of(kind))).filter(|(_, count)| *count > 0).collect()
    }

    fn ways(&self) -> Vec<Way> {
        [Way::Memcpy, Way::PlainTcp].into_iter().chain(self.senders.iter().map(|(way, _)| *way)).collect()
    }

    fn bandwidth(&mut self, blocks: u32) -> anyhow::Result<Vec<Bandwidth>> {
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

    fn latency(&mut self, way: Way) -> anyhow::Result<Latency> {
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
    fn once(&mut self, way: Way, blocks: u32) -> anyhow::Result<f64> {
        let of_way = self.senders.iter().find(|(of, _)| *of == way);
        match (way, of_way) {
            (Way::Handoff { transport, verified, .. }, Some((_, sender))) => {
                let target = self.peer.reserve(blocks, verified)?;
                hand_over(sender, transport, &self.options.geometry, &self.order, &target)
            }
            (Way::Memcpy, _) => Ok(self.copy(blocks)),
            _ => {
                let bytes = self.bytes(blocks) as usize;
                self.peer.send_plainly(&self.memory.bytes()[..bytes])
            }
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

    fn copy(&mut self, blocks: u32) -> f64 {
        let ranges: Vec<_> = self.ranges(blocks).collect();
        let start = Instant::now();
        for range in ranges {
            self.memory.copy(range);
        }
        start.elapsed().as_secs_f64()
    }
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

fn sender(number: u64, way: Way, options: &BenchOptions, pool: Pool) -> Result<Sender, TransferError> {
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
        pool,
        transport,
        ucx: options.ucx.clone(),
        tls: None,
        tcp_connections: connections,
        sockets: options.sockets.clone(),
        cpus: options.cpus.clone(),
        courtesy: baton_worker::courtesy(Decoding::default()),
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
) -> anyhow::Result<f64> {
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
    let stats = told.recv().context("the handoff has no outcome")??;
    let seconds = start.elapsed();
    if stats.transport != transport {
        let (asked, used) = (transport.as_str(), stats.transport.as_str());
        let paths = sender.paths().into_iter().flat_map(|(_, paths)| paths);
        let why = paths.filter(|path| path.transport == transport).find_map(|path| path.unused).unwrap_or_default();
        bail!("cannot measure {asked}: the handoff went over {used}: {why}");
    }
    Ok(seconds.max(Duration::from_nanos(1)).as_secs_f64())
}
