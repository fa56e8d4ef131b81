//! KV of a conversation is loaded before its next turn is likely.

use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_policy::BlockName;
use baton_proto::v1::CacheEvent;
use baton_proto::v1::worker_event::Event;
use baton_router::RouterConfig;
use serde_json::json;

use crate::following::predicted;
use crate::support::{Cluster, bytes};

const ANSWER: &str = "yes";
/// From an answer to the next prompt.
const THINKS: Duration = Duration::from_millis(100);

/// A prompt of 21 blocks and a few tokens.
fn prompt() -> String {
    "What was asked before need not be computed again. ".repeat(7)[..340].to_owned()
}

/// A router, and a decode worker that has the prompt's blocks in its store only.
async fn with_store(config: RouterConfig) -> Cluster {
    let mut cluster = Cluster::with(config, 0, 0, &[ANSWER]).await;
    let names: Vec<BlockName> = BlockName::root("", 16).chain(&bytes(&prompt()), 16).collect();
    let stored = names.iter().flat_map(|name| name.0.to_le_bytes()).collect();
    let event = Event::Store(CacheEvent { number: 1, afresh: true, stored, ..CacheEvent::default() });
    let exchanges = |member: &mut baton_cluster::Member| member.exchanges = 5;
    cluster.add_and(Role::Decode, exchanges, |worker| worker.news_will_be([vec![event]])).await;
    cluster.readiness.wait().await;
    cluster.seen(1).await;
    cluster
}

/// Turns of a conversation: here the same prompt, again and again.
async fn talk(cluster: &Cluster, turns: usize) {
    for _ in 0..turns {
        cluster.complete(json!({"prompt": prompt()})).await;
        tokio::time::sleep(THINKS).await;
    }
}

#[tokio::test]
async fn a_conversation_that_is_likely_to_go_on_is_loaded_before_it_does() {
    let cluster = with_store(RouterConfig { recall_turns: true, ..predicted() }).await;
    talk(&cluster, 8).await;
    let asked = Instant::now();
    cluster.complete(json!({"prompt": prompt()})).await;
    let prefix = cluster.worker(0).recalled().await;
    assert!(asked.elapsed() >= THINKS, "not before its time");
    // The whole blocks, and one token after them.
    assert_eq!(prefix.tokens, bytes(&prompt())[..337]);
    cluster.stop().await;
}

#[tokio::test]
async fn nothing_is_loaded_ahead_of_need_by_default() {
    let cluster = with_store(predicted()).await;
    talk(&cluster, 12).await;
    assert_eq!(cluster.worker(0).recalls(), 0);
    cluster.stop().await;
}
