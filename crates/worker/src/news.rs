//! Tells routers which blocks are in the prefix cache and in the store below it, and what the worker has to do.
//!
//! The engine thread notes what enters and leaves the cache ([`WorkerNews::note`]), another one what enters and leaves the store
//! ([`WorkerNews::note_stored`]). A task gathers it for [`GATHER`] and passes the net change to all that follow, [`FOLLOWERS`] at most (I5). Who
//! follows gets all blocks first. Who reads too slowly to take each change gets all blocks again. Of the load ([`WorkerNews::load`]) each gets the
//! latest, every [`GATHER`] at most, and of the links ([`WorkerNews::links`]) too. So no reader makes the engine wait, or lets anything grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_engine::Cached;
use baton_latency::{Backlog, BatchWork, StepCost};
use baton_proto::v1::{self, worker_event::Event};
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::feed::{Events, Feed, Teller, say_one};

/// Changes within this time are told together.
const GATHER: Duration = Duration::from_millis(50);
/// Most that follow at once: routers, and people who look.
const FOLLOWERS: usize = 64;
/// Rates that differ by no more than this share are alike.
const ALIKE: f64 = 0.1;

/// The events for one who follows.
pub(crate) type WorkerEvents = ReceiverStream<Result<v1::WorkerEvent, Status>>;

/// News of one worker.
#[derive(Debug)]
pub(crate) struct WorkerNews {
    cache: Feed,
    store: Feed,
    /// The worker has a store.
    stores: AtomicBool,
    changed: Notify,
    /// What there is to do, and since when it is so known.
    load: watch::Sender<(Backlog, Option<Instant>)>,
    links: watch::Sender<v1::LinksEvent>,
    followers: Arc<Semaphore>,
    ended: CancellationToken,
}

impl Default for WorkerNews {
    fn default() -> Self {
        let (changed, load) = (Notify::new(), watch::Sender::default());
        let (links, ended) = (watch::Sender::default(), CancellationToken::new());
        let followers = Arc::new(Semaphore::new(FOLLOWERS));
        let stores = AtomicBool::new(false);
        WorkerNews { cache: Feed::default(), store: Feed::default(), stores, changed, load, links, followers, ended }
    }
}

impl WorkerNews {
    /// Takes in what entered and left the cache, in order.
    pub fn note(&self, changes: impl Iterator<Item = Cached>) {
        if self.cache.note(changes) {
            self.changed.notify_one();
        }
    }

    /// The worker has a store: who follows is told so, though it may be empty.
    pub fn has_store(&self) {
        self.stores.store(true, Ordering::Relaxed);
    }

    /// Takes in what entered and left the store, in order.
    pub fn note_stored(&self, changes: impl Iterator<Item = Cached>) {
        if self.store.note(changes) {
            self.changed.notify_one();
        }
    }

    /// Takes in what the worker has to do now.
    pub fn load(&self, now: Backlog) {
        self.load.send_if_modified(|(load, at)| {
            *at = Some(Instant::now());
            std::mem::replace(load, now) != now
        });
    }

    /// Takes in how fast KV leaves now. What differs little is not told again.
    pub fn links(&self, now: v1::LinksEvent) {
        self.links.send_if_modified(|told| {
            let alike = |(one, other): (&v1::Link, &v1::Link)| {
                one.worker == other.worker
                    && (one.bytes_per_second - other.bytes_per_second).abs() <= ALIKE * one.bytes_per_second
            };
            let changed = told.token_bytes != now.token_bytes
                || (told.load_seconds - now.load_seconds).abs() > ALIKE * told.load_seconds
                || told.links.len() != now.links.len()
                || !told.links.iter().zip(&now.links).all(alike);
            if changed {
                *told = now;
            }
            changed
        });
    }

    /// Passes on what was noted, until the task is dropped.
    pub async fn publish(&self) {
        loop {
            self.changed.notified().await;
            tokio::time::sleep(GATHER).await;
            self.pass_on();
        }
    }

    fn pass_on(&self) {
        self.cache.pass_on();
        self.store.pass_on();
    }

    /// Ends all streams of events: a server that stops waits for them.
    pub fn end(&self) {
        self.ended.cancel();
    }

    /// The events for one who follows.
    ///
    /// # Errors
    /// [`FOLLOWERS`] do already.
    pub fn follow(self: Arc<Self>) -> Result<WorkerEvents, Status> {
        let full = |_| Status::resource_exhausted(format!("{FOLLOWERS} follow this worker already"));
        let place = Arc::clone(&self.followers).try_acquire_owned().map_err(full)?;
        let (events, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                _ = self.tell(&events) => {}
                () = events.closed() => {}
                () = self.ended.cancelled() => {}
            }
        });
        Ok(ReceiverStream::new(stream))
    }

    /// Tells all, and then each change. An error: nobody follows any more.
    async fn tell(&self, events: &Events) -> Result<(), ()> {
        let (mut load, mut due) = (self.load.subscribe(), Instant::now() + GATHER);
        let mut links = self.links.subscribe();
        // First what is short: a list of blocks may be long, and whoever chooses workers needs the load.
        let now = *load.borrow_and_update();
        self.say_load(events, now).await?;
        let known = links.borrow_and_update().clone();
        if known.token_bytes > 0 {
            say_one(events, Event::Links(known)).await?;
        }
        let mut cache = Teller::begin(&self.cache, Event::Cache, true, events).await?;
        // Most workers have no store.
        let asked = self.stores.load(Ordering::Relaxed);
        let mut store = Teller::begin(&self.store, Event::Store, asked, events).await?;
        loop {
            // The senders live as long as whoever waits here.
            tokio::select! {
                change = cache.changes.recv() => cache.pass(events, change).await?,
                change = store.changes.recv() => store.pass(events, change).await?,
                () = changed(&mut load, due) => {
                    due = Instant::now() + GATHER;
                    let now = *load.borrow_and_update();
                    self.say_load(events, now).await?;
                }
                _ = links.changed() => {
                    let event = links.borrow_and_update().clone();
                    say_one(events, Event::Links(event)).await?;
                }
            }
        }
    }

    async fn say_load(&self, events: &Events, (load, at): (Backlog, Option<Instant>)) -> Result<(), ()> {
        let event = self.load_event(&load, at.map_or(Duration::ZERO, |at| at.elapsed()));
        say_one(events, Event::Load(event)).await
    }

    fn load_event(&self, load: &Backlog, age: Duration) -> v1::LoadEvent {
        let Backlog { work, coming, room, step_tokens, spare, cost, batch } = *load;
        let StepCost { base, row, context, chunk, token, pair } = cost;
        v1::LoadEvent {
            tokens: work.tokens,
            pairs: work.pairs,
            rows: work.rows,
            context: work.context,
            coming_rows: coming.rows,
            coming_context: coming.context,
            room,
            step_tokens,
            spare,
            batch: (batch != BatchWork::default()).then(|| batch_load(batch)),
            cost: (cost != StepCost::default()).then_some(v1::StepCost { base, row, context, chunk, token, pair }),
            age_us: u64::try_from(age.as_micros()).unwrap_or(u64::MAX),
            followers: (FOLLOWERS - self.followers.available_permits()) as u32,
        }
    }
}

fn batch_load(BatchWork { work, coming, blocks }: BatchWork) -> v1::BatchLoad {
    v1::BatchLoad {
        tokens: work.tokens,
        pairs: work.pairs,
        rows: work.rows,
        context: work.context,
        coming_rows: coming.rows,
        coming_context: coming.context,
        blocks: u64::try_from(blocks).unwrap_or(0),
    }
}

/// Waits until the load has changed, and at least until `due`.
async fn changed(load: &mut watch::Receiver<(Backlog, Option<Instant>)>, due: Instant) {
    sleep_until(due).await;
    // The sender lives as long as whoever waits here.
    let _ = load.changed().await;
}

#[cfg(test)]
mod tests {
    use baton_engine::BlockName;
    use tokio_stream::StreamExt;

    use super::*;
    use crate::feed::{BEHIND, EVENT_NAMES, bytes};

    fn name(at: usize) -> BlockName {
        BlockName(at as u128)
    }

    async fn next_event(stream: &mut WorkerEvents) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(20), stream.next()).await;
        next.unwrap().unwrap().unwrap().event.unwrap()
    }

    /// The next event about the cache.
    async fn next(stream: &mut WorkerEvents) -> v1::CacheEvent {
        loop {
            if let Event::Cache(event) = next_event(stream).await {
                return event;
            }
        }
    }

    /// The next event about the load.
    async fn next_load(stream: &mut WorkerEvents) -> v1::LoadEvent {
        loop {
            if let Event::Load(event) = next_event(stream).await {
                return event;
            }
        }
    }

    #[tokio::test]
    async fn who_follows_is_told_the_load_at_first_and_then_the_latest() {
        let news = Arc::new(WorkerNews::default());
        let mut stream = Arc::clone(&news).follow().unwrap();
        let first = next_load(&mut stream).await;
        assert_eq!((first.tokens, first.cost, first.followers), (0, None, 1));
        let began = Instant::now();
        let of = |room| {
            let cost = StepCost { base: 1.0, ..StepCost::default() };
            let batch = BatchWork { blocks: room, ..BatchWork::default() };
            Backlog { room, cost, step_tokens: 5, batch, ..Backlog::default() }
        };
        for room in -3..=0 {
            news.load(of(room));
        }
        let second = next_load(&mut stream).await;
        assert_eq!((second.room, second.step_tokens, second.cost.map(|cost| cost.base)), (0, 5, Some(1.0)));
        assert!(began.elapsed() >= GATHER / 2, "not more often than that");
        news.load(of(0));
        news.load(of(9));
        let third = next_load(&mut stream).await;
        assert_eq!(third.room, 9, "what does not change is not told");
        assert_eq!((second.batch, third.batch.map(|batch| batch.blocks)), (None, Some(9)));
    }

    #[tokio::test]
    async fn who_follows_is_told_of_links_when_they_change() {
        let next_links = async |stream: &mut WorkerEvents| loop {
            if let Event::Links(event) = next_event(stream).await {
                return event;
            }
        };
        let of = |rates: &[f64]| {
            let link = |(at, rate): (usize, &f64)| v1::Link { worker: at as u64, bytes_per_second: *rate };
            v1::LinksEvent { token_bytes: 7, links: rates.iter().enumerate().map(link).collect(), load_seconds: 0.0 }
        };
        let news = Arc::new(WorkerNews::default());
        let mut early = Arc::clone(&news).follow().unwrap();
        news.links(of(&[100.0]));
        assert_eq!(next_links(&mut early).await, of(&[100.0]));
        let mut late = Arc::clone(&news).follow().unwrap();
        assert_eq!(next_links(&mut late).await, of(&[100.0]), "at first, though nothing changes");
        news.links(of(&[109.0]));
        news.links(of(&[109.0, 50.0]));
        for stream in [&mut early, &mut late] {
            assert_eq!(next_links(stream).await, of(&[109.0, 50.0]), "what differs little is not told");
        }
        news.links(of(&[89.0, 50.0]));
        assert_eq!(next_links(&mut early).await, of(&[89.0, 50.0]));
    }

    #[tokio::test]
    async fn who_follows_is_told_everything_and_then_what_changes() {
        let news = Arc::new(WorkerNews::default());
        let publisher = Arc::clone(&news);
        tokio::spawn(async move { publisher.publish().await });
        news.note((0..EVENT_NAMES + 1).map(|at| Cached::Stored(name(at))));
        let mut changes = news.cache.all().1;
        assert_eq!(changes.recv().await.unwrap().stored.len(), EVENT_NAMES + 1, "told together");
        let mut stream = Arc::clone(&news).follow().unwrap();
        let (first, second) = (next(&mut stream).await, next(&mut stream).await);
        assert_eq!((first.number, first.afresh, first.stored.len(), first.tally), (1, true, 16 * EVENT_NAMES, None));
        assert_eq!((second.number, second.afresh, second.stored), (2, false, bytes(&[name(EVENT_NAMES)])));
        let (third, sum) = (next(&mut stream).await, (0..EVENT_NAMES as u64 + 1).sum());
        let tally = Some(v1::CacheTally { blocks: EVENT_NAMES as u64 + 1, sum });
        assert_eq!((third.number, third.afresh, third.tally), (3, false, tally));
        news.note([Cached::Removed(name(7))].into_iter());
        let (fourth, fifth) = (next(&mut stream).await, next(&mut stream).await);
        assert_eq!((fourth.number, fourth.stored.len(), fourth.removed), (4, 0, bytes(&[name(7)])));
        assert_eq!(fifth.tally.unwrap().blocks, EVENT_NAMES as u64);
        news.end();
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn blocks_of_the_store_are_told_apart() {
        let news = Arc::new(WorkerNews::default());
        let mut early = Arc::clone(&news).follow().unwrap();
        assert_eq!(
            next(&mut early).await.number,
            1,
            "of the cache; of a store nothing is said as long as it has no block"
        );
        news.note_stored([Cached::Stored(name(3)), Cached::Stored(name(4))].into_iter());
        news.pass_on();
        let mut late = Arc::clone(&news).follow().unwrap();
        for stream in [&mut early, &mut late] {
            let mut stored = async || loop {
                if let Event::Store(event) = next_event(stream).await {
                    return event;
                }
            };
            let (first, second) = (stored().await, stored().await);
            assert_eq!((first.number, first.afresh, first.stored), (1, true, bytes(&[name(3), name(4)])));
            assert_eq!((second.number, second.tally.unwrap().blocks), (2, 2));
        }
    }

    #[tokio::test]
    async fn an_empty_cache_is_told_too() {
        let mut stream = Arc::new(WorkerNews::default()).follow().unwrap();
        let only = next(&mut stream).await;
        assert_eq!((only.number, only.afresh, only.tally.map(|tally| tally.blocks)), (1, true, Some(0)));
    }

    /// I5: a reader that does not read costs no more than [`BEHIND`] changes, and begins afresh.
    #[tokio::test]
    async fn who_is_too_slow_begins_afresh() {
        let news = Arc::new(WorkerNews::default());
        let mut stream = Arc::clone(&news).follow().unwrap();
        assert!(next(&mut stream).await.afresh);
        for at in 0..4 * BEHIND {
            news.note([Cached::Stored(name(at))].into_iter());
            news.pass_on();
            tokio::task::yield_now().await;
        }
        let (mut number, mut held, mut afresh) = (1, 0, 0);
        while held < 4 * BEHIND {
            let event = next(&mut stream).await;
            number += 1;
            assert_eq!(event.number, number);
            afresh += usize::from(event.afresh);
            held = if event.afresh { 0 } else { held } + event.stored.len() / 16;
            assert!(event.tally.is_none_or(|tally| tally.blocks == held as u64));
        }
        assert!(afresh == 1 && number < 4 * BEHIND as u64, "not each change was told: {number}");
    }

    #[tokio::test]
    async fn no_more_follow_than_may() {
        let news = Arc::new(WorkerNews::default());
        let streams: Vec<_> = (0..FOLLOWERS).map(|_| Arc::clone(&news).follow().unwrap()).collect();
        let refused = Arc::clone(&news).follow().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        drop(streams);
        while Arc::clone(&news).follow().is_err() {
            tokio::task::yield_now().await;
        }
    }
}
