//! What a token costs the router in allocations.

use std::time::Duration;

use crate::support::allocations::{count_here, counted};
use crate::support::{CHAT, Cluster, Decode, config, hello, merged};
use baton_cluster::Role;
use serde_json::json;
use tokio::runtime::Builder;

/// Most allocations a token while tokens come one at a time. What there are belong to timers and to buffers that grow.
const A_TOKEN: f64 = 0.5;

#[test]
fn a_token_allocates_nothing() {
    let router =
        Builder::new_multi_thread().worker_threads(1).enable_all().on_thread_start(count_here).build().unwrap();
    let others = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let answer: &'static str = "x".repeat(500).leak();
    let cluster = router.spawn(async move { Cluster::with(config(), 0, 0, &[answer]).await });
    let mut cluster = others.block_on(cluster).unwrap();
    let counts = others.block_on(async {
        let slow = Decode::Slow(Duration::from_millis(2));
        cluster.add_with(Role::Decode, |worker| _ = worker.decode_will(vec![slow; 3])).await;
        cluster.readiness.wait().await;
        let mut counts = Vec::new();
        // The first request opens connections.
        for tokens in [20, 100, 400] {
            let before = counted();
            let chunks = cluster.stream(CHAT, merged(hello(), json!({"max_tokens": tokens, "ignore_eos": true}))).await;
            assert!(chunks.len() > tokens / 2, "{} chunks: tokens did not come one at a time", chunks.len());
            counts.push(counted() - before);
        }
        counts
    });
    let a_token = (counts[2] as f64 - counts[1] as f64) / 300.0;
    assert!(a_token <= A_TOKEN, "{a_token:.2} allocations a token; {counts:?}");
    others.block_on(cluster.stop());
}
