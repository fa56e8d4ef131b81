//! What a store's users and its threads share: the core, its answers and events, and how its effects are passed on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_kv_store::{Block, Buffer, Decline, Effect, Identity, Input, Miss, Shape, Store, Ticket, Tier};
use baton_types::Time;
use tokio::sync::mpsc::UnboundedSender;

use crate::Disk;
use crate::memory::Memory;
use crate::objects::Call;
use crate::queue::{Queue, Work};
use crate::store::{DiskTime, Event};
use crate::syncs::Syncs;

/// Most events that are kept for who takes them (I5).
const MOST_EVENTS: usize = 1 << 16;
/// Failures of the disk are logged once in so long.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// What somebody waits for.
#[derive(Debug)]
pub(crate) enum Answer {
    Fill(Buffer),
    Declined(Decline),
    Ready(Buffer, Block, Tier),
    Missed(Miss),
}

pub(crate) struct State {
    pub core: Store,
    pub next: Ticket,
    pub answers: BTreeMap<Ticket, Answer>,
    pub events: VecDeque<Event>,
    pub gap: bool,
}

pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;

pub(crate) struct Shared {
    pub state: Mutex<State>,
    pub answered: Condvar,
    pub wake: Option<Wake>,
    pub begun: Instant,
    pub logged: Mutex<Option<Instant>>,
    /// Of reads, and of writes.
    pub times: Mutex<[DiskTime; 2]>,
    pub memory: Memory,
    pub queue: Arc<Queue>,
    pub disk: Option<Box<dyn Disk>>,
    pub syncs: Mutex<Syncs>,
    /// To the thread of the object store. Its calls are bounded by the core's limits.
    pub objects: Mutex<Option<UnboundedSender<Call>>>,
    pub shape: Shape,
    pub identity: Identity,
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Feeds the core, and passes on what it wants done.
    pub fn feed(&self, input: Input) {
        let answered = self.drive(&mut self.state(), input);
        self.tell(answered);
    }

    /// Feeds an input with a new ticket. Returns the answer, if there is one already.
    pub fn ask(&self, input: impl FnOnce(Ticket) -> Input) -> (Ticket, Option<Answer>) {
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
                Effect::List { most } => {
                    self.call(Call::List { most });
                    continue;
                }
                Effect::Fetch { job, object, into, expect } => {
                    self.call(Call::Fetch { job, object, into, expect });
                    continue;
                }
                Effect::Upload { job, object, from, head } => {
                    self.call(Call::Upload { job, object, from, head });
                    continue;
                }
                Effect::Remove { job, object } => {
                    self.call(Call::Remove { job, object });
                    continue;
                }
                Effect::Sync(_) => {
                    self.sync_if(Syncs::complete);
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

    /// Syncs the file, if it is time.
    pub fn sync_if(&self, is_time: impl FnOnce(&mut Syncs, Instant) -> bool) {
        if is_time(&mut self.syncs.lock().unwrap_or_else(PoisonError::into_inner), Instant::now()) {
            self.queue.push(Work::Sync);
        }
    }

    /// Has the object store do something. When the store ends, nobody does it.
    fn call(&self, call: Call) {
        let thread = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.as_ref() {
            // It ends with the store.
            let _ = thread.send(call);
        }
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

    /// Logs a failure of the disk or of the object store, seldom enough.
    pub fn note<T>(&self, who: &'static str, doing: &'static str, result: &std::io::Result<T>) {
        let Err(error) = result else { return };
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_none_or(|at| at.elapsed() > LOG_EVERY) {
            *logged = Some(Instant::now());
            tracing::warn!(%error, doing, "the KV store's {who} fails; blocks are computed instead");
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
