//! Turns a registry's lists into views: one background task that listens, and comes back after an outage.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_membership::{Backoff, Known, Member, View};
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::ViewReceiver;
use crate::error::ClusterError;

/// How long opening a feed may take, its first list included.
const OPEN: Duration = Duration::from_secs(5);

/// Whole lists of members, one on every change.
pub(crate) type Lists = BoxStream<'static, Result<Vec<Member>, ClusterError>>;

/// Where lists come from; the part that differs between registries.
pub(crate) trait Feed: Send + 'static {
    /// The registry, for messages.
    fn address(&self) -> &str;

    /// Connects and asks for lists. The first comes at once.
    fn open(&mut self) -> impl Future<Output = Result<Lists, ClusterError>> + Send;
}

/// Starts listening when somebody first wants to see; goes on as long as it or any of its receivers lives.
pub(crate) struct Follower {
    views: ViewReceiver,
    /// Taken by the task.
    sender: Mutex<Option<watch::Sender<Arc<View>>>>,
}

impl Follower {
    pub(crate) fn new() -> Follower {
        let (sender, views) = watch::channel(Arc::new(Known::new().view()));
        Follower { views, sender: Mutex::new(Some(sender)) }
    }

    pub(crate) fn watch<F: Feed>(&self, feed: impl FnOnce() -> F) -> ViewReceiver {
        if let Some(sender) = self.sender.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let feed = feed();
            tokio::spawn(async move {
                tokio::select! {
                    () = sender.closed() => {}
                    () = follow(feed, &sender) => {}
                }
            });
        }
        self.views.clone()
    }
}

async fn follow<F: Feed>(mut feed: F, views: &watch::Sender<Arc<View>>) {
    let mut known = Known::new();
    // Any number does: it only spreads the waits of processes that lost the same registry.
    let mut backoff = Backoff::new(u64::from(std::process::id()), Duration::MAX);
    loop {
        let error = listen(&mut feed, &mut known, &mut backoff, views).await;
        // I7: the members stay.
        known.lose();
        publish(&known, views);
        if backoff.is_fresh() {
            warn!(%error, "lost the registry, going on with the last known view");
        }
        sleep(backoff.next()).await;
    }
}

/// Until the registry is lost.
async fn listen<F: Feed>(
    feed: &mut F,
    known: &mut Known,
    backoff: &mut Backoff,
    views: &watch::Sender<Arc<View>>,
) -> ClusterError {
    let registry = feed.address().to_owned();
    let broken = |problem: String| ClusterError::Unavailable { registry, problem };
    let opened = tokio::time::timeout(OPEN, async {
        let mut lists = feed.open().await?;
        let first = lists.next().await;
        Ok((lists, first))
    });
    let (mut lists, mut next) = match opened.await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return error,
        Err(_) => return broken(format!("no list of members within {OPEN:?}")),
    };
    loop {
        match next {
            Some(Ok(members)) => {
                if !backoff.is_fresh() {
                    info!(members = members.len(), "the registry is back");
                }
                backoff.reset();
                known.list(members, Instant::now().into_std());
            }
            Some(Err(error)) => return error,
            None => return broken("it ended the watch".to_owned()),
        }
        publish(known, views);
        next = loop {
            let settle = known.settles_at();
            let due = async {
                match settle {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                next = lists.next() => break next,
                () = due => known.settle(Instant::now().into_std()),
            }
            publish(known, views);
        };
    }
}

/// Wakes the watchers only when the revision moved.
fn publish(known: &Known, views: &watch::Sender<Arc<View>>) {
    let view = known.view();
    views.send_if_modified(|seen| {
        let changed = seen.revision != view.revision;
        *seen = Arc::new(view);
        changed
    });
}
