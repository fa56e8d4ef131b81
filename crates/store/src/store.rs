//! The store as its users see it.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_kv_store::{
    BlockKey, BlockName, Counters, Decline, Input, Miss, Shape, Store, StoreConfig, Tier, object_bytes,
};
use baton_types::Courtesy;

use crate::answers::{Filling, Pending, Reading};
use crate::folder::FileName;
use crate::memory::Memory;
use crate::queue::Queue;
use crate::shared::{Answer, Shared, State, Wake};
use crate::syncs::Syncs;
use crate::{About, Disk, Files, Objects, OpenError, objects, threads};

/// How long the end of a store waits for its disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the core is told.
    pub config: StoreConfig,
    /// The directory of the disk tier; needed if `config` has a disk. If it cannot be used, the store has no disk.
    pub directory: PathBuf,
    /// The object tier; needed if `config` has objects.
    pub objects: Option<Objects>,
    /// Threads for the disk; reads and writes share them.
    pub threads: usize,
    /// When those threads give way to ones that compute.
    pub courtesy: Courtesy,
    /// What the KV is of. It is written beside file and objects, for those who look there; None: they can only see sizes.
    pub about: Option<About>,
}

/// Reads or writes of the disk so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskTime {
    /// How many.
    pub count: u64,
    /// How long they took, each from the time it began.
    pub spent: Duration,
}

/// A block came to a tier or left it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It came.
    Stored(BlockName, Tier),
    /// It left.
    Removed(BlockName, Tier),
    /// Events were lost, since nobody took them: [`KvStore::snapshot`] has all.
    Gap,
}

/// What came of a get.
#[derive(Debug)]
pub enum Got {
    /// The block is in host memory.
    Ready(Reading),
    /// It is being read from disk.
    Pending(Pending),
    /// It cannot be had.
    Missed(Miss),
}

/// A store. Its methods may be called from any thread, and wait for nothing but its mutex, unless they say so.
pub struct KvStore {
    shared: Arc<Shared>,
}

impl KvStore {
    /// Opens a store with its file. `wake` is called, on a thread of the store, when a [`Pending`] has an answer. If the file system does not let it
    /// make, read or write the file, as on a disk that is read-only, full or broken, it logs that and goes on without the disk.
    ///
    /// # Errors
    /// The settings cannot work, another process uses the directory, or there is not enough memory or threads.
    pub fn open(settings: Settings, wake: Option<Wake>) -> Result<KvStore, OpenError> {
        let Settings { mut config, directory, objects, threads, courtesy, about } = settings;
        // What cannot work is refused, whatever the disk's state.
        config.check()?;
        let files = match config.disk {
            Some(size) => opened(&directory, Files::open(&directory, config.identity, &config.shape, size))?,
            None => None,
        };
        config.disk = config.disk.filter(|_| files.is_some());
        let objects = objects.map(|objects| objects.with_about(about.clone()));
        if let (Some(about), Some(size)) = (about, config.disk) {
            let (identity, stride) = (config.identity, config.shape.stride() as u64);
            about.write(&directory, FileName { identity, stride, records: size.records });
        }
        let disk = files.map(|files| Box::new(files) as Box<dyn Disk>);
        KvStore::start(disk, objects, config, (threads, &courtesy), wake)
    }

    /// Opens a store over a disk and an object store of the caller's. Its threads give way to nobody.
    pub fn over(
        disk: Option<Box<dyn Disk>>,
        objects: Option<Objects>,
        config: StoreConfig,
        threads: usize,
        wake: Option<Wake>,
    ) -> Result<KvStore, OpenError> {
        KvStore::start(disk, objects, config, (threads, &Courtesy::default()), wake)
    }

    fn start(
        disk: Option<Box<dyn Disk>>,
        objects: Option<Objects>,
        config: StoreConfig,
        (threads, courtesy): (usize, &Courtesy),
        wake: Option<Wake>,
    ) -> Result<KvStore, OpenError> {
        let threads = if disk.is_some() { threads.max(1) } else { 0 };
        let (shape, identity, buffers) = (config.shape.clone(), config.identity, config.buffers as usize);
        let (to_objects, calls) = tokio::sync::mpsc::unbounded_channel();
        let (answers, events) = (BTreeMap::new(), VecDeque::new());
        let state = State { core: Store::new(config)?, next: 0, answers, events, gap: false };
        let shared = Arc::new(Shared {
            memory: Memory::new(buffers, shape.stride())?,
            state: Mutex::new(state),
            answered: Condvar::new(),
            wake,
            begun: Instant::now(),
            logged: Mutex::new(None),
            times: Mutex::default(),
            queue: Arc::new(Queue::new(threads)),
            disk,
            syncs: Mutex::new(Syncs::new(Instant::now())),
            objects: Mutex::new(objects.is_some().then_some(to_objects)),
            shape,
            identity,
        });
        let store = KvStore { shared };
        if let Some(objects) = objects {
            objects::start(&store.shared, objects, calls)?;
        }
        store.shared.feed(Input::Tick);
        threads::start(&store.shared, threads, courtesy)?;
        Ok(store)
    }

    /// Says that a prompt has these blocks, held or not: what is asked for often is worth more.
    pub fn seen(&self, names: Vec<BlockName>) {
        self.shared.feed(Input::Seen(names));
    }

    /// Lets go on what rested after a failure. To be called every now and then: a store that nobody asks for anything has no clock.
    pub fn tick(&self) {
        self.shared.feed(Input::Tick);
        self.shared.sync_if(Syncs::is_time);
    }

    /// Offers a block. Whoever gets a [`Filling`] copies the data into it.
    pub fn put(&self, key: BlockKey) -> Result<Filling, Decline> {
        let groups = key.groups;
        match self.shared.ask(|ticket| Input::Put(ticket, key)) {
            (ticket, Some(Answer::Fill(buffer))) => Ok(Filling::new(self.shared.clone(), ticket, buffer, groups)),
            (_, Some(Answer::Declined(why))) => Err(why),
            _ => Err(Decline::Busy),
        }
    }

    /// Asks for a block.
    pub fn get(&self, key: BlockKey) -> Got {
        match self.shared.ask(|ticket| Input::Get(ticket, key)) {
            (ticket, Some(Answer::Ready(buffer, block, tier))) => {
                Got::Ready(Reading::new(self.shared.clone(), ticket, buffer, block, tier))
            }
            (_, Some(Answer::Missed(why))) => Got::Missed(why),
            (_, Some(Answer::Fill(_) | Answer::Declined(_))) => Got::Missed(Miss::Busy),
            (ticket, None) => Got::Pending(Pending::new(self.shared.clone(), ticket)),
        }
    }

    /// How many leading blocks of a prompt are held, and in which tier each is.
    pub fn held(&self, prompt: &[BlockName]) -> Vec<Tier> {
        self.shared.state().core.held(prompt)
    }

    /// The same, and which layer groups of each block are held, one bit each.
    pub fn held_groups(&self, prompt: &[BlockName]) -> Vec<(Tier, u32)> {
        self.shared.state().core.held_groups(prompt)
    }

    /// Keeps a block, or no longer.
    pub fn pin(&self, name: BlockName, pinned: bool) {
        self.shared.feed(if pinned { Input::Pin(name) } else { Input::Unpin(name) });
    }

    /// What came and went since the last call.
    pub fn events(&self) -> Vec<Event> {
        let mut state = self.shared.state();
        let gap = std::mem::take(&mut state.gap).then_some(Event::Gap);
        gap.into_iter().chain(std::mem::take(&mut state.events)).collect()
    }

    /// All blocks, for who begins or has missed events. Events that were not taken are part of it, and dropped.
    pub fn snapshot(&self) -> Vec<(BlockName, Tier)> {
        let mut state = self.shared.state();
        (state.gap, state.events) = (false, VecDeque::new());
        state.core.snapshot().collect()
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        *self.shared.state().core.counters()
    }

    /// Number of blocks in a tier.
    pub fn blocks(&self, tier: Tier) -> u64 {
        self.shared.state().core.blocks(tier)
    }

    /// Most bytes of each tier, in the order of `Tier::ALL`; 0: there is no such tier.
    pub fn limit_bytes(&self) -> [u64; Tier::ALL.len()] {
        let state = self.shared.state();
        let config = state.core.config();
        let disk = config.disk.map_or(0, |disk| u64::from(disk.segments) * disk.segment_bytes(&config.shape));
        let object = config.object.map_or(0, |object| object.most * object_bytes(&config.shape));
        [u64::from(config.buffers) * config.shape.stride() as u64, disk, object]
    }

    /// The shape of the blocks.
    pub fn shape(&self) -> &Shape {
        &self.shared.shape
    }

    /// Waits until the disk is scanned, the object store is listed, and both have nothing to do. False: it has, after `limit`.
    pub fn settled(&self, limit: Duration) -> bool {
        let waited = self.shared.answered.wait_timeout_while(self.shared.state(), limit, |state| !state.core.idle());
        waited.is_ok_and(|(state, _)| state.core.idle())
    }

    /// Writes to disk, and uploads, what is in host memory only and worth it, so that the next process finds it. False: it is not all written after `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        self.shared.feed(Input::Flush);
        self.settled(limit)
    }

    /// How long the disk has taken for reads, and for writes.
    pub fn disk_times(&self) -> [DiskTime; 2] {
        *self.shared.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks all accounts, in time linear in the blocks.
    pub fn check(&self) -> Result<(), OpenError> {
        Ok(self.shared.state().core.check()?)
    }
}

/// The file, or none if the file system does not let it be used. That another process uses the directory stays an error: two workers were given the
/// same one.
fn opened(directory: &Path, files: Result<Files, OpenError>) -> Result<Option<Files>, OpenError> {
    match files {
        Ok(files) => Ok(Some(files)),
        Err(OpenError::Directory { doing, path, cause }) => {
            tracing::warn!(
                directory = %directory.display(),
                path = %path.display(),
                doing,
                error = %cause,
                "the KV store cannot use its disk and goes on without it until this process starts again: KV is in host memory and the object \
                 store only; see that the directory is mounted and may be written to"
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl Drop for KvStore {
    fn drop(&mut self) {
        // What the object store is doing is given up.
        *self.shared.objects.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.shared.queue.stop();
        if !self.shared.queue.wait_all_left(PATIENCE) {
            tracing::warn!("the KV store's disk does not answer; its threads are left to themselves");
        }
    }
}
