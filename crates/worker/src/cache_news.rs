//! Tells routers which blocks are in the prefix cache.
//!
//! The engine thread notes what enters and leaves ([`CacheNews::note`]) and waits for nobody. A task gathers it for [`GATHER`] and passes the net
//! change to all that follow. Who follows gets all blocks first. Who reads too slowly to take each change gets all blocks again, so that no
//! reader makes anything wait or grow (I5).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_engine::{BlockName, CacheChange, CacheFeed, Cached, Tally};
use baton_proto::v1::{self, worker_event::Event};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Changes within this time are told together.
const GATHER: Duration = Duration::from_millis(50);
/// Most changes that a reader may be behind.
const BEHIND: usize = 16;
/// Most names in an event: few enough that a router takes them in at once without keeping others waiting.
const EVENT_NAMES: usize = 4096;

/// The events for one who follows.
pub(crate) type WorkerEvents = ReceiverStream<Result<v1::WorkerEvent, Status>>;

/// News of one worker's prefix cache.
#[derive(Debug)]
pub(crate) struct CacheNews {
    feed: Mutex<CacheFeed>,
    changes: broadcast::Sender<Arc<CacheChange>>,
    changed: Notify,
    ended: CancellationToken,
}

impl Default for CacheNews {
    fn default() -> Self {
        let (changes, ended) = (broadcast::Sender::new(BEHIND), CancellationToken::new());
        CacheNews { feed: Mutex::default(), changes, changed: Notify::new(), ended }
    }
}

impl CacheNews {
    fn feed(&self) -> MutexGuard<'_, CacheFeed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what entered and left the cache, in order.
    pub fn note(&self, changes: impl Iterator<Item = Cached>) {
        let mut changes = changes.peekable();
        if changes.peek().is_some() {
            let mut feed = self.feed();
            changes.for_each(|change| feed.note(change));
            self.changed.notify_one();
        }
    }

    /// Passes on what was noted, until the task is dropped.
    pub async fn publish(&self) {
        loop {
            self.changed.notified().await;
            tokio::time::sleep(GATHER).await;
            let mut feed = self.feed();
            let change = feed.take();
            if !change.is_empty() {
                // Nobody may be following.
                let _ = self.changes.send(Arc::new(change));
            }
        }
    }

    /// Ends all streams of events: a server that stops waits for them.
    pub fn end(&self) {
        self.ended.cancel();
    }

    /// All blocks, and then what changes.
    fn all(&self) -> (CacheChange, Receiver<Arc<CacheChange>>) {
        let feed = self.feed();
        let all = CacheChange { stored: feed.told().collect(), removed: Vec::new(), tally: feed.tally() };
        (all, self.changes.subscribe())
    }

    /// The events for one who follows.
    pub fn follow(self: Arc<Self>) -> WorkerEvents {
        let (events, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            tokio::select! {
                _ = self.tell(&events) => {}
                () = events.closed() => {}
                () = self.ended.cancelled() => {}
            }
        });
        ReceiverStream::new(stream)
    }

    /// Tells all, and then each change. An error: nobody follows any more.
    async fn tell(&self, events: &mpsc::Sender<Result<v1::WorkerEvent, Status>>) -> Result<(), ()> {
        let mut number = 0;
        let (all, mut changes) = self.all();
        say(events, &mut number, &all, true).await?;
        loop {
            match changes.recv().await {
                Ok(change) => say(events, &mut number, &change, false).await?,
                Err(RecvError::Lagged(_)) => {
                    let all;
                    (all, changes) = self.all();
                    say(events, &mut number, &all, true).await?;
                }
                Err(RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// Sends a change as events. An error: nobody follows any more.
async fn say(
    events: &mpsc::Sender<Result<v1::WorkerEvent, Status>>,
    number: &mut u64,
    change: &CacheChange,
    afresh: bool,
) -> Result<(), ()> {
    for mut event in split(change) {
        *number += 1;
        event.number = *number;
        event.afresh &= afresh;
        let event = v1::WorkerEvent { event: Some(Event::Cache(event)) };
        events.send(Ok(event)).await.map_err(drop)?;
    }
    Ok(())
}

/// The events of a change; at least one. The first one says that it begins afresh.
fn split(change: &CacheChange) -> Vec<v1::CacheEvent> {
    let (stored, removed) = (change.stored.chunks(EVENT_NAMES), change.removed.chunks(EVENT_NAMES));
    let stored = stored.map(|names| v1::CacheEvent { stored: bytes(names), ..Default::default() });
    let removed = removed.map(|names| v1::CacheEvent { removed: bytes(names), ..Default::default() });
    let mut events: Vec<v1::CacheEvent> = stored.chain(removed).collect();
    if events.is_empty() {
        events.push(v1::CacheEvent::default());
    }
    if let Some(first) = events.first_mut() {
        first.afresh = true;
    }
    if let Some(last) = events.last_mut() {
        let Tally { blocks, sum } = change.tally;
        last.tally = Some(v1::CacheTally { blocks, sum });
    }
    events
}

fn bytes(names: &[BlockName]) -> Vec<u8> {
    names.iter().flat_map(|name| name.0.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    fn name(at: usize) -> BlockName {
        BlockName(at as u128)
    }

    async fn next(stream: &mut WorkerEvents) -> v1::CacheEvent {
        let next = tokio::time::timeout(Duration::from_secs(20), stream.next()).await;
        let Some(Event::Cache(event)) = next.unwrap().unwrap().unwrap().event else { panic!("no event") };
        event
    }

    #[tokio::test]
    async fn who_follows_is_told_everything_and_then_what_changes() {
        let news = Arc::new(CacheNews::default());
        let publisher = Arc::clone(&news);
        tokio::spawn(async move { publisher.publish().await });
        news.note((0..EVENT_NAMES + 1).map(|at| Cached::Stored(name(at))));
        let mut changes = news.all().1;
        assert_eq!(changes.recv().await.unwrap().stored.len(), EVENT_NAMES + 1, "told together");
        let mut stream = Arc::clone(&news).follow();
        let (first, second) = (next(&mut stream).await, next(&mut stream).await);
        assert_eq!((first.number, first.afresh, first.stored.len(), first.tally), (1, true, 16 * EVENT_NAMES, None));
        let sum = (0..EVENT_NAMES as u64 + 1).sum();
        let tally = Some(v1::CacheTally { blocks: EVENT_NAMES as u64 + 1, sum });
        assert_eq!((second.number, second.afresh, second.tally), (2, false, tally));
        assert_eq!(second.stored, bytes(&[name(EVENT_NAMES)]));
        news.note([Cached::Removed(name(7))].into_iter());
        let third = next(&mut stream).await;
        assert_eq!((third.number, third.afresh, third.stored.len()), (3, false, 0));
        assert_eq!((third.removed, third.tally.unwrap().blocks), (bytes(&[name(7)]), EVENT_NAMES as u64));
        news.end();
        assert!(stream.next().await.is_none());
    }

    /// I5: a reader that does not read costs no more than [`BEHIND`] changes, and begins afresh.
    #[tokio::test]
    async fn who_is_too_slow_begins_afresh() {
        let news = Arc::new(CacheNews::default());
        let mut stream = Arc::clone(&news).follow();
        assert!(next(&mut stream).await.afresh);
        for at in 0..4 * BEHIND {
            news.note([Cached::Stored(name(at))].into_iter());
            let change = news.feed().take();
            news.changes.send(Arc::new(change)).unwrap();
            tokio::task::yield_now().await;
        }
        let (mut number, mut held) = (1, 0);
        while held < 4 * BEHIND {
            let event = next(&mut stream).await;
            number += 1;
            assert_eq!(event.number, number);
            held = if event.afresh { 0 } else { held } + event.stored.len() / 16;
            assert_eq!(event.tally.unwrap().blocks, held as u64);
        }
        assert!(number < 2 * BEHIND as u64, "not each change was told");
    }
}
