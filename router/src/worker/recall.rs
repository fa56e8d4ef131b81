//! KV of conversations is brought into a pool before their next turn is likely ([`baton_policy::Returns`]).

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use baton_policy::{BlockName, Known, Recall, Returns};
use baton_proto::v1;
use baton_proto::v1::exchange_client::ExchangeClient;
use baton_runtime::metrics::RECALLS;
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tonic::Request;

use super::Workers;
use super::held::{IN_POOLS, IN_STORES};
use super::keep::take;

/// Tokens of conversations that are awaited, 64 MiB; others are left out (I5).
const TOKENS: usize = 16 << 20;
/// How long a worker may take to say that it has heard: it does so between two steps.
const HEARS: Duration = Duration::from_secs(10);

/// What is awaited.
pub(super) struct Recaller {
    returns: Mutex<Returns>,
    room: Arc<Semaphore>,
}

impl Default for Recaller {
    fn default() -> Recaller {
        Recaller { returns: Mutex::default(), room: Arc::new(Semaphore::new(TOKENS)) }
    }
}

impl Recaller {
    /// A prompt with these blocks has come.
    pub fn came(&self, names: &[BlockName]) {
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        returns.came(names, Instant::now().into_std());
    }

    fn ended(&self, tenant: u64, prompt: BlockName) -> Option<Duration> {
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        returns.ended(tenant, prompt, Instant::now().into_std())
    }
}

impl Workers {
    /// Notes that an answer to a prompt of so many tokens has ended; these are the blocks of both. If the conversation is likely to go on, its KV is
    /// brought up shortly before. `prefix`: the tokens.
    pub fn recall(
        self: &Arc<Self>,
        tenant: u64,
        prompt: usize,
        names: &Arc<[BlockName]>,
        prefix: impl FnOnce() -> v1::Prefix,
    ) {
        let Some(recaller) = &self.recaller else { return };
        let size = self.block_size().max(1) as usize;
        let Some(last) = (prompt / size).checked_sub(1).and_then(|at| names.get(at)) else { return };
        let Some(after) = recaller.ended(tenant, *last) else { return };
        let prefix = prefix();
        let tokens = u32::try_from(prefix.tokens.len()).unwrap_or(u32::MAX);
        let Ok(room) = Arc::clone(&recaller.room).try_acquire_many_owned(tokens) else { return };
        tokio::spawn(bring_up(Arc::downgrade(self), Arc::clone(names), prefix, after, room));
    }

    fn to_recall(&self, names: &Arc<[BlockName]>) -> Option<Recall> {
        let (pool, store) = (self.held.find(names, IN_POOLS, 0), self.stored.find(names, IN_STORES, 0));
        self.fleet().recall(names, Known { pool: &pool, store: &store }, Instant::now().into_std())
    }
}

async fn bring_up(
    workers: Weak<Workers>,
    names: Arc<[BlockName]>,
    prefix: v1::Prefix,
    after: Duration,
    _room: OwnedSemaphorePermit,
) -> Option<()> {
    sleep(after).await;
    let recall = workers.upgrade()?.to_recall(&names)?;
    match recall {
        Recall::Load(worker, tokens) => {
            let channel = workers.upgrade()?.table().channels.get(&worker).cloned()?;
            // One token after the last block.
            let most = prefix.tokens.len().min(tokens as usize + 1);
            let (request, tokens) = (prefix.request_id.clone(), prefix.tokens[..most].to_vec());
            let prefix = Some(v1::Prefix { tokens, ..prefix });
            let mut worker_of = ExchangeClient::new(channel);
            let asked = timeout(HEARS, worker_of.recall(Request::new(v1::RecallRequest { prefix }))).await;
            let how = if matches!(asked, Ok(Ok(_))) { "asked" } else { "failed" };
            counter!(RECALLS, "outcome" => how).increment(1);
            tracing::debug!(request, %worker, how, "a conversation's KV is to be loaded before its next turn");
        }
        Recall::Take(keep) => {
            take(&workers, |_, _| Some(keep), &names, &prefix, RECALLS).await;
        }
    }
    Some(())
}
