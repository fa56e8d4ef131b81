//! Snapshots for all who look, as server-sent events.
//!
//! One task takes a snapshot every [`EVERY`] and all watchers get the same bytes. It runs only while somebody watches. Who reads slowly
//! gets the latest snapshot and misses those between, so nothing grows (I5).

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use futures::stream::BoxStream;
use serde_json::Value;
use tokio::sync::{Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

/// Time between two snapshots.
const EVERY: Duration = Duration::from_millis(500);
/// Most who watch at once.
const WATCHERS: usize = 16;

/// The feed of one page.
#[derive(Clone, Debug)]
pub(super) struct Feed(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    places: Arc<Semaphore>,
    latest: watch::Sender<Bytes>,
    /// Whether the task runs that takes snapshots.
    runs: Mutex<bool>,
}

impl Feed {
    /// Nobody watches yet.
    pub fn new() -> Feed {
        let (places, latest) = (Arc::new(Semaphore::new(WATCHERS)), watch::Sender::default());
        Feed(Arc::new(Shared { places, latest, runs: Mutex::new(false) }))
    }

    /// The events for one more watcher; `None` when there are too many. `take` makes a snapshot.
    pub fn watch<F: Future<Output = Value> + Send + 'static>(
        &self,
        take: impl Fn() -> F + Send + 'static,
    ) -> Option<BoxStream<'static, Result<Bytes, Infallible>>> {
        let place = Arc::clone(&self.0.places).try_acquire_owned().ok()?;
        let mut latest = {
            let mut runs = self.0.runs.lock().unwrap_or_else(PoisonError::into_inner);
            let latest = self.0.latest.subscribe();
            if !std::mem::replace(&mut runs, true) {
                tokio::spawn(snapshots(Arc::clone(&self.0), take));
            }
            latest
        };
        Some(Box::pin(async_stream::stream! {
            let _place = place;
            // The sender lives as long as the page.
            while latest.changed().await.is_ok() {
                let event = latest.borrow_and_update().clone();
                yield Ok(event);
            }
        }))
    }
}

/// Takes snapshots until nobody watches.
async fn snapshots<F: Future<Output = Value>>(shared: Arc<Shared>, take: impl Fn() -> F) {
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        {
            // Who begins to watch at this moment either is counted here, or begins the next task.
            let mut runs = shared.runs.lock().unwrap_or_else(PoisonError::into_inner);
            if shared.latest.receiver_count() == 0 {
                *runs = false;
                return;
            }
        }
        let event = format!("data: {}\n\n", take().await);
        shared.latest.send_replace(event.into());
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::StreamExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn snapshots_are_taken_only_while_somebody_watches() {
        let (feed, taken) = (Feed::new(), Arc::new(AtomicU32::new(0)));
        let take = || {
            let taken = Arc::clone(&taken);
            move || {
                let number = taken.fetch_add(1, Ordering::SeqCst) + 1;
                async move { Value::from(number) }
            }
        };
        for round in 0..2 {
            {
                let mut one = pin!(feed.watch(take()).unwrap());
                let mut other = pin!(feed.watch(take()).unwrap());
                let (first, same) = (one.next().await.unwrap().unwrap(), other.next().await.unwrap().unwrap());
                assert_eq!(first, same, "all get the same");
                assert!(first.starts_with(b"data: ") && first.ends_with(b"\n\n"));
                tokio::time::sleep(20 * EVERY).await;
                let late = other.next().await.unwrap().unwrap();
                let now = taken.load(Ordering::SeqCst);
                assert!(now >= 20 * (round + 1) && late == format!("data: {now}\n\n"), "the latest, not all between");
            }
            tokio::time::sleep(2 * EVERY).await;
            let now = taken.load(Ordering::SeqCst);
            tokio::time::sleep(20 * EVERY).await;
            assert_eq!(taken.load(Ordering::SeqCst), now, "nobody watches");
        }
    }

    /// I5.
    #[tokio::test(start_paused = true)]
    async fn no_more_watch_than_may() {
        let feed = Feed::new();
        let take = || async { Value::Null };
        let watchers: Vec<_> = (0..WATCHERS).map(|_| feed.watch(take).unwrap()).collect();
        assert!(feed.watch(take).is_none());
        drop(watchers);
        assert!(feed.watch(take).is_some());
    }
}
