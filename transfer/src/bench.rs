//! How fast handoffs are, next to what the machine can do at all: one process drives, a child of it receives.
//!
//! In each round the same blocks go through memcpy, a shared-memory handoff, a plain TCP stream and a TCP handoff, one
//! after the other, so that all see the same machine; the medians over the rounds are reported. A handoff is timed
//! from opening to its verified answer, so digests on both sides are included; memcpy and the plain stream check nothing.

pub(crate) mod hex;
mod serve;

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baton_types::{BlockId, PoolGeometry, WorkerId};

use crate::descriptor::encode_layout;
use crate::error::TransferError;
use crate::options::{Limits, SenderOptions, TransportChoice, TransportKind, UcxSettings};
use crate::segment::Segment;
use crate::sender::Sender;
use crate::tcp;
pub use serve::serve;

/// Longest time for one handoff.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of one write of the plain stream.
const PLAIN_CHUNK: usize = 256 << 10;
/// Stands before every answer of the child, whose output may hold other lines.
pub(crate) const MARK: &str = "@ ";

/// Asks the child for a target whose bytes are checked.
const VERIFIED: &str = "verified";

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Shape of both pools; a handoff moves all of its blocks.
    pub geometry: PoolGeometry,
    /// Rounds, at least 1.
    pub rounds: u32,
    /// Also handoffs whose bytes nobody checks, to see what checking costs. Workers always check.
    pub unverified: bool,
    /// Also handoffs over UCX, set up like this on both ends.
    pub ucx: Option<UcxSettings>,
}

/// Medians over the rounds, in bytes a second.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchReport {
    /// Bytes of one handoff.
    pub bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// Copying block by block inside one process.
    pub memcpy: f64,
    /// A handoff over shared memory.
    pub shm: f64,
    /// One TCP stream over loopback, nothing checked.
    pub plain_tcp: f64,
    /// A handoff over TCP.
    pub tcp: f64,
    /// Handoffs whose bytes nobody checks, if asked for: over shared memory, and over TCP.
    pub unverified: Option<[f64; 2]>,
    /// A handoff over UCX, if asked for.
    pub ucx: Option<f64>,
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |rate: f64| rate / 1e9;
        let (memcpy, plain) = (("memcpy", self.memcpy), ("plain TCP", self.plain_tcp));
        let mut rows = vec![("memcpy", self.memcpy, None), ("shm handoff", self.shm, Some(memcpy))];
        rows.extend(self.unverified.map(|[shm, _]| ("  unverified", shm, Some(memcpy))));
        rows.extend([("plain TCP", self.plain_tcp, None), ("TCP handoff", self.tcp, Some(plain))]);
        rows.extend(self.unverified.map(|[_, tcp]| ("  unverified", tcp, Some(plain))));
        rows.extend(self.ucx.map(|ucx| ("UCX handoff", ucx, Some(plain))));
        write!(f, "{} rounds of {:.1} MB between two processes, medians", self.rounds, self.bytes as f64 / 1e6)?;
        for (name, rate, beside) in rows {
            write!(f, "\n{name:<13} {:6.2} GB/s", gb(rate))?;
            if let Some((what, base)) = beside {
                write!(f, "   {:.2} of {what}", rate / base)?;
            }
        }
        Ok(())
    }
}

/// Measures. `child` must run this same program so that it calls [`serve`]; its standard input and output are used.
pub fn run(options: &BenchOptions, child: Command) -> Result<BenchReport, TransferError> {
    if options.rounds == 0 {
        return Err(TransferError::argument("rounds", "0; at least 1 is needed"));
    }
    let geometry = &options.geometry;
    let mut peer = Peer::start(child, options)?;
    let ours = filled(geometry)?;
    let scratch = Segment::create("bench-scratch", geometry.bytes())?;
    let senders = [TransportChoice::Shm, TransportChoice::Tcp]
        .map(|choice| Ok([sender(choice, options, &ours, true)?, sender(choice, options, &ours, false)?]));
    let [shm, tcp]: [Result<[Sender; 2], TransferError>; 2] = senders;
    let ([shm, shm_unverified], [tcp, tcp_unverified]) = (shm?, tcp?);
    let ucx = options.ucx.as_ref().map(|_| sender(TransportChoice::Ucx, options, &ours, true)).transpose()?;
    let mut stream = peer.plain_stream()?;
    let plain = |stream: &mut TcpStream| send_plainly(stream, &ours, geometry.bytes());
    let mut seconds: [Vec<f64>; 7] = Default::default();
    // The first round only touches every page and fills every cache.
    for round in 0..=options.rounds {
        let unverified = |sender: &Sender, peer: &mut Peer| match options.unverified {
            true => hand_over(sender, geometry, peer, false),
            false => Ok(f64::NAN),
        };
        let taken = [
            copy(geometry, &ours, &scratch),
            hand_over(&shm, geometry, &mut peer, true)?,
            unverified(&shm_unverified, &mut peer)?,
            plain(&mut stream).map_err(|e| TransferError::os("plain stream", e))?,
            hand_over(&tcp, geometry, &mut peer, true)?,
            unverified(&tcp_unverified, &mut peer)?,
            ucx.as_ref().map_or(Ok(f64::NAN), |ucx| hand_over(ucx, geometry, &mut peer, true))?,
        ];
        if round > 0 {
            seconds.iter_mut().zip(taken).for_each(|(all, one)| all.push(one));
        }
    }
    let bytes = geometry.bytes() as u64;
    let rates = seconds.map(|all| bytes as f64 / median(all));
    let [memcpy, shm, shm_unverified, plain_tcp, tcp, tcp_unverified, over_ucx] = rates;
    let unverified = options.unverified.then_some([shm_unverified, tcp_unverified]);
    let ucx = ucx.map(|_| over_ucx);
    Ok(BenchReport { bytes, rounds: options.rounds, memcpy, shm, plain_tcp, tcp, unverified, ucx })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A pool with no two equal blocks.
fn filled(geometry: &PoolGeometry) -> Result<Arc<Segment>, TransferError> {
    let segment = Segment::create("bench-pool", geometry.bytes())?;
    let words = geometry.bytes().div_ceil(8) as u64;
    let bytes: Vec<u8> = (0..words).flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    // SAFETY: nobody else knows the segment yet.
    unsafe { segment.write(0, &bytes[..geometry.bytes()]) };
    Ok(Arc::new(segment))
}

/// A sender of its own, and so a session of its own, for each way.
fn sender(
    transport: TransportChoice,
    options: &BenchOptions,
    segment: &Arc<Segment>,
    verify: bool,
) -> Result<Sender, TransferError> {
    let number = match transport {
        TransportChoice::Ucx => 5,
        other => 1 + u64::from(verify) + 2 * u64::from(other == TransportChoice::Shm),
    };
    Sender::new(SenderOptions {
        worker: WorkerId(number),
        geometry: options.geometry.clone(),
        segment: segment.clone(),
        transport,
        ucx: options.ucx.clone().unwrap_or_default(),
        limits: Limits::default(),
        convert: None,
        verify,
    })
}

/// Every layer's part of every block.
fn blocks(geometry: &PoolGeometry) -> impl Iterator<Item = std::ops::Range<usize>> {
    let layers = |g: usize| 0..geometry.layout.groups[g].layers.len();
    let of = move |g, l| (0..geometry.blocks[g]).map(move |b| geometry.block_range(g, l, BlockId(b)));
    (0..geometry.blocks.len()).flat_map(move |g| layers(g).flat_map(move |l| of(g, l)))
}

fn copy(geometry: &PoolGeometry, from: &Segment, to: &Segment) -> f64 {
    let start = Instant::now();
    for range in blocks(geometry) {
        if let (Some(source), Some(target)) = (from.at(range.start, range.len()), to.at(range.start, range.len())) {
            // SAFETY: checked ranges of two mappings; nothing writes to either meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(source, target, range.len()) };
        }
    }
    start.elapsed().as_secs_f64()
}

fn hand_over(sender: &Sender, geometry: &PoolGeometry, peer: &mut Peer, verify: bool) -> Result<f64, TransferError> {
    let target = peer.reserve(verify)?;
    let (tell, told) = mpsc::channel();
    let start = Instant::now();
    let mut handoff = sender.open(&target, start + PATIENCE)?;
    for (group, count) in geometry.blocks.iter().enumerate() {
        let pairs: Vec<_> = (0..*count).map(|i| (BlockId(i), i)).collect();
        for layer in 0..geometry.layout.groups[group].layers.len() {
            handoff.write(group, layer, &pairs)?;
        }
    }
    handoff.complete(Vec::new(), Box::new(move |outcome| drop(tell.send(outcome))));
    let stats = told.recv().map_err(|_| TransferError::Closed)??;
    if sender.transport() == TransportChoice::Ucx && stats.transport != TransportKind::Ucx {
        return Err(TransferError::os("measure UCX", "the handoff went over TCP; the log says why"));
    }
    Ok(start.elapsed().as_secs_f64())
}

fn send_plainly(stream: &mut TcpStream, from: &Segment, bytes: usize) -> std::io::Result<f64> {
    let start = Instant::now();
    let mut offset = 0;
    while offset < bytes {
        let len = PLAIN_CHUNK.min(bytes - offset);
        let source = from.at(offset, len).ok_or(std::io::ErrorKind::InvalidInput)?;
        // SAFETY: a checked range of a mapping nothing writes to.
        stream.write_all(unsafe { std::slice::from_raw_parts(source, len) })?;
        offset += len;
    }
    // The peer's answer: all of it is there.
    stream.read_exact(&mut [0])?;
    Ok(start.elapsed().as_secs_f64())
}

/// The receiving child.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(mut command: Command, options: &BenchOptions) -> Result<Peer, TransferError> {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|e| TransferError::os("start the benchmark's child", e))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(TransferError::os("start the benchmark's child", "no pipes"));
        };
        let mut peer = Peer { child, input, output: BufReader::new(output) };
        let geometry = &options.geometry;
        let counts: Vec<String> = geometry.blocks.iter().map(u32::to_string).collect();
        let layout = hex::encode(&encode_layout(&geometry.layout));
        let ucx = options.ucx.clone().unwrap_or_default();
        let directory = hex::encode(ucx.directory.unwrap_or_default().as_os_str().as_bytes());
        let settings = hex::encode(ucx.options.to_string().as_bytes());
        peer.say(&format!("{layout} {} {directory} {settings}", counts.join(",")))?;
        Ok(peer)
    }

    fn say(&mut self, line: &str) -> Result<(), TransferError> {
        writeln!(self.input, "{line}").map_err(|e| TransferError::os("talk to the benchmark's child", e))
    }

    fn hear(&mut self) -> Result<String, TransferError> {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line);
            if read.map_err(|e| TransferError::os("listen to the benchmark's child", e))? == 0 {
                return Err(TransferError::os("listen to the benchmark's child", "it ended"));
            }
            if let Some((_, answer)) = line.split_once(MARK) {
                return Ok(answer.trim().to_owned());
            }
        }
    }

    fn plain_stream(&mut self) -> Result<TcpStream, TransferError> {
        let port = self.hear()?.parse::<u16>().map_err(|e| TransferError::os("read the child's port", e))?;
        let connected = tcp::connect("127.0.0.1", port, Instant::now() + PATIENCE).and_then(|stream| {
            tcp::tune(&stream)?;
            stream.set_nonblocking(false)?;
            Ok(stream)
        });
        connected.map_err(|e| TransferError::os("open the plain stream", e))
    }

    fn reserve(&mut self, verify: bool) -> Result<Vec<u8>, TransferError> {
        self.say(if verify { VERIFIED } else { "unverified" })?;
        let line = self.hear()?;
        hex::decode(&line).ok_or_else(|| TransferError::os("read the child's target", line))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, KvLayout};

    use super::*;
    use crate::conformance::{ucx, ucx_is_here};

    #[test]
    fn hex_survives_and_other_text_is_refused() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(hex::decode(&hex::encode(&bytes)), Some(bytes));
        for text in ["0", "0g", "é", "00 0"] {
            assert_eq!(hex::decode(text), None, "{text}");
        }
    }

    #[test]
    fn a_run_measures_what_is_asked_for_and_a_child_that_dies_is_an_error() {
        let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 1, head_dim: 64, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let ucx = ucx_is_here().then(ucx);
        let rows = 7 + usize::from(ucx.is_some());
        let options = BenchOptions { geometry: PoolGeometry::uniform(layout, 4), rounds: 2, unverified: true, ucx };
        let report = run(&options, crate::conformance::child_process("bench")).unwrap();
        assert_eq!((report.bytes, report.rounds), (2 * 4 * 4096, 2));
        assert!([report.memcpy, report.shm, report.plain_tcp, report.tcp].iter().all(|rate| *rate > 0.0));
        assert!(report.unverified.is_some_and(|rates| rates.iter().all(|rate| *rate > 0.0)));
        assert_eq!(report.to_string().lines().count(), rows);
        assert!(report.ucx.is_none_or(|rate| rate > 0.0));
        assert!(report.to_string().contains("of plain TCP"));
        assert!(run(&options, Command::new("false")).is_err());
        assert!(run(&BenchOptions { rounds: 0, ..options }, Command::new("false")).is_err());
    }
}
