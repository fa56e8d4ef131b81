//! Turns a registry's lists of members into views, in one background task.
//!
//! `baton-membership`'s [`Follow`] decides; this file opens feeds and waits as it says.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use baton_membership::{Follow, FollowAction, FollowInput, FollowNews, Known, List, OPEN, View};
use baton_types::random_u64;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::ViewReceiver;
use crate::error::ClusterError;

/// A stream of complete member lists, one per change.
pub(crate) type Lists = BoxStream<'static, Result<List, ClusterError>>;

/// The source of the lists: the part that differs between registries.
pub(crate) trait Feed: Send + 'static {
    /// The registry's address, for messages.
    fn address(&self) -> &str;

    /// Connects and asks for lists. The first list comes at once.
    fn open(&mut self) -> impl Future<Output = Result<Lists, ClusterError>> + Send;
}

/// Follows a registry, from the first call of `watch` on, as long as it or any of its receivers lives.
pub(crate) struct Follower {
    views: ViewReceiver,
    /// Moved into the task when it starts.
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

/// Performs the actions of [`Follow`].
async fn follow<F: Feed>(mut feed: F, views: &watch::Sender<Arc<View>>) {
    // Spreads the waits of processes that lost the same registry. In a container each is process 1, so its number would not do.
    let (mut follow, mut action) = Follow::start(random_u64(), now());
    let registry = feed.address().to_owned();
    let mut lists = None;
    loop {
        let (input, error) = match action {
            FollowAction::Open { until } => tokio::select! {
                opened = opened(&mut feed, &registry, &mut lists) => said(opened),
                () = sleep_until(until.into()) => {
                    (FollowInput::Wake, Some(broken(&registry, format!("no list of members within {OPEN:?}"))))
                }
            },
            FollowAction::Listen { until } => tokio::select! {
                next = next(&registry, &mut lists) => said(next),
                () = at(until) => (FollowInput::Wake, None),
            },
            FollowAction::Wait { until } => {
                lists = None;
                sleep_until(until.into()).await;
                (FollowInput::Wake, None)
            }
        };
        if let Some(next) = follow.step(input, now()) {
            action = next;
        }
        publish(follow.view(), views);
        match follow.take_news() {
            Some(FollowNews::Lost) => {
                let error = error.map(|e| e.to_string()).unwrap_or_default();
                warn!(error, "lost the registry, going on with the last known view");
            }
            Some(FollowNews::Back { members }) => info!(members, "the registry is back"),
            None => {}
        }
    }
}

/// Opens the feed and waits for its first list.
async fn opened<F: Feed>(feed: &mut F, registry: &str, lists: &mut Option<Lists>) -> Result<List, ClusterError> {
    *lists = None;
    *lists = Some(feed.open().await?);
    next(registry, lists).await
}

async fn next(registry: &str, lists: &mut Option<Lists>) -> Result<List, ClusterError> {
    let list = match lists {
        Some(lists) => lists.next().await,
        None => None,
    };
    list.unwrap_or_else(|| Err(broken(registry, "it ended the watch".to_owned())))
}

fn said(list: Result<List, ClusterError>) -> (FollowInput, Option<ClusterError>) {
    match list {
        Ok(list) => (FollowInput::Listed(list), None),
        Err(error) => (FollowInput::Lost, Some(error)),
    }
}

fn broken(registry: &str, problem: String) -> ClusterError {
    ClusterError::Unavailable { registry: registry.to_owned(), problem }
}

async fn at(due: Option<std::time::Instant>) {
    match due {
        Some(at) => sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// The current time of the runtime's clock.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Publishes the view. Wakes the watchers only when its revision changed.
fn publish(view: View, views: &watch::Sender<Arc<View>>) {
    views.send_if_modified(|seen| {
        let changed = seen.revision != view.revision;
        *seen = Arc::new(view);
        changed
    });
}
