//! Names of blocks that somewhere in the worker entered and left: gathered, and told as numbered events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_engine::{BlockName, CacheChange, CacheFeed, Cached, Tally};
use baton_proto::v1::{self, worker_event::Event};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver};
use tokio::sync::mpsc;
use tonic::Status;

/// Most changes that a reader may be behind. They are few seconds, and readers share them.
pub(crate) const BEHIND: usize = 256;
/// Most names in an event: few enough that a router takes them in at once without keeping others waiting.
pub(crate) const EVENT_NAMES: usize = 4096;

/// Where events go.
pub(crate) type Events = mpsc::Sender<Result<v1::WorkerEvent, Status>>;

/// The blocks of one place.
#[derive(Debug)]
pub(crate) struct Feed {
    /// What was noted and is not passed on. Locked only to add to it and to empty it.
    noted: Mutex<Vec<Cached>>,
    feed: Mutex<CacheFeed>,
    changes: broadcast::Sender<Arc<CacheChange>>,
}

impl Default for Feed {
    fn default() -> Self {
        Feed { noted: Mutex::default(), feed: Mutex::default(), changes: broadcast::Sender::new(BEHIND) }
    }
}

impl Feed {
    fn feed(&self) -> MutexGuard<'_, CacheFeed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn noted(&self) -> MutexGuard<'_, Vec<Cached>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what entered and left, in order. False: nothing did.
    pub fn note(&self, changes: impl Iterator<Item = Cached>) -> bool {
        let mut changes = changes.peekable();
        let any = changes.peek().is_some();
        if any {
            self.noted().extend(changes);
        }
        any
    }

    /// Passes the net change on to all that follow.
    pub fn pass_on(&self) {
        let noted = std::mem::take(&mut *self.noted());
        let mut feed = self.feed();
        noted.into_iter().for_each(|change| feed.note(change));
        let change = feed.take();
        if !change.is_empty() {
            // Nobody may be following.
            let _ = self.changes.send(Arc::new(change));
        }
    }

    /// All blocks, and then what changes.
    pub fn all(&self) -> (CacheChange, Receiver<Arc<CacheChange>>) {
        let feed = self.feed();
        let all = CacheChange { stored: feed.told(), removed: Vec::new(), tally: feed.tally() };
        (all, self.changes.subscribe())
    }
}

/// Tells one who follows of one place.
pub(crate) struct Teller<'a> {
    feed: &'a Feed,
    /// What it has to tell next goes to [`Teller::pass`].
    pub changes: Receiver<Arc<CacheChange>>,
    /// Number of the last event.
    number: u64,
    /// What its events are in a stream.
    wrap: fn(v1::CacheEvent) -> Event,
}

impl<'a> Teller<'a> {
    /// Tells all blocks. Of a place without any it says nothing unless that is `asked`.
    pub async fn begin(
        feed: &'a Feed,
        wrap: fn(v1::CacheEvent) -> Event,
        asked: bool,
        events: &Events,
    ) -> Result<Teller<'a>, ()> {
        let (all, changes) = feed.all();
        let mut teller = Teller { feed, changes, number: 0, wrap };
        if asked || all.tally.blocks > 0 {
            teller.say(events, &all, true).await?;
        }
        Ok(teller)
    }

    /// Tells a change; all blocks, where changes were missed. An error: nobody follows any more.
    pub async fn pass(&mut self, events: &Events, change: Result<Arc<CacheChange>, RecvError>) -> Result<(), ()> {
        match change {
            Ok(change) => self.say(events, &change, false).await,
            Err(RecvError::Lagged(_)) => {
                let all;
                (all, self.changes) = self.feed.all();
                self.say(events, &all, true).await
            }
            Err(RecvError::Closed) => Err(()),
        }
    }

    /// Sends a change as events. An error: nobody follows any more.
    async fn say(&mut self, events: &Events, change: &CacheChange, afresh: bool) -> Result<(), ()> {
        let mut first = afresh || self.number == 0;
        for (stored, removed) in parts(change) {
            let (stored, removed, afresh) = (bytes(stored), bytes(removed), std::mem::take(&mut first));
            self.event(events, v1::CacheEvent { afresh, stored, removed, ..Default::default() }).await?;
        }
        // The tally has an event of its own: what is before it may be nothing.
        let Tally { blocks, sum } = change.tally;
        let tally = Some(v1::CacheTally { blocks, sum });
        self.event(events, v1::CacheEvent { afresh: first, tally, ..Default::default() }).await
    }

    async fn event(&mut self, events: &Events, event: v1::CacheEvent) -> Result<(), ()> {
        self.number += 1;
        say_one(events, (self.wrap)(v1::CacheEvent { number: self.number, ..event })).await
    }
}

/// Sends an event. An error: nobody follows any more.
pub(crate) async fn say_one(events: &Events, event: Event) -> Result<(), ()> {
    events.send(Ok(v1::WorkerEvent { event: Some(event) })).await.map_err(drop)
}

/// A change in parts of at most [`EVENT_NAMES`]: blocks that entered, blocks that left.
fn parts(change: &CacheChange) -> impl Iterator<Item = (&[BlockName], &[BlockName])> {
    let stored = change.stored.chunks(EVENT_NAMES).map(|names| (names, &[][..]));
    stored.chain(change.removed.chunks(EVENT_NAMES).map(|names| (&[][..], names)))
}

pub(crate) fn bytes(names: &[BlockName]) -> Vec<u8> {
    names.iter().flat_map(|name| name.0.to_le_bytes()).collect()
}
