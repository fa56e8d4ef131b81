//! What a router does around its answers: models, readiness, placement, metrics.

use std::time::Duration;

use crate::support::{CHAT, Cluster, Decode, MODEL, NAME, Prefill, TEXT, config, data_lines, hello, streamed};
use baton_router::RouterConfig;
use serde_json::{Value, json};

/// Choices of one prompt, and a conversation's next turn, go to the workers with the prompt's KV. Other prompts go to workers
/// in turn.
#[tokio::test]
async fn what_begins_alike_goes_to_the_same_workers() {
    let cluster = Cluster::start(2, 2, "an answer of its own").await;
    let asked = || [0, 1, 2, 3].map(|worker| cluster.worker(worker).asked().len());
    let prompt = "a prompt that is long enough to have a name";
    cluster.complete(json!({"prompt": prompt, "n": 4})).await;
    assert_eq!(asked(), [4, 0, 4, 0]);
    cluster.complete(json!({"prompt": format!("{prompt}an answer of its own and what follows it then")})).await;
    assert_eq!(asked(), [5, 0, 5, 0], "more than half of it was there");
    cluster.complete(json!({"prompt": prompt, "cache_salt": "tenant"})).await;
    assert_eq!(asked(), [5, 1, 5, 1], "another tenant has its turn");
    cluster.stop().await;
}

#[tokio::test]
async fn the_context_is_the_shortest_of_the_workers() {
    let mut cluster = Cluster::start(0, 1, "a").await;
    for context in [100, 0, 200] {
        cluster.add(baton_cluster::Role::Prefill, |m| m.context_tokens = context).await;
    }
    cluster.add(baton_cluster::Role::Decode, |m| (m.model, m.context_tokens) = ("other".into(), 50)).await;
    cluster.seen(5).await;
    let (status, chat) = cluster.ask(CHAT, &hello()).await;
    assert_eq!(status, 200, "{chat}");
    let left = 100 - chat["usage"]["prompt_tokens"].as_u64().unwrap() as u32;
    assert_eq!(
        cluster.worker(0).asked()[0].sampling.clone().unwrap().max_tokens,
        left,
        "as many as every worker takes"
    );
    let list: Value = cluster.http.get(cluster.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    assert_eq!(list["data"][0]["max_model_len"], 100);
    let (status, error) = cluster.ask(TEXT, &json!({"prompt": "hi", "max_tokens": 99})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "{error}");
    cluster.stop().await;
}

#[tokio::test]
async fn models_are_listed_by_the_name_clients_use() {
    let cluster = Cluster::start(0, 1, "a").await;
    let get = async |path: &str| {
        let response = cluster.http.get(cluster.url(path)).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let (_, list) = get("/v1/models").await;
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(get(&format!("/v1/models/{MODEL}")).await, (200, list["data"][0].clone()));
    let (status, error) = get("/v1/models/org/other").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    for name in [MODEL, NAME] {
        assert_eq!(cluster.ask(TEXT, &json!({"model": name, "prompt": "x"})).await.0, 200);
    }
    let (status, body) = get("/v1/nothing").await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("unknown_url")));
    let (status, body) = get(CHAT).await;
    assert_eq!((status, &body["error"]["code"]), (405, &json!("method_not_allowed")));
    cluster.stop().await;
}

#[tokio::test]
async fn ready_follows_the_workers_and_draining_ones_get_nothing() {
    let mut cluster = Cluster::start(0, 0, "fine").await;
    let ready =
        async |cluster: &Cluster| cluster.http.get(cluster.url("/ready")).send().await.unwrap().status().as_u16();
    assert_eq!(ready(&cluster).await, 503);
    let response = cluster.post(TEXT, &json!({"prompt": "hi"})).await;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    cluster.add(baton_cluster::Role::Decode, |m| m.draining = true).await;
    cluster.add(baton_cluster::Role::Decode, |m| m.model = "other".into()).await;
    cluster.seen(2).await;
    assert_eq!(ready(&cluster).await, 503);
    cluster.add(baton_cluster::Role::Decode, |_| {}).await;
    cluster.readiness.wait().await;
    assert_eq!(ready(&cluster).await, 200);
    for _ in 0..3 {
        cluster.complete(json!({})).await;
    }
    assert_eq!(cluster.worker(2).asked().len(), 3);
    let view = cluster.router.cluster();
    assert_eq!((view["stale"].clone(), view["members"].as_array().unwrap().len()), (json!(false), 3));
    assert_eq!(view["members"][0]["draining"], true);
    // The last worker goes. A load balancer still sends here, and clients are told.
    cluster.forget(2).revoke().await;
    cluster.seen(2).await;
    assert_eq!((ready(&cluster).await, cluster.readiness.reason()), (503, None));
    let (status, error) = cluster.ask(TEXT, &json!({"prompt": "hi"})).await;
    assert_eq!(status, 503);
    assert!(error["error"]["message"].as_str().unwrap().contains("no decode worker"), "{error}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_long_prefill_keeps_the_stream_alive_with_comments() {
    let cluster =
        Cluster::with(RouterConfig { keep_alive: Duration::from_millis(5), ..config() }, 1, 1, &["fine"]).await;
    cluster.worker(0).prefill_will([Prefill::Stall]);
    let mut response = cluster.post(TEXT, &json!({"prompt": "hi", "stream": true})).await;
    for _ in 0..2 {
        assert_eq!(response.chunk().await.unwrap().unwrap(), ": keep-alive\n\n");
    }
    // The prefill worker dies; decode computes the prompt.
    cluster.worker(0).cut();
    let mut rest = String::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        rest += std::str::from_utf8(&chunk).unwrap();
    }
    let lines = data_lines(&rest);
    let chunks: Vec<Value> = lines.iter().filter_map(|l| serde_json::from_str(l).ok()).collect();
    assert_eq!(streamed(&chunks, 0), "fine");
    cluster.stop().await;
}

#[tokio::test]
async fn a_request_keeps_the_id_its_client_gave_it() {
    let cluster = Cluster::start(0, 1, "fine").await;
    let post = cluster.http.post(cluster.url(TEXT)).json(&json!({"prompt": "hi"}));
    let response = post.header("x-request-id", "my-id-1").send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "my-id-1");
    assert_eq!(response.json::<Value>().await.unwrap()["id"], "my-id-1");
    assert_eq!(cluster.worker(0).asked()[0].request_id, "my-id-1");
    cluster.stop().await;
}

#[tokio::test]
async fn what_happened_is_counted() {
    let metrics = baton_runtime::metrics::install().unwrap();
    let cluster = Cluster::start(1, 1, "fine").await;
    cluster.complete(json!({})).await;
    cluster.ask(TEXT, &json!({"prompt": "hi", "model": "nope"})).await;
    cluster.worker(1).decode_will([Decode::BadKv]);
    cluster.complete(json!({})).await;
    cluster.complete(json!({"service_tier": "flex"})).await;
    let text = metrics.render();
    for want in [
        "baton_time_to_first_token_seconds_count{class=\"interactive\"}",
        "baton_time_to_first_token_seconds_count{class=\"batch\"}",
        "baton_inter_token_latency_seconds_count{class=\"batch\"}",
        "baton_requests_in_flight",
        "baton_rejected_total{reason=\"model_not_found\",class=\"unknown\"}",
        "baton_recoveries_total{leg=\"transfer\",cause=\"kv_verification_error\"}",
        "baton_requests_total{outcome=\"ok\"}",
        "baton_cluster_members{role=\"decode\"}",
    ] {
        assert!(text.contains(want), "{want} is missing in\n{text}");
    }
    cluster.stop().await;
}
