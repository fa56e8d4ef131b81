//! What is predicted for tenants that share the workers, and what is refused for it.

use std::time::Duration;

use crate::following::{gives, predicted, queues};
use crate::support::{Cluster, Decode};
use crate::tenants::{ONE, TWO, ask, error, write};
use baton_cluster::{Member, Role};
use baton_router::RouterConfig;
use serde_json::json;

/// A router that predicts, with the keys "one" and "two" of two tenants.
async fn cluster() -> (Cluster, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, &[("flood", ONE, ""), ("calm", TWO, "")]);
    let settings = RouterConfig { keys_file: Some(path), local_prompt: 0, ..predicted() };
    (Cluster::with(settings, 0, 0, &["hello"]).await, folder)
}

/// Without shares, all prompts at a worker would count, and tenants that ask little be refused beside one that floods.
#[tokio::test]
async fn a_tenant_is_not_refused_for_the_prompts_of_others() {
    let (mut cluster, _folder) = cluster().await;
    let prefill = cluster.add_with(Role::Prefill, |worker| worker.news_will_be([queues(9000)])).await;
    let decode = cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(1)])).await;
    cluster.readiness.wait().await;
    cluster.seen(2).await;
    prefill.was_followed(1).await;
    // What the other tenant has at the workers.
    decode.decode_will([Decode::Stall(1)]);
    let mut other = ask(&cluster, Some("one"), &json!({"prompt": "hi", "stream": true})).await;
    assert!(other.chunk().await.unwrap().is_some());
    let ask = async |priority: i32| {
        let body = json!({"prompt": "hi", "max_tokens": 3, "reject_ttft_ms": 2000, "priority": priority});
        ask(&cluster, Some("two"), &body).await
    };
    // Until the router has read what they say. Work with a later priority comes after all tenants' prompts.
    let refused = async {
        loop {
            let answer = ask(1).await;
            if answer.status() == 429 {
                return error(answer).await.1;
            }
        }
    };
    let refused = tokio::time::timeout(Duration::from_secs(30), refused).await.expect("a prompt is refused");
    assert_eq!(refused, json!("slo_missed"));
    assert_eq!(ask(0).await.status(), 200);
    drop(other);
    cluster.stop().await;
}

/// Otherwise it would be answered too late, though it asked not to be.
#[tokio::test]
async fn a_request_that_waits_for_its_turn_too_long_is_refused() {
    let (mut cluster, _folder) = cluster().await;
    let one_at_a_time = |member: &mut Member| member.max_running = 1;
    let worker = cluster.add(Role::Decode, one_at_a_time).await;
    cluster.readiness.wait().await;
    cluster.seen(1).await;
    worker.decode_will([Decode::Stall(1)]);
    let mut first = ask(&cluster, Some("one"), &json!({"prompt": "hi", "stream": true})).await;
    assert!(first.chunk().await.unwrap().is_some());
    let begun = std::time::Instant::now();
    let late = ask(&cluster, Some("one"), &json!({"prompt": "hi", "reject_ttft_ms": 300})).await;
    assert!((Duration::from_millis(300)..Duration::from_secs(20)).contains(&begun.elapsed()));
    assert_eq!(error(late).await, (429, json!("slo_missed")));
    assert_eq!(worker.asked().len(), 1, "no worker was asked");
    drop(first);
    let served = ask(&cluster, Some("one"), &json!({"prompt": "hi", "reject_ttft_ms": 30_000})).await;
    assert_eq!(served.status(), 200);
    cluster.stop().await;
}
