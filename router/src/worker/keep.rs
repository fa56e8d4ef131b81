//! KV stores take what workers have computed, and idle workers what many prompts begin with ([`baton_policy::Keep`]), a little after a request
//! has ended.
//!
//! A router asks the two, as for a prefix that a prompt needs ([`super::fetch`]). No request waits for it. It goes piece by piece,
//! few at a time; where there is too much, some is left out, and whatever fails is computed when it is needed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_policy::{BlockName, Keep, Known};
use baton_proto::v1;
use baton_runtime::metrics::{HOT_COPIES, KEEPS};
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep};

use super::fetch::{Failed, moves};
use super::held::{IN_POOLS, IN_STORES};
use super::{Table, Workers};

/// How long after its end a request's blocks are looked for: once they should be told of, and once more for a worker that was in a long step.
const LOOKS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];
/// Most prompts and answers that wait to be kept, and most that move at a time (I5).
const WAITING: usize = 256;
const MOVING: usize = 2;
/// How long a store may take to lend blocks for a piece, and the piece to move.
const LENDS: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(10);
/// A prefix that so many requests use in a minute is hot.
pub(super) const HOT: u8 = 8;
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
    /// Has others take the blocks with these names, of a request that has ended: a KV store what it lacks of them, and an idle worker what is hot.
    /// `prefix`: their tokens.
    pub fn keep(self: &Arc<Self>, names: Arc<[BlockName]>, prefix: impl FnOnce() -> v1::Prefix) {
        let table = self.table();
        if !(table.has_stores || table.copies_hot) || names.is_empty() {
            return;
        }
        let Ok(place) = Arc::clone(&self.keeper.waiting).try_acquire_owned() else { return };
        tokio::spawn(keep(Arc::downgrade(self), names, prefix(), place));
    }

    /// What a store should take of these blocks.
    fn to_keep(&self, names: &Arc<[BlockName]>) -> Option<Keep> {
        let (pool, store) = (self.held.find(names, IN_POOLS, 0), self.stored.find(names, IN_STORES, 0));
        self.fleet().keep(names, Known { pool: &pool, store: &store }, Instant::now().into_std())
    }

    /// What an idle worker should take of these blocks.
    fn to_copy(&self, names: &Arc<[BlockName]>) -> Option<Keep> {
        let pool = self.held.find(names, IN_POOLS, 0);
        self.fleet().hot_copy(names, &pool, Instant::now().into_std())
    }

    /// Counts a use of these blocks, some at a time, since placements wait meanwhile.
    fn count(&self, names: &[BlockName], table: &Table) {
        let now = Instant::now().into_std();
        for names in names.chunks(COUNTED) {
            let mut fleet = self.fleet();
            if table.has_stores {
                fleet.used(names);
            }
            if table.copies_hot {
                fleet.used_hot(names, now);
            }
        }
    }
}

async fn keep(workers: Weak<Workers>, names: Arc<[BlockName]>, prefix: v1::Prefix, place: OwnedSemaphorePermit) {
    let _place = place;
    for (look, wait) in LOOKS.into_iter().enumerate() {
        sleep(wait).await;
        let Some(here) = workers.upgrade() else { return };
        let table = here.table();
        if look == 0 {
            here.count(&names, &table);
        }
        let moving = Arc::clone(&here.keeper.moving);
        drop(here);
        let Ok(_moving) = moving.acquire_owned().await else { return };
        if table.has_stores {
            take(&workers, Workers::to_keep, &names, &prefix, KEEPS).await;
        }
        if table.copies_hot {
            take(&workers, Workers::to_copy, &names, &prefix, HOT_COPIES).await;
        }
    }
}

/// Moves `what` somebody should take of a prefix, piece by piece, as far as it goes, and counts the pieces.
pub(super) async fn take(
    workers: &Weak<Workers>,
    what: impl Fn(&Workers, &Arc<[BlockName]>) -> Option<Keep>,
    names: &Arc<[BlockName]>,
    prefix: &v1::Prefix,
    counts: &'static str,
) -> Option<()> {
    let keep = what(&*workers.upgrade()?, names)?;
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
        counter!(counts, "outcome" => how).increment(1);
        let (Keep { to, from, .. }, request) = (keep, &prefix.request_id);
        match &outcome {
            Ok(tokens) => tracing::debug!(request, %from, %to, tokens, "a prefix was taken"),
            Err(Failed::Refused(status) | Failed::NotGiven(status) | Failed::NotTaken(status)) => {
                tracing::debug!(request, %from, %to, %status, "a prefix was not taken");
            }
        }
        workers.upgrade()?.apart(&outcome, to, from);
        outcome.ok()?;
    }
    Some(())
}
