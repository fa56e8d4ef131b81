//! Requests that are refused, and why.

use std::time::Duration;

use crate::support::{self, CHAT, CONTEXT, Cluster, Decode, TEXT, config, hello, text};
use baton_router::RouterConfig;
use baton_runtime::Bytes;
use serde_json::{Value, json};

#[tokio::test]
async fn bad_input_gets_an_error_that_names_the_field_and_the_next_request_works() {
    // I8
    let cluster = Cluster::start(1, 1, "fine").await;
    let with = |fields: Value| support::merged(json!({"prompt": "hi"}), fields);
    let long = "x".repeat(CONTEXT as usize);
    let cases: Vec<(Value, u16, Option<&str>, &str)> = vec![
        (with(json!({"model": "nope"})), 404, Some("model"), "serves \"bytes\""),
        (json!({}), 400, None, "missing field `prompt`"),
        (with(json!({"temperature": "hot"})), 400, Some("temperature"), "expected a number"),
        (with(json!({"temperature": -1})), 400, Some("temperature"), "between 0 and 100"),
        (with(json!({"top_p": 0})), 400, Some("top_p"), "above 0"),
        (with(json!({"max_tokens": 0})), 400, Some("max_tokens"), "at least 1"),
        (with(json!({"max_tokens": -5})), 400, Some("max_tokens"), "0 or above"),
        (with(json!({"n": 0})), 400, Some("n"), "1 to 128"),
        (with(json!({"n": 129})), 400, Some("n"), "1 to 128"),
        (with(json!({"n": 4000000000u64})), 400, Some("n"), "1 to 128"),
        (with(json!({"logprobs": 21})), 400, Some("top_logprobs"), "at most 20"),
        (with(json!({"stop": [""]})), 400, Some("stop"), "0 bytes"),
        (with(json!({"stop": ["a", "b", "c", "d", "e"]})), 400, Some("stop"), "at most 4"),
        (with(json!({"logit_bias": {"260": 1}})), 400, Some("logit_bias"), "0 to 259"),
        (with(json!({"logit_bias": {"5": 101}})), 400, Some("logit_bias"), "between -100 and 100"),
        (with(json!({"stop_token_ids": [999]})), 400, Some("stop_token_ids"), "0 to 259"),
        (with(json!({"suffix": "x"})), 400, Some("suffix"), "not supported"),
        (with(json!({"best_of": 0})), 400, Some("best_of"), "at least n"),
        (with(json!({"stream_options": {"include_usage": true}})), 400, Some("stream_options"), "needs stream"),
        (json!({"prompt": []}), 400, Some("prompt"), "empty"),
        (json!({"prompt": ""}), 400, Some("prompt"), "no tokens"),
        (json!({"prompt": [300]}), 400, Some("prompt"), "token id 300"),
        (json!({"prompt": [1, "a"]}), 400, Some("prompt[1]"), "invalid type"),
        (json!({"prompt": {"a": 1}}), 400, Some("prompt"), "a string, an array"),
        (json!({"prompt": long}), 400, Some("prompt"), "context is 512 tokens, but the prompt has 512"),
        (with(json!({"max_tokens": 511})), 400, Some("max_tokens"), "512 tokens, but 513"),
    ];
    for (body, status, param, words) in cases {
        let (got, answer) = cluster.ask(TEXT, &body).await;
        let error = &answer["error"];
        assert_eq!((got, error["param"].as_str()), (status, param), "{body}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {answer}");
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        assert_eq!(error["type"], kind);
        assert!(error.as_object().unwrap().contains_key("code"));
    }
    assert_eq!(cluster.worker(1).asked().len(), 0, "nothing was spent");
    assert_eq!(text(&cluster.complete(json!({})).await), "fine");
    cluster.stop().await;
}

#[tokio::test]
async fn broken_bodies() {
    let cluster = Cluster::with(RouterConfig { body_limit: Bytes(1000), ..config() }, 0, 1, &["fine"]).await;
    let send = async |body: Vec<u8>| {
        let response = cluster.http.post(cluster.url(TEXT)).body(body).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap()["error"].clone())
    };
    let (status, error) = send(b"{\"prompt\": \"hi\",\n  \"n\" 1}".to_vec()).await;
    assert_eq!((status, &error["code"]), (400, &json!("invalid_json")));
    assert!(error["message"].as_str().unwrap().contains("line 2, column 7"), "{error}");
    let (status, error) = send(vec![b' '; 2000]).await;
    assert_eq!((status, &error["code"]), (413, &json!("request_too_large")));
    let (status, _) = send(b"\xff\xfe".to_vec()).await;
    assert_eq!(status, 400);
    let (status, _) = send(Vec::new()).await;
    assert_eq!(status, 400);
    assert_eq!(text(&cluster.complete(json!({})).await), "fine");
    cluster.stop().await;
}

#[tokio::test]
async fn chats_a_model_cannot_take_are_refused() {
    let cluster = Cluster::start(0, 1, "fine").await;
    let image = json!([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://x"}}]);
    for (body, param) in [
        (json!({"messages": [{"role": "user", "content": image}]}), "messages[0].content[1]"),
        (json!({"messages": [{"role": "function", "content": "x"}]}), "messages[0].role"),
        (support::merged(hello(), json!({"top_logprobs": 5})), "top_logprobs"),
    ] {
        let (status, answer) = cluster.ask(CHAT, &body).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
    }
    let unknown = json!({"reasoning_effort": "low", "store": false, "metadata": {"a": "b"}, "some_new_field": [1]});
    assert_eq!(cluster.ask(CHAT, &support::merged(hello(), unknown)).await.0, 200, "new fields are skipped");
    cluster.stop().await;
}

#[tokio::test]
async fn requests_over_the_limit_are_told_to_come_back() {
    let cluster = Cluster::with(RouterConfig { max_inflight: 2, ..config() }, 0, 1, &["fine"]).await;
    cluster.worker(0).decode_will([Decode::Stall(0)]);
    let held = tokio::spawn(cluster.http.post(cluster.url(TEXT)).json(&json!({"prompt": "hi"})).send());
    cluster.worker(0).was_asked(1).await;
    let response = cluster.post(TEXT, &json!({"prompt": "hi", "n": 2})).await;
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["type"], "overloaded_error");
    cluster.complete(json!({"n": 1})).await;
    held.abort();
    cluster.worker(0).was_dropped(1).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_router_that_cannot_start_says_why() {
    let cluster = Cluster::start(0, 0, "x").await;
    let taken = RouterConfig { http: cluster.router.http_addr, ..config() };
    let error = Cluster::try_start(taken).await.unwrap_err().to_string();
    assert!(error.contains("--http") && error.contains("cannot listen"), "{error}");
    let same = RouterConfig { http: cluster.router.http_addr, grpc: cluster.router.http_addr, ..config() };
    let error = Cluster::try_start(same).await.unwrap_err().to_string();
    assert!(error.contains("--http and --grpc") && error.contains("must differ"), "{error}");
    let zero = RouterConfig { keep_alive: Duration::ZERO, ..config() };
    let error = Cluster::try_start(zero).await.unwrap_err().to_string();
    assert!(error.contains("keep_alive is 0"), "{error}");
    cluster.stop().await;
}
