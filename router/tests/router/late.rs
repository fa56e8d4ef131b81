//! When decode blocks are reserved: while the prompt is on its way to the prefill worker, or only when its turn is near there.

use std::time::Duration;

use baton_cluster::Role;
use baton_router::RouterConfig;
use serde_json::json;

use crate::support::{Cluster, Prefill, TEXT, config};

fn late() -> RouterConfig {
    RouterConfig { late_reservation: Duration::ZERO, ..config() }
}

/// Both are asked before either has said anything: a prompt does not wait for one worker's step after the other's.
#[tokio::test]
async fn both_workers_are_asked_at_once() {
    let cluster = Cluster::with(config(), 1, 1, &["hello"]).await;
    cluster.world.due.send_replace(false);
    let answer = async {
        let (status, answer) = cluster.ask(TEXT, &json!({"prompt": "hi", "max_tokens": 8})).await;
        assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some("hello")), "{answer}");
    };
    let taken = async {
        cluster.world.queued.subscribe().wait_for(|queued| *queued == 1).await.unwrap();
        cluster.worker(1).was_asked(1).await;
        cluster.world.due.send_replace(true);
    };
    tokio::join!(answer, taken);
    assert_eq!((cluster.worker(0).asked().len(), cluster.worker(1).asked().len()), (1, 1));
    cluster.stop().await;
}

#[tokio::test]
async fn no_decode_worker_is_asked_before_the_prompts_turn_is_near() {
    let cluster = Cluster::with(late(), 1, 1, &["hello"]).await;
    cluster.world.due.send_replace(false);
    let body = json!({"prompt": "hi", "max_tokens": 8});
    let answer = async {
        let (status, answer) = cluster.ask(TEXT, &body).await;
        assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some("hello")), "{answer}");
    };
    let turn = async {
        cluster.world.queued.subscribe().wait_for(|queued| *queued == 1).await.unwrap();
        assert_eq!((cluster.worker(0).asked().len(), cluster.worker(1).asked().len()), (1, 0));
        cluster.world.due.send_replace(true);
    };
    tokio::join!(answer, turn);
    assert_eq!(cluster.worker(1).asked().len(), 1);
    cluster.stop().await;
}

/// I5: what waits is given up with its request.
#[tokio::test]
async fn a_prompt_that_waits_is_dropped_with_its_client() {
    let cluster = Cluster::with(late(), 1, 1, &["hello"]).await;
    cluster.world.due.send_replace(false);
    let body = json!({"prompt": "hi", "max_tokens": 8});
    tokio::select! {
        _ = cluster.ask(TEXT, &body) => panic!("its turn does not come"),
        _ = async { cluster.world.queued.subscribe().wait_for(|queued| *queued == 1).await.unwrap(); } => {}
    }
    cluster.worker(0).was_dropped(1).await;
    cluster.stop().await;
}

#[tokio::test]
async fn the_request_goes_on_elsewhere_when_the_worker_where_it_waits_fails() {
    let cluster = Cluster::with(late(), 2, 1, &["hello"]).await;
    cluster.worker(0).prefill_will([Prefill::Refuse(tonic::Status::unavailable("no"))]);
    cluster.worker(1).prefill_will([Prefill::Refuse(tonic::Status::unavailable("no"))]);
    let (status, answer) = cluster.ask(TEXT, &json!({"prompt": "hi", "max_tokens": 8})).await;
    assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some("hello")), "{answer}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_of_an_older_version_gets_the_target_with_the_request() {
    let mut cluster = Cluster::with(late(), 0, 1, &["hello"]).await;
    cluster.add(Role::Prefill, |member| member.late_targets = false).await;
    cluster.seen(2).await;
    let (status, answer) = cluster.ask(TEXT, &json!({"prompt": "hi", "max_tokens": 8})).await;
    assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some("hello")), "{answer}");
    assert_eq!((*cluster.world.queued.borrow(), cluster.worker(1).asked().len()), (0, 1));
    cluster.stop().await;
}
