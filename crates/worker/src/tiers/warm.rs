//! Brings blocks from disk and object store to host memory while there is no room for them in the pool.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baton_engine::Exchange as Prefix;
use baton_kv_store::{BlockKey, Miss, Tier};
use baton_roles::tiers::Move;
use baton_store::{Got, KvStore};
use baton_types::{BlockId, SeqId};

/// Prefixes that wait for this; others are not warmed (I5).
const WAITING: usize = 16;
/// Blocks of which it has asked at a time. Few: what is loaded for prompts that have room goes first.
const AHEAD: usize = 4;
/// How long one prefix may take. Its prompt may have begun by then.
const LONGEST: Duration = Duration::from_secs(2);
/// A pause while the store has too much to read.
const BUSY: Duration = Duration::from_millis(5);

/// A prefix, and how many tokens of it are in the pool.
pub(super) type Wanted = (Box<Prefix>, u32);

/// Starts the thread. Of one prefix it brings so many blocks at most. It ends with the sender.
pub(super) fn start(store: Arc<KvStore>, groups: usize, most: usize) -> std::io::Result<mpsc::SyncSender<Wanted>> {
    let (sender, wanted) = mpsc::sync_channel::<Wanted>(WAITING);
    std::thread::Builder::new().name("kv-warm".to_owned()).spawn(move || {
        for (prefix, here) in wanted {
            let until = Instant::now() + LONGEST;
            warm(&store, below(&store, &prefix, here, groups).into_iter().take(most), until);
        }
    })?;
    Ok(sender)
}

/// The blocks of a prefix that are neither in the pool nor in host memory.
fn below(store: &KvStore, prefix: &Prefix, here: u32, groups: usize) -> Vec<BlockKey> {
    let size = store.shape().block_size();
    let count = (prefix.moves(size) / size) as usize;
    let blocks = vec![vec![BlockId(0); count]; groups];
    let all = Move { seq: SeqId(0), prefix: prefix.clone(), first: 0, blocks, known: vec![] }.copies(size);
    let names: Vec<_> = all.iter().map(|block| block.name).collect();
    let held = store.held_groups(&names);
    let missing = all.into_iter().zip(held).skip((here / size) as usize).filter(|(_, (tier, _))| *tier != Tier::Host);
    let key = |(block, (_, groups)): (baton_roles::tiers::Copied, (Tier, u32))| BlockKey {
        name: block.name,
        parent: block.parent,
        tokens: block.tokens.into(),
        groups,
    };
    missing.map(key).collect()
}

/// What is read comes to host memory, also if nobody waits for it.
fn warm(store: &KvStore, keys: impl Iterator<Item = BlockKey>, until: Instant) {
    let mut asked = VecDeque::new();
    for key in keys {
        loop {
            if Instant::now() >= until {
                return;
            }
            match store.get(key.clone()) {
                Got::Missed(Miss::Busy) => std::thread::sleep(BUSY),
                Got::Pending(pending) => break asked.push_back(pending),
                Got::Ready(_) | Got::Missed(_) => break,
            }
        }
        while asked.len() >= AHEAD
            && let Some(mut first) = asked.pop_front()
        {
            let _ = first.wait(until.saturating_duration_since(Instant::now()));
        }
    }
}
