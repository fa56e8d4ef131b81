//! The threads that copy blocks between the pool and the store. They end with the shell.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

use baton_roles::tiers::{Command, Move};
use baton_runtime::metrics as names;
use baton_store::KvStore;
use metrics::histogram;

use super::copier::Copier;
use super::courtesy::Courtesy;
use super::layered::Layered;
use super::loading::Loading;
use super::memory::Memory;
use super::pace::Paces;
use crate::engine_thread::Message;
use crate::error::WorkerError;
use crate::{Commands, Node};

/// Most threads that load from disk and object store, each one prefix at a time. What is in host memory has a thread of its own, and does not wait for
/// them.
const FAR: usize = 3;
/// Blocks that a thread asks for before the first of them is copied, so that a disk has enough to do. All threads together may ask for more than the
/// store reads at a time; then they wait for each other.
const AHEAD: usize = 32;
/// Most blocks of a load that are in use in host memory at a time: half of what the store has in use at most, since others need some, too.
const TOGETHER: usize = 2048;

/// A load, and what the engine's thread sees of it.
pub(super) struct Load {
    pub what: Box<Move>,
    pub loading: Arc<Loading>,
    pub asked: Instant,
}

/// What the threads work with.
pub(super) struct Parts<'a> {
    pub store: &'a Arc<KvStore>,
    pub node: &'a Node,
    /// Blocks that there is host memory for. All loads together may use half of it at a time.
    pub slots: usize,
    /// A step can begin before all of its prefix is copied.
    pub by_layer: bool,
    pub garbled: &'a Arc<AtomicU64>,
    pub pace: &'a Arc<Paces>,
}

impl Parts<'_> {
    /// Each thread has a queue to the device of its own.
    fn copier(&self, layered: &Arc<Layered>) -> Result<Copier, WorkerError> {
        Ok(Copier {
            store: Arc::clone(self.store),
            memory: Memory::of(&self.node.pool)?,
            geometry: self.node.geometry.clone(),
            ahead: (self.slots / 4 / (FAR + 1)).clamp(1, AHEAD),
            together: if self.by_layer { (self.slots / 4).min(TOGETHER) } else { 0 },
            layered: Arc::clone(layered),
            garbled: Arc::clone(self.garbled),
            courtesy: Courtesy::new(self.node.courtesy.clone()),
            digests: Vec::new(),
        })
    }
}

/// Threads that load, and what they are given.
#[derive(Debug)]
pub(super) struct Lane {
    loads: mpsc::Sender<Load>,
    /// Loads that go on at a time.
    pub threads: usize,
}

impl Lane {
    /// Has a prefix loaded. False: the threads have ended.
    pub fn load(&self, load: Load) -> bool {
        self.loads.send(load).is_ok()
    }
}

/// Starts the threads that load: those for what is wholly in host memory, and those for the rest.
pub(super) fn start_loads<C: Send + 'static>(
    parts: &Parts<'_>,
    commands: &Commands<C>,
) -> Result<[Lane; 2], WorkerError> {
    let layered = Arc::default();
    let far = FAR.min(parts.slots / 8).max(1);
    Ok([lane("near", 1, parts, commands, &layered)?, lane("far", far, parts, commands, &layered)?])
}

fn lane<C: Send + 'static>(
    name: &str,
    threads: usize,
    parts: &Parts<'_>,
    commands: &Commands<C>,
    layered: &Arc<Layered>,
) -> Result<Lane, WorkerError> {
    let (loads, to_load) = mpsc::channel::<Load>();
    let to_load = Arc::new(Mutex::new(to_load));
    for number in 0..threads {
        let (mut loader, paces) = (parts.copier(layered)?, Arc::clone(parts.pace));
        let (to_load, tell) = (Arc::clone(&to_load), commands.clone());
        let run = move || {
            // The one that waits has the lock: another would wait for the same.
            let next = || to_load.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
            while let Some(load) = next() {
                let (seq, whole) = (load.what.seq, load_one(&mut loader, load, &tell, &paces));
                let digests = whole.then(|| std::mem::take(&mut loader.digests));
                // If the engine is gone, there are no blocks to free.
                let _ = tell.post(Message::Tiers(Command::Loaded(seq, digests)));
            }
        };
        std::thread::Builder::new().name(format!("kv-{name}-{number}")).spawn(run)?;
    }
    Ok(Lane { loads, threads })
}

/// Whatever happens, the engine hears of its end: it would never get the blocks back.
fn load_one<C>(loader: &mut Copier, load: Load, tell: &Commands<C>, paces: &Paces) -> bool {
    let Load { what, loading, asked } = load;
    let streams = || drop(tell.post(Message::Tiers(Command::Streams(what.seq))));
    let lowest = catch_unwind(AssertUnwindSafe(|| loader.load(&what, &loading, &streams, paces))).unwrap_or(None);
    loading.end(lowest.is_some());
    if let Some(tier) = lowest {
        histogram!(names::TIER_LOAD_SECONDS, "tier" => tier.as_str()).record(asked.elapsed().as_secs_f64());
    }
    lowest.is_some()
}

/// Starts the thread that saves.
pub(super) fn start_saves<C: Send + 'static>(
    parts: &Parts<'_>,
    commands: Commands<C>,
) -> Result<mpsc::Sender<Box<Move>>, WorkerError> {
    let (saves, to_save) = mpsc::channel::<Box<Move>>();
    let mut saver = parts.copier(&Arc::default())?;
    std::thread::Builder::new().name("kv-save".to_owned()).spawn(move || {
        for what in to_save {
            let changed = catch_unwind(AssertUnwindSafe(|| saver.save(&what))).unwrap_or(None);
            let _ = commands.post(Message::Tiers(Command::Saved(what.seq, changed)));
        }
    })?;
    Ok(saves)
}
