//! KV stores take what workers have computed ([`baton_policy::Keep`]), a little after its request has ended.
//!
//! A router asks the store and the worker, as for a prefix that a prompt needs ([`super::fetch`]). No request waits for it. It goes piece by piece,
//! few at a time; where there is too much, some is left out, and whatever fails is computed when it is needed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_policy::{BlockName, Keep, Known};
use baton_proto::v1;
use baton_runtime::metrics as names;
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep};

use super::Workers;
use super::fetch::{Failed, moves};
use super::held::{IN_POOLS, IN_STORES};

/// How long after its end a request's blocks are looked for: once they should be told of, and once more for a worker that was in a long step.
const LOOKS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];
/// Most prompts and answers that wait to be kept, and most that move at a time (I5).
const WAITING: usize = 256;
const MOVING: usize = 2;
/// How long a store may take to lend blocks for a piece, and the piece to move.
const LENDS: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(10);
/// Names that are counted while placements wait.
const COUNTED: usize = 256;

/// Places for what is to be kept.
pub(super) struct Keeper {
    waiting: Arc<Semaphore>,
    moving: Arc<Semaphore>,
}

impl Default for Keeper {
    fn default() -> Keeper {
        Keeper { waiting: Arc::new(Semaphore::new(WAITING)), moving: Arc::new(Semaphore::new(MOVING)) }
    }
}

impl Workers {
    /// Has a KV store take the blocks with these names, of a request that has ended, if there is one and it lacks them. `prefix`: their tokens.
    pub fn keep(self: &Arc<Self>, names: Vec<BlockName>, prefix: impl FnOnce() -> v1::Prefix) {
        if !self.table().has_stores || names.is_empty() {
            return;
        }
        let Ok(place) = Arc::clone(&self.keeper.waiting).try_acquire_owned() else { return };
        tokio::spawn(keep(Arc::downgrade(self), names.into(), prefix(), place));
    }

    /// What a store should take of these blocks.
    fn to_keep(&self, names: &Arc<[BlockName]>) -> Option<Keep> {
        let (pool, store) = (self.held.find(names, IN_POOLS, 0), self.stored.find(names, IN_STORES, 0));
        self.fleet().keep(names, Known { pool: &pool, store: &store }, Instant::now().into_std())
    }
}

async fn keep(workers: Weak<Workers>, names: Arc<[BlockName]>, prefix: v1::Prefix, place: OwnedSemaphorePermit) {
    let _place = place;
    for (look, wait) in LOOKS.into_iter().enumerate() {
        sleep(wait).await;
        let Some(here) = workers.upgrade() else { return };
        if look == 0 {
            names.chunks(COUNTED).for_each(|names| here.fleet().used(names));
        }
        let moving = Arc::clone(&here.keeper.moving);
        drop(here);
        let Ok(_moving) = moving.acquire_owned().await else { return };
        take(&workers, &names, &prefix).await;
    }
}

/// Moves what a store lacks, piece by piece, as far as it goes.
async fn take(workers: &Weak<Workers>, names: &Arc<[BlockName]>, prefix: &v1::Prefix) -> Option<()> {
    let keep = workers.upgrade()?.to_keep(names)?;
    for end in keep.pieces() {
        let table = workers.upgrade()?.table();
        let [to, from] = [keep.to, keep.from].map(|worker| table.channels.get(&worker).cloned());
        // One token after the last block.
        let most = prefix.tokens.len().min(end as usize + 1);
        let piece = v1::Prefix { tokens: prefix.tokens[..most].to_vec(), ..prefix.clone() };
        let time = (LENDS, Instant::now() + PATIENCE);
        let outcome = moves((to?, from?), piece, time, oneshot::channel().0).await;
        let how = match &outcome {
            Ok(_) => "kept",
            Err(Failed::Refused(_)) => "refused",
            Err(Failed::NotGiven(_) | Failed::NotTaken(_)) => "failed",
        };
        counter!(names::KEEPS, "outcome" => how).increment(1);
        let (Keep { to, from, .. }, request) = (keep, &prefix.request_id);
        match &outcome {
            Ok(tokens) => tracing::debug!(request, %from, %to, tokens, "a KV store has taken a prefix"),
            Err(Failed::Refused(status) | Failed::NotGiven(status) | Failed::NotTaken(status)) => {
                tracing::debug!(request, %from, %to, %status, "a KV store has not taken a prefix");
            }
        }
        workers.upgrade()?.apart(&outcome, to, from);
        outcome.ok()?;
    }
    Some(())
}
