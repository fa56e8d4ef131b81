//! The suite that every transport must pass. It uses real sockets, real shared memory, and real processes where one has to be stopped
//! or killed.
//!
//! This crate's tests run it over host memory and a fake device. With the feature `testing`, a caller that has a device runs the cases
//! between devices over its memory: [`cases`] after [`set_up`].

// Only this crate's own tests use some of it.
#![cfg_attr(not(test), allow(dead_code, unused_imports))]
#![allow(clippy::unwrap_used)]

mod changed;
#[cfg(test)]
mod changes;
mod children;
mod connections;
mod device;
mod endings;
mod fake;
mod faults;
#[cfg(test)]
mod folder;
mod handoffs;
mod misdelivered;
#[cfg(test)]
mod nonsense;
#[cfg(test)]
mod placement;
mod processes;
mod secrets;
#[cfg(test)]
mod spread;
#[cfg(test)]
mod talkers;
mod types;
mod ways;

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use baton_handoff::WriteBatch;
use baton_types::testing::{Random, left_out};
use baton_types::{BlockId, Courtesy, Epoch, KvDtype, KvGroup, KvLayout, PoolGeometry, WorkerId};

pub use children::child;
use connections::{connections, with_connections};
use device::{devices, pool_on, read, write};
pub use fake::{Broken, memory_over};
use faults::{after_each, altered, before_each, held, watched};
use secrets::{tls, with_tls};
use ways::for_each_transport;
pub use ways::{Case, cases};

use crate::link::Link;
use crate::links::Links;
use crate::load::Load;
use crate::sender::Wrap;
use crate::transport::{Progress, Transport};
use crate::{
    Cpus, DeviceMemory, Pool, Receiver, ReceiverEvent, ReceiverOptions, Segment, Sender, SenderOptions, TransferError,
    TransferLimits, TransferStats, TransportChoice, TransportKind, UcxOptions, UcxSettings, Wanted,
};

/// A device in whose memory the suite's pools lie.
pub struct Setup {
    /// Makes a pool of this many bytes on it, a multiple of 8.
    pub memory: Box<dyn Fn(usize) -> Arc<dyn DeviceMemory>>,
    /// UCX transports that reach it, as the variable UCX_TLS names them.
    pub ucx: String,
    /// Arguments that make this program, started again as a process to be stopped or killed, call [`child`] with the same device.
    pub child: Vec<String>,
}

thread_local! {
    static SETUP: RefCell<Option<Rc<Setup>>> = const { RefCell::new(None) };
}

/// From now on, cases run by this thread use this device for pools that are not in host memory.
pub fn set_up(setup: Setup) {
    SETUP.set(Some(Rc::new(setup)));
}

fn setup() -> Option<Rc<Setup>> {
    SETUP.with_borrow(Clone::clone)
}

/// Long enough for any machine; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

/// Limits of tests that hold up an end, which must not be taken for dead.
fn patient() -> TransferLimits {
    TransferLimits { silence: PATIENCE, ..TransferLimits::default() }
}

/// Limits of tests in which a peer falls silent.
fn alert() -> TransferLimits {
    TransferLimits {
        heartbeat: Duration::from_millis(25),
        silence: Duration::from_millis(500),
        ..TransferLimits::default()
    }
}

/// The first blocks of the only group.
fn first(count: u32) -> Vec<Vec<BlockId>> {
    vec![(0..count).map(BlockId).collect()]
}

fn far() -> Instant {
    Instant::now() + PATIENCE
}

/// Two groups of different shapes. Block bytes are not whole digest lanes, except on devices, which move only whole lanes.
fn small() -> PoolGeometry {
    let head_dim = if setup().is_some() { 8 } else { 5 };
    let group =
        |layers: Vec<u32>, kv_heads, window| KvGroup { layers, planes: 2, kv_heads, head_dim, window, sinks: 0 };
    let groups = vec![group(vec![0, 3], 3, None), group(vec![1, 2, 4], 1, Some(8))];
    let layout = KvLayout { version: 1, model: 42, dtype: KvDtype::F16, block_size: 1, groups };
    PoolGeometry { layout, blocks: vec![8, 12] }
}

/// Blocks of 64 KiB, so that a handoff takes many batches and does not fit socket buffers.
pub(crate) fn large() -> PoolGeometry {
    let group = KvGroup { layers: (0..8).collect(), planes: 2, kv_heads: 8, head_dim: 128, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 43, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    PoolGeometry::uniform(layout, 64)
}

fn pool(geometry: &PoolGeometry, seed: u64) -> Arc<Segment> {
    let pool = Segment::create("test-pool", geometry.bytes()).unwrap();
    // SAFETY: nobody else knows the pool yet.
    unsafe { pool.write(0, &noise(geometry.bytes(), seed)) };
    Arc::new(pool)
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    Random(seed).bytes(bytes)
}

/// A block's bytes in every layer.
fn block(pool: &Pool, geometry: &PoolGeometry, group: usize, block: BlockId) -> Vec<u8> {
    let layers = 0..geometry.layout.groups[group].layers.len();
    let ranges = layers.map(|layer| geometry.block_range(group, layer, block)).map(|range| (range.start, range.len()));
    read(pool, &ranges.collect::<Vec<_>>())
}

fn kind(choice: TransportChoice) -> TransportKind {
    match choice {
        TransportChoice::Shm => TransportKind::Shm,
        TransportChoice::Ucx => TransportKind::Ucx,
        TransportChoice::CudaIpc => TransportKind::CudaIpc,
        _ => TransportKind::Tcp,
    }
}

/// The directory of the UCX that `tools/fetch-ucx` finds or fetches, once per process. The error says why there is none.
fn ucx_directory() -> &'static Result<PathBuf, String> {
    static PATH: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PATH.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fetch-ucx");
        let found = Command::new(script).output().map_err(|e| e.to_string())?;
        match found.status.success() {
            true => Ok(Path::new(String::from_utf8_lossy(&found.stdout).trim()).join("lib")),
            false => Err(String::from_utf8_lossy(&found.stderr).into_owned()),
        }
    })
}

/// Whether UCX is here; prints a note if not.
pub fn ucx_is_here() -> bool {
    if let Err(reason) = ucx_directory() {
        left_out(format_args!("no UCX: {reason}"));
    }
    ucx_directory().is_ok()
}

/// UCX over TCP, or over the transports that reach the device, unless UCX_TLS is set. Without UCX, settings that find none.
pub fn ucx() -> UcxSettings {
    let by = setup().map_or("tcp".to_owned(), |setup| setup.ucx.clone());
    let tls = std::env::var_os("UCX_TLS").is_none().then(|| ("TLS".to_owned(), by));
    UcxSettings { directory: ucx_directory().clone().ok(), options: UcxOptions(tls.into_iter().collect()) }
}

/// The decode end, with its pool and the events it reported.
struct Decode {
    receiver: Receiver,
    events: mpsc::Receiver<ReceiverEvent>,
    pool: Pool,
    geometry: PoolGeometry,
}

impl Decode {
    fn new(geometry: PoolGeometry, worker: u64) -> Decode {
        Decode::listening(geometry, worker, "127.0.0.1:0")
    }

    fn listening(geometry: PoolGeometry, worker: u64, tcp: &str) -> Decode {
        Decode::limited(geometry, worker, tcp, patient())
    }

    fn limited(geometry: PoolGeometry, worker: u64, tcp: &str, limits: TransferLimits) -> Decode {
        let pool = pool_on(devices().decode, &geometry, worker);
        Decode::over(geometry, worker, tcp, limits, (pool.clone(), pool))
    }

    /// `pool` holds the bytes, for the test to look at. `reached` is the same pool as the receiver gets it.
    fn over(
        geometry: PoolGeometry,
        worker: u64,
        tcp: &str,
        limits: TransferLimits,
        (pool, reached): (Pool, Pool),
    ) -> Decode {
        let (tell, events) = mpsc::channel();
        let options = ReceiverOptions {
            worker: WorkerId(worker),
            tcp: tcp.parse().unwrap(),
            advertise: None,
            geometry: geometry.clone(),
            pool: reached,
            ucx: ucx(),
            tls: tls(),
            sockets: None,
            cpus: Cpus::default(),
            courtesy: Courtesy::default(),
            limits,
            verify: true,
        };
        let receiver = Receiver::bind(options, Box::new(move |event| drop(tell.send(event)))).unwrap();
        Decode { receiver, events, pool, geometry }
    }

    fn reserve(&self, epoch: u64, blocks: &[Vec<BlockId>]) -> Vec<u8> {
        self.try_reserve(epoch, blocks, PATIENCE).unwrap()
    }

    fn try_reserve(&self, epoch: u64, blocks: &[Vec<BlockId>], lease: Duration) -> Result<Vec<u8>, TransferError> {
        // The transfer does not interpret these. In this suite group 0 travels from its block 0 on, group 1 from its block 1 on.
        let first: Vec<u32> = (0..blocks.len() as u32).collect();
        self.receiver.reserve(Epoch(epoch), &Wanted { tokens: 100, first: &first, blocks }, lease)
    }

    fn event(&self) -> ReceiverEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    #[track_caller]
    fn expect_failed(&self, epoch: u64) -> TransferError {
        match self.event() {
            ReceiverEvent::Failed { epoch: of, error, .. } if of == Epoch(epoch) => error,
            other => panic!("failure of e{epoch:x} expected, not {other:?}"),
        }
    }

    #[track_caller]
    fn expect_fenced(&self, epoch: u64) {
        assert_eq!(self.event(), ReceiverEvent::Fenced { epoch: Epoch(epoch) });
    }

    #[track_caller]
    fn expect_verified(&self, epoch: u64) -> Vec<u8> {
        match self.event() {
            ReceiverEvent::Verified { epoch: of, tail, .. } if of == Epoch(epoch) => tail,
            other => panic!("verification of e{epoch:x} expected, not {other:?}"),
        }
    }
}

/// The prefill end, with its pool.
struct Prefill {
    sender: Sender,
    pool: Pool,
    geometry: PoolGeometry,
}

impl Prefill {
    fn new(geometry: PoolGeometry, worker: u64, transport: TransportChoice) -> Prefill {
        Prefill::faulty(geometry, worker, transport, Arc::new(|transport| transport))
    }

    fn faulty(geometry: PoolGeometry, worker: u64, transport: TransportChoice, wrap: Wrap) -> Prefill {
        Prefill::limited(geometry, worker, transport, wrap, patient())
    }

    fn limited(
        geometry: PoolGeometry,
        worker: u64,
        transport: TransportChoice,
        wrap: Wrap,
        limits: TransferLimits,
    ) -> Prefill {
        let pool = pool_on(devices().prefill, &geometry, worker);
        Prefill::over(geometry, worker, transport, wrap, limits, (pool.clone(), pool))
    }

    /// `pool` holds the bytes, for the test to look at. `reached` is the same pool as the sender gets it.
    fn over(
        geometry: PoolGeometry,
        worker: u64,
        transport: TransportChoice,
        wrap: Wrap,
        limits: TransferLimits,
        (pool, reached): (Pool, Pool),
    ) -> Prefill {
        let options = SenderOptions {
            worker: WorkerId(worker),
            geometry: geometry.clone(),
            pool: reached,
            transport,
            ucx: if transport == TransportChoice::Ucx { ucx() } else { UcxSettings::default() },
            tls: tls(),
            tcp_connections: connections(),
            sockets: None,
            cpus: Cpus::default(),
            courtesy: Courtesy::default(),
            limits,
            convert: None,
            verify: true,
            on_trouble: |_, _| {},
        };
        Prefill { sender: Sender::with_wrap(options, wrap).unwrap(), pool, geometry }
    }

    /// Writes local block `first + i` to index i of every group, layer by layer, and completes.
    fn send(&self, target: &[u8], first: u32) -> Outcome {
        self.send_until(target, first, far())
    }

    fn send_until(&self, target: &[u8], first: u32, deadline: Instant) -> Outcome {
        let (tell, told) = mpsc::channel();
        let mut handoff = match self.sender.open(target, deadline) {
            Ok(handoff) => handoff,
            Err(error) => {
                tell.send(Err(error)).unwrap();
                return Outcome(told);
            }
        };
        for (group, count) in handoff.block_counts().to_vec().into_iter().enumerate() {
            let pairs: Vec<_> = (0..count).map(|i| (BlockId(first + i), i)).collect();
            for layer in 0..self.geometry.layout.groups[group].layers.len() {
                // A handoff may have failed already; the completion says why.
                let _ = handoff.write(group, layer, &pairs);
            }
        }
        handoff.complete(b"tail".to_vec(), Box::new(move |outcome| drop(tell.send(outcome))));
        Outcome(told)
    }
}

/// A completion to wait for. Panics when it is reported twice or never.
struct Outcome(mpsc::Receiver<Result<TransferStats, TransferError>>);

impl Outcome {
    #[track_caller]
    fn wait(self) -> Result<TransferStats, TransferError> {
        let outcome = self.0.recv_timeout(PATIENCE).expect("an outcome");
        assert!(self.0.recv().is_err(), "reported twice");
        outcome
    }
}
