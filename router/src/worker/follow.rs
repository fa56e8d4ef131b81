//! Follows what a worker says of its prefix cache, of the store below it, and of its load.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_policy::{Backlog, BatchWork, Coming, Followed, KvChange, Links, StepCost, StepWork, Tally};
use baton_proto::v1::worker_client::WorkerClient;
use baton_proto::v1::{self, worker_event::Event};
use baton_types::WorkerId;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tonic::Code;

use super::Workers;
use super::held::HeldBlocks;
use super::link::WorkerChannel;

/// Time until a worker is asked again, the first time and at most.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// What a worker says is never taken for more than this: tokens or pairs, and seconds of a step.
const MOST: u64 = 1 << 50;
const LONGEST_STEP: f64 = 1e3;
/// Nor for older.
const OLDEST: Duration = Duration::from_secs(60);
/// Most links of a worker that are taken in (I5).
const MOST_LINKS: usize = 1024;

/// Follows a worker until it has `left`, and then forgets what it held. `before`: the task that did so for a worker of this id, which has to end
/// first.
pub(super) async fn until_left(
    workers: Weak<Workers>,
    worker: WorkerId,
    channel: WorkerChannel,
    mut left: oneshot::Receiver<()>,
    before: Option<JoinHandle<()>>,
) {
    if let Some(before) = before {
        let _ = before.await;
    }
    tokio::select! {
        _ = &mut left => {}
        () = follow(&workers, worker, channel) => drop(left.await),
    }
    if let Some(workers) = workers.upgrade() {
        let _ = tokio::task::spawn_blocking(move || {
            workers.held.leave(worker);
            workers.stored.leave(worker);
        })
        .await;
    }
}

/// Follows a worker until the router has ended, or the worker says that it tells nothing.
async fn follow(workers: &Weak<Workers>, worker: WorkerId, channel: WorkerChannel) {
    let mut wait = FIRST_WAIT;
    loop {
        let mut client = WorkerClient::new(channel.clone());
        match client.follow(v1::FollowRequest {}).await {
            Ok(events) => {
                let begun = Instant::now();
                if read(workers, worker, events.into_inner()).await.is_none() {
                    return;
                }
                workers.upgrade().iter().for_each(|workers| workers.untold(worker));
                // What ends soon after it began would do so again and again.
                if begun.elapsed() > LONGEST_WAIT {
                    wait = FIRST_WAIT;
                }
            }
            // A worker of an earlier version.
            Err(status) if status.code() == Code::Unimplemented => return,
            // Requests notice whether it is lost.
            Err(_) => {}
        }
        sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Reads events until the stream ends, or is to be opened again. `None`: the router has ended.
async fn read(workers: &Weak<Workers>, worker: WorkerId, mut events: tonic::Streaming<v1::WorkerEvent>) -> Option<()> {
    while let Ok(Some(v1::WorkerEvent { event })) = events.message().await {
        let (place, event) = match event {
            Some(Event::Cache(event)) => (BlocksOf::Pool, event),
            Some(Event::Store(event)) => (BlocksOf::Store, event),
            Some(Event::Load(event)) => {
                let age = Duration::from_micros(event.age_us).min(OLDEST);
                workers.upgrade()?.told(worker, backlog(&event), event.followers, age);
                continue;
            }
            Some(Event::Links(event)) => {
                workers.upgrade()?.linked(worker, links(event));
                continue;
            }
            None => continue,
        };
        let Some(change) = change(event) else {
            tracing::warn!(%worker, "its names of blocks are not 16 bytes each; it is read again");
            break;
        };
        match take_in(workers.upgrade()?, place, worker, change).await {
            Followed::Yes => {}
            Followed::Gap => break,
            Followed::Differs => {
                tracing::warn!(%worker, "what is known of its blocks is wrong; it is read again");
                break;
            }
        }
    }
    Some(())
}

/// Where a worker's blocks are.
#[derive(Clone, Copy, Debug)]
enum BlocksOf {
    /// In its pool.
    Pool,
    /// In its own store below it.
    Store,
}

impl BlocksOf {
    fn index(self, workers: &Workers) -> &HeldBlocks {
        match self {
            BlocksOf::Pool => &workers.held,
            BlocksOf::Store => &workers.stored,
        }
    }
}

async fn take_in(workers: Arc<Workers>, of: BlocksOf, worker: WorkerId, change: KvChange) -> Followed {
    if !change.afresh {
        return of.index(&workers).follow(worker, change);
    }
    let taken = tokio::task::spawn_blocking(move || of.index(&workers).follow(worker, change));
    taken.await.unwrap_or(Followed::Gap)
}

/// What a worker says it has to do. What no cost can be counts as 0: unknown.
fn backlog(event: &v1::LoadEvent) -> Backlog {
    let v1::LoadEvent {
        tokens,
        pairs,
        rows,
        context,
        coming_rows,
        coming_context,
        room,
        step_tokens,
        spare,
        cost,
        batch,
        ..
    } = *event;
    let (work, coming) = amounts([tokens, pairs, rows, context, coming_rows, coming_context]);
    let v1::StepCost { base, row, context: read, chunk, token, pair } = cost.unwrap_or_default();
    let [base, row, read, chunk, token, pair] = [base, row, read, chunk, token, pair]
        .map(|cost| if cost.is_finite() { cost.clamp(0.0, LONGEST_STEP) } else { 0.0 });
    let cost = StepCost { base, row, context: read, chunk, token, pair };
    Backlog { work, coming, room, step_tokens, spare, cost, batch: batch.map(batch_work).unwrap_or_default() }
}

fn batch_work(batch: v1::BatchLoad) -> BatchWork {
    let v1::BatchLoad { tokens, pairs, rows, context, coming_rows, coming_context, blocks } = batch;
    let (work, coming) = amounts([tokens, pairs, rows, context, coming_rows, coming_context]);
    BatchWork { work, coming, blocks: blocks.min(MOST).cast_signed() }
}

fn amounts(counts: [u64; 6]) -> (StepWork, Coming) {
    let [tokens, pairs, rows, context, coming_rows, coming_context] = counts.map(|count| count.min(MOST));
    (StepWork { tokens, pairs, rows, context }, Coming { rows: coming_rows, context: coming_context })
}

/// How fast a worker says that KV leaves it, and comes from its store. What no rate can be is not known.
fn links(event: v1::LinksEvent) -> Links {
    let rates = event.links.into_iter().take(MOST_LINKS).map(|link| (WorkerId(link.worker), link.bytes_per_second));
    Links::new(event.token_bytes, rates).with_load(event.load_seconds)
}

/// `None`: a name is not whole.
fn change(event: v1::CacheEvent) -> Option<KvChange> {
    let v1::CacheEvent { number, afresh, stored, removed, tally } = event;
    let tally = tally.map(|v1::CacheTally { blocks, sum }| Tally { blocks, sum });
    let (stored, removed) = (short_names(&stored)?, short_names(&removed)?);
    Some(KvChange { number, afresh, stored, removed, tally })
}

/// The first half of each name ([`baton_policy::BlockName::short`]).
fn short_names(names: &[u8]) -> Option<Vec<u64>> {
    let (names, rest) = names.as_chunks::<16>();
    rest.is_empty().then(|| names.iter().map(|name| u128::from_le_bytes(*name) as u64).collect())
}
