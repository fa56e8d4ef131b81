//! The store as its users see it.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_kv_store::{
    Block, BlockKey, BlockName, Buffer, Counters, Decline, Effect, Input, Miss, Shape, Store, StoreConfig, Ticket, Tier,
};
use baton_types::Time;

use crate::answers::{Filling, Pending, Reading};
use crate::memory::Memory;
use crate::queue::{Queue, Work};
use crate::{Disk, Files, OpenError, threads};

/// Most events that are kept for who takes them (I5).
const MOST_EVENTS: usize = 1 << 16;
/// How long the end of a store waits for its disk.
const PATIENCE: Duration = Duration::from_secs(2);
/// Failures of the disk are logged once in so long.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the core is told.
    pub config: StoreConfig,
    /// The directory of the disk tier; needed if `config` has a disk.
    pub directory: PathBuf,
    /// Threads for the disk; reads and writes share them.
    pub threads: usize,
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

/// What somebody waits for.
#[derive(Debug)]
pub(crate) enum Answer {
    Fill(Buffer),
    Declined(Decline),
    Ready(Buffer, Block, Tier),
    Missed(Miss),
}

struct State {
    core: Store,
    next: Ticket,
    answers: BTreeMap<Ticket, Answer>,
    events: VecDeque<Event>,
    gap: bool,
}

type Wake = Box<dyn Fn() + Send + Sync>;

pub(crate) struct Shared {
    state: Mutex<State>,
    answered: Condvar,
    wake: Option<Wake>,
    begun: Instant,
    logged: Mutex<Option<Instant>>,
    /// Of reads, and of writes.
    times: Mutex<[DiskTime; 2]>,
    pub memory: Memory,
    pub queue: Arc<Queue>,
    pub disk: Option<Box<dyn Disk>>,
    pub shape: Shape,
}

/// A store. Its methods may be called from any thread, and wait for nothing but its mutex, unless they say so.
pub struct KvStore {
    shared: Arc<Shared>,
}

impl KvStore {
    /// Opens a store with its file. `wake` is called, on a thread of the store, when a [`Pending`] has an answer.
    pub fn open(settings: Settings, wake: Option<Wake>) -> Result<KvStore, OpenError> {
        let Settings { config, directory, threads } = settings;
        let files =
            config.disk.map(|size| Files::open(&directory, config.identity, &config.shape, size)).transpose()?;
        KvStore::over(files.map(|files| Box::new(files) as Box<dyn Disk>), config, threads, wake)
    }

    /// Opens a store over a disk of the caller's.
    pub fn over(
        disk: Option<Box<dyn Disk>>,
        config: StoreConfig,
        threads: usize,
        wake: Option<Wake>,
    ) -> Result<KvStore, OpenError> {
        let threads = if disk.is_some() { threads.max(1) } else { 0 };
        let (shape, buffers) = (config.shape.clone(), config.buffers as usize);
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
            shape,
        });
        let store = KvStore { shared };
        store.shared.feed(Input::Tick);
        threads::start(&store.shared, threads)?;
        Ok(store)
    }

    /// Says that a prompt has these blocks, held or not: what is asked for often is worth more.
    pub fn seen(&self, names: Vec<BlockName>) {
        self.shared.feed(Input::Seen(names));
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

    /// The shape of the blocks.
    pub fn shape(&self) -> &Shape {
        &self.shared.shape
    }

    /// Waits until the disk is scanned and has nothing to do. False: it has, after `limit`.
    pub fn settled(&self, limit: Duration) -> bool {
        let waited = self.shared.answered.wait_timeout_while(self.shared.state(), limit, |state| !state.core.idle());
        waited.is_ok_and(|(state, _)| state.core.idle())
    }

    /// Writes to disk what is in host memory only and worth it, so that the next process finds it. False: it is not all written after `limit`.
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

impl Drop for KvStore {
    fn drop(&mut self) {
        self.shared.queue.stop();
        if !self.shared.queue.wait_all_left(PATIENCE) {
            tracing::warn!("the KV store's disk does not answer; its threads are left to themselves");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Feeds the core, and passes on what it wants done.
    pub fn feed(&self, input: Input) {
        let answered = self.drive(&mut self.state(), input);
        self.tell(answered);
    }

    /// Feeds an input with a new ticket. Returns the answer, if there is one already.
    fn ask(&self, input: impl FnOnce(Ticket) -> Input) -> (Ticket, Option<Answer>) {
        let mut state = self.state();
        state.next += 1;
        let ticket = state.next;
        self.drive(&mut state, input(ticket));
        let answer = state.answers.remove(&ticket);
        // Others may have been answered, too.
        let others = !state.answers.is_empty();
        drop(state);
        self.tell(others);
        (ticket, answer)
    }

    fn tell(&self, answered: bool) {
        self.answered.notify_all();
        if let Some(wake) = self.wake.as_ref().filter(|_| answered) {
            wake();
        }
    }

    /// True: somebody has an answer.
    fn drive(&self, state: &mut State, input: Input) -> bool {
        let now = Time(self.begun.elapsed().as_nanos() as u64);
        state.core.feed(input, now);
        let mut answered = false;
        while let Some(effect) = state.core.next_effect() {
            let (ticket, answer) = match effect {
                Effect::Scan(segment) => {
                    self.queue.push(Work::Scan(segment));
                    continue;
                }
                Effect::Read { job, place, into, expect } => {
                    self.queue.push(Work::Read { job, place, into, expect });
                    continue;
                }
                Effect::Write { job, place, from, head } => {
                    self.queue.push(Work::Write { job, place, from, head });
                    continue;
                }
                Effect::Sync(_) => {
                    self.queue.push(Work::Sync);
                    continue;
                }
                Effect::Stored(name, tier) => {
                    state.happened(Event::Stored(name, tier));
                    continue;
                }
                Effect::Removed(name, tier) => {
                    state.happened(Event::Removed(name, tier));
                    continue;
                }
                Effect::Fill(ticket, buffer) => (ticket, Answer::Fill(buffer)),
                Effect::Declined(ticket, why) => (ticket, Answer::Declined(why)),
                Effect::Ready(ticket, buffer, block, tier) => (ticket, Answer::Ready(buffer, block, tier)),
                Effect::Missed(ticket, why) => (ticket, Answer::Missed(why)),
            };
            answered = true;
            state.answers.insert(ticket, answer);
        }
        answered
    }

    /// Takes the answer to a ticket; waits for it until `until`.
    pub fn answer(&self, ticket: Ticket, until: Option<Instant>) -> Option<Answer> {
        let mut state = self.state();
        loop {
            if let Some(answer) = state.answers.remove(&ticket) {
                return Some(answer);
            }
            let left = until.and_then(|until| until.checked_duration_since(Instant::now()))?;
            state =
                self.answered.wait_timeout(state, left).map_or_else(|error| error.into_inner().0, |(state, _)| state);
        }
    }

    /// Nobody waits for a ticket any more.
    pub fn cancel(&self, ticket: Ticket) {
        let mut state = self.state();
        self.drive(&mut state, Input::Cancel(ticket));
        state.answers.remove(&ticket);
    }

    /// Takes the time of a read or a write.
    pub fn timed<T>(&self, writes: bool, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = work();
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let time = &mut times[usize::from(writes)];
        (time.count, time.spent) = (time.count + 1, time.spent + begun.elapsed());
        result
    }

    /// Logs a failure of the disk, seldom enough.
    pub fn note<T>(&self, doing: &'static str, result: &std::io::Result<T>) {
        let Err(error) = result else { return };
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_none_or(|at| at.elapsed() > LOG_EVERY) {
            *logged = Some(Instant::now());
            tracing::warn!(%error, doing, "the KV store's disk fails; blocks are computed instead");
        }
    }
}

impl State {
    fn happened(&mut self, event: Event) {
        if self.events.len() >= MOST_EVENTS {
            (self.gap, self.events) = (true, VecDeque::new());
        }
        if !self.gap {
            self.events.push_back(event);
        }
    }
}
