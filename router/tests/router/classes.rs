//! Batch requests: how they are asked for, what they are told, and how they give way to interactive ones.

use std::time::Duration;

use crate::support::{Cluster, Decode, config};
use baton_cluster::Role;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_types::Class;
use serde_json::{Value, json};

fn chat(tier: Value) -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "service_tier": tier})
}

/// Workers learn the class by the priority, clients by the tier.
#[tokio::test]
async fn an_answer_says_which_tier_it_was_served_in() {
    let cluster = Cluster::start(0, 1, "hello").await;
    let (flex, batch) = (json!("flex"), Class::Batch.at_workers(0));
    for (tier, told, priority) in
        [(flex.clone(), flex, batch), (json!("priority"), json!("default"), 0), (Value::Null, Value::Null, 0)]
    {
        let (status, answer) = cluster.ask("/v1/chat/completions", &chat(tier.clone())).await;
        assert_eq!((status, &answer["service_tier"]), (200, &told), "{tier}");
        assert_eq!(cluster.worker(0).asked().last().unwrap().priority, priority);
    }
    for (tier, told) in [(json!("flex"), "flex"), (Value::Null, "default")] {
        let (_, response) = cluster.ask("/v1/responses", &json!({"input": "hi", "service_tier": tier})).await;
        assert_eq!(response["service_tier"], told);
        let (_, text) = cluster.ask("/v1/completions", &json!({"prompt": "hi", "service_tier": tier})).await;
        assert!(text.get("service_tier").is_none(), "{text}");
    }
    let mut stream = chat(json!("flex"));
    stream["stream"] = json!(true);
    let chunks = cluster.http.post(cluster.url("/v1/chat/completions")).json(&stream).send().await.unwrap();
    let text = chunks.text().await.unwrap();
    assert!(
        text.lines().filter(|line| line.starts_with("data: {")).all(|line| line.contains(r#""service_tier":"flex""#))
    );
    let (status, error) = cluster.ask("/v1/chat/completions", &chat(json!("cheap"))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("service_tier")));
    cluster.stop().await;
}

#[tokio::test]
async fn a_call_says_its_class_and_is_told_it() {
    let cluster = Cluster::start(0, 1, "hello").await;
    let mut client = InferenceClient::connect(cluster.grpc_url()).await.unwrap();
    let mut call = async |class: i32, priority| {
        let input = Some(v1::generate_request::Input::Text("hi".into()));
        let request = v1::GenerateRequest { input, class, priority, ..Default::default() };
        let mut answer = client.generate(request).await?.into_inner();
        let mut finish = None;
        while let Some(message) = answer.message().await? {
            finish = finish.or(message.finish);
        }
        Ok::<_, tonic::Status>(finish.unwrap().class())
    };
    assert_eq!(call(v1::Class::Unspecified.into(), 5).await.unwrap(), v1::Class::Interactive);
    assert_eq!(call(v1::Class::Batch.into(), -5).await.unwrap(), v1::Class::Batch);
    let priorities: Vec<i32> = cluster.worker(0).asked().iter().map(|sequence| sequence.priority).collect();
    assert_eq!(priorities, [5, Class::Batch.at_workers(-5)]);
    for (class, priority, field) in [(3, 0, "class"), (1, 1 << 30, "priority")] {
        let refused = call(class, priority).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.metadata().get("param").unwrap().to_str().unwrap()),
            (tonic::Code::InvalidArgument, field)
        );
    }
    cluster.stop().await;
}

/// A flood of batch requests, without keys: those that wait, wait in the router, and interactive requests need not.
#[tokio::test]
async fn a_flood_of_batch_requests_waits_and_makes_room_for_interactive_ones() {
    // A prompt at a time: the next one begins when the one before it has its first token.
    let settings = RouterConfig { max_inflight: 20, fair_window: 1, ..config() };
    let mut cluster = Cluster::with(settings, 0, 0, &["hello"]).await;
    let worker = cluster.add(Role::Decode, |member| member.max_running = 8).await;
    cluster.readiness.wait().await;
    cluster.seen(1).await;
    worker.decode_will(vec![Decode::Stall(1); 7]);
    let stream = json!({"prompt": "hi", "max_tokens": 3, "stream": true, "service_tier": "flex"});
    let mut flood = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let request = cluster.http.post(cluster.url("/v1/completions")).json(&stream);
        flood.spawn(async move {
            let mut answer = request.send().await.unwrap();
            let status = answer.status().as_u16();
            // Held as long as the test lasts, unless it is turned away.
            while status == 200 && answer.chunk().await.unwrap().is_some() {}
            status
        });
    }
    while worker.asked().len() < 7 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(worker.asked().len(), 7, "an eighth of the places is left to interactive requests");
    let hi = json!({"prompt": "hi", "max_tokens": 3});
    let (refused, _) = cluster.ask("/v1/completions", &stream).await;
    assert_eq!(refused, 429, "all places of the router are taken");
    assert_eq!(cluster.ask("/v1/completions", &hi).await.0, 200, "a batch request gives its place up");
    assert_eq!(flood.join_next().await.unwrap().unwrap(), 429);
    assert_eq!(flood.len(), 19);
    let asked = worker.asked();
    assert_eq!((asked.len(), asked[7].priority), (8, 0), "and it did not wait for any");
    // Those that wait begin as others end.
    worker.decode_will([]);
    flood.shutdown().await;
    while cluster.ask("/v1/completions", &json!({"prompt": "hi", "service_tier": "flex"})).await.0 != 200 {}
    cluster.stop().await;
}

/// An interactive request gives a worker up that takes too long; a batch request may have given way to others.
#[tokio::test]
async fn batch_requests_are_patient() {
    let (first_token_timeout, token_timeout) = (Duration::from_millis(200), Duration::from_millis(200));
    let settings = RouterConfig { first_token_timeout, token_timeout, max_attempts: 1, ..config() };
    let cluster = Cluster::with(settings, 0, 1, &["hello"]).await;
    for (tier, status) in [("flex", 200), ("default", 503)] {
        cluster.worker(0).decode_will([Decode::Slow(Duration::from_millis(600))]);
        let (got, answer) =
            cluster.ask("/v1/completions", &json!({"prompt": "hi", "max_tokens": 2, "service_tier": tier})).await;
        assert_eq!(got, status, "{tier}: {answer}");
    }
    cluster.stop().await;
}
