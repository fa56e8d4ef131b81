//! Clients with API keys: who is let in, what it may do, how much it may use.

use std::path::Path;
use std::time::Duration;

use crate::support::{Cluster, Decode, config};
use axum::body::Body;
use baton_cluster::Role;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_runtime::Bytes;
use futures::{StreamExt, stream};
use reqwest::Response;
use serde_json::{Value, json};
use tonic::transport::Channel;
use tonic::{Code, Request};
use tower::Service;

/// Of the keys "one" and "two".
pub(crate) const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
pub(crate) const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

pub(crate) fn write(path: &Path, tenants: &[(&str, &str, &str)]) {
    let entry = |(name, hash, more): &(&str, &str, &str)| {
        format!("[[tenants]]\nname = '{name}'\nsha256 = ['{hash}']\n{more}\n")
    };
    std::fs::write(path, tenants.iter().map(entry).collect::<String>()).unwrap();
}

/// A router with these tenants and one decode worker.
async fn cluster(tenants: &[(&str, &str, &str)]) -> (Cluster, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, tenants);
    let settings = RouterConfig { keys_file: Some(path), ..config() };
    (Cluster::with(settings, 0, 1, &["hello"]).await, folder)
}

pub(crate) async fn ask(cluster: &Cluster, key: Option<&str>, body: &Value) -> Response {
    let request = cluster.http.post(cluster.url("/v1/completions")).json(body);
    let request = match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    };
    request.send().await.unwrap()
}

pub(crate) async fn error(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let body: Value = response.json().await.unwrap();
    (status, body["error"]["code"].clone())
}

fn hi() -> Value {
    json!({"prompt": "hi", "max_tokens": 3})
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn only_who_has_a_key_is_served() {
    let (cluster, _folder) = cluster(&[("a", ONE, "")]).await;
    for key in [None, Some("two"), Some("")] {
        let refused = ask(&cluster, key, &hi()).await;
        assert_eq!(header(&refused, "www-authenticate").as_deref(), Some("Bearer"));
        assert_eq!(error(refused).await, (401, json!("invalid_api_key")), "{key:?}");
    }
    assert_eq!(cluster.worker(0).asked().len(), 0, "no prompt got past");
    let served = ask(&cluster, Some("one"), &hi()).await;
    assert_eq!((served.status().as_u16(), header(&served, "x-ratelimit-limit-requests")), (200, None));
    for path in ["/v1/models", "/v1/models/model"] {
        assert_eq!(cluster.http.get(cluster.url(path)).send().await.unwrap().status(), 401, "{path}");
    }
    assert_eq!(cluster.http.get(cluster.url("/v1/models")).bearer_auth("one").send().await.unwrap().status(), 200);
    for path in ["/health", "/ready"] {
        assert_eq!(cluster.http.get(cluster.url(path)).send().await.unwrap().status(), 200, "{path}");
    }
    cluster.stop().await;
}

/// The status of a gRPC call whose body is this.
async fn call(cluster: &Cluster, key: Option<&str>, body: Body) -> String {
    let mut channel = Channel::from_shared(cluster.grpc_url()).unwrap().connect().await.unwrap();
    let uri = format!("{}/baton.v1.Inference/Generate", cluster.grpc_url());
    let mut request =
        axum::http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let answer = channel.call(request.body(tonic::body::Body::new(body)).unwrap()).await.unwrap();
    answer.headers()["grpc-status"].to_str().unwrap().to_owned()
}

/// A message that begins with so many bytes and has no end.
fn endless(bytes: usize) -> Body {
    let beginning = stream::iter([Ok::<_, std::io::Error>(vec![0; bytes])]);
    Body::from_stream(beginning.chain(stream::pending()))
}

/// I5: otherwise whoever can reach the port could fill the memory with messages that are never complete.
#[tokio::test]
async fn a_grpc_call_is_let_in_before_its_message_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, &[("a", ONE, "")]);
    let settings =
        RouterConfig { keys_file: Some(path), body_limit: Bytes(64 << 10), body_memory: Bytes(64 << 10), ..config() };
    let cluster = Cluster::with(settings, 0, 1, &["hello"]).await;
    let (unauthenticated, exhausted) = (Code::Unauthenticated as i32, Code::ResourceExhausted as i32);
    assert_eq!(call(&cluster, None, endless(100)).await, unauthenticated.to_string());
    assert_eq!(call(&cluster, Some("two"), endless(100)).await, unauthenticated.to_string());
    let one = || call(&cluster, Some("one"), Body::from(vec![0xff; 20 << 10]));
    assert_ne!(one().await, exhausted.to_string());
    {
        let mut held = std::pin::pin!(call(&cluster, Some("one"), endless(40 << 10)));
        // Bodies of others are refused once it has arrived.
        loop {
            tokio::select! {
                status = &mut held => panic!("it has ended: {status}"),
                status = one() => if status == exhausted.to_string() {
                    break;
                }
            }
        }
    }
    while one().await == exhausted.to_string() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut request = Request::new(v1::ListModelsRequest {});
    request.metadata_mut().insert("authorization", "Bearer one".parse().unwrap());
    let mut client = InferenceClient::connect(cluster.grpc_url()).await.unwrap();
    assert_eq!(client.list_models(request).await.unwrap().into_inner().models.len(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn keys_are_needed_over_grpc_too() {
    let (cluster, _folder) = cluster(&[("a", ONE, "highest_priority = 3")]).await;
    let mut client = InferenceClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
    let ask = |key: Option<&str>, priority| {
        let input = Some(v1::generate_request::Input::Text("hi".into()));
        let mut request = Request::new(v1::GenerateRequest { input, priority, ..Default::default() });
        if let Some(key) = key {
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        request
    };
    for key in [None, Some("two")] {
        assert_eq!(client.generate(ask(key, 0)).await.unwrap_err().code(), Code::Unauthenticated);
    }
    assert_eq!(client.list_models(v1::ListModelsRequest {}).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(client.generate(ask(Some("one"), 2)).await.unwrap_err().code(), Code::PermissionDenied);
    let mut answer = client.generate(ask(Some("one"), 0)).await.unwrap().into_inner();
    while answer.message().await.unwrap().is_some() {}
    let asked = cluster.worker(0).asked();
    assert_eq!((asked.len(), asked[0].priority, asked[0].cache_salt.as_str()), (1, 3, "a/"));
    cluster.stop().await;
}

#[tokio::test]
async fn a_tenant_is_kept_to_its_limits_and_told_what_is_left() {
    let (cluster, _folder) = cluster(&[
        ("requests", ONE, "requests_per_minute = 2\nkeep_kv = false"),
        ("tokens", TWO, "tokens_per_minute = 4"),
    ])
    .await;
    let salted = json!({"prompt": "hi", "max_tokens": 3, "cache_salt": "own"});
    let first = ask(&cluster, Some("one"), &salted).await;
    assert_eq!(header(&first, "x-ratelimit-limit-requests").as_deref(), Some("2"));
    assert_eq!(header(&first, "x-ratelimit-remaining-requests").as_deref(), Some("1"));
    assert_eq!(cluster.worker(0).asked()[0].cache_salt, "requests/own");
    let keeps = json!({"prompt": "hi", "cache_keep_seconds": 9});
    assert_eq!(error(ask(&cluster, Some("one"), &keeps).await).await, (403, json!("insufficient_permissions")));
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 200);
    let over = ask(&cluster, Some("one"), &hi()).await;
    let after: u64 = header(&over, "retry-after").unwrap().parse().unwrap();
    assert!((25..=30).contains(&after), "half a minute a request: {after}");
    assert_eq!(error(over).await, (429, json!("rate_limit_exceeded")));
    // Another tenant does not notice. Its prompt and its answer are charged.
    let other = ask(&cluster, Some("two"), &hi()).await;
    assert_eq!(other.status(), 200);
    let over = ask(&cluster, Some("two"), &hi()).await;
    assert_eq!(header(&over, "x-ratelimit-remaining-tokens").as_deref(), Some("0"));
    assert_eq!(error(over).await, (429, json!("rate_limit_exceeded")));
    cluster.stop().await;
}

#[tokio::test]
async fn answers_at_once_are_bounded_until_they_end() {
    let (cluster, _folder) = cluster(&[("a", ONE, "streams = 2"), ("b", TWO, "")]).await;
    cluster.worker(0).decode_will([Decode::Stall(1), Decode::Stall(1)]);
    let two = json!({"prompt": "hi", "n": 2, "stream": true});
    let mut streaming = ask(&cluster, Some("one"), &two).await;
    assert!(streaming.chunk().await.unwrap().is_some());
    assert_eq!(error(ask(&cluster, Some("one"), &hi()).await).await, (429, json!("rate_limit_exceeded")));
    assert_eq!(ask(&cluster, Some("two"), &hi()).await.status(), 200);
    drop(streaming);
    while ask(&cluster, Some("one"), &two).await.status() == 429 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_tenant_keeps_no_more_kv_than_it_may() {
    let (cluster, _folder) = cluster(&[("a", ONE, "kept_tokens = 20"), ("b", TWO, "")]).await;
    let keep = |prompt: &str| json!({"prompt": prompt, "max_tokens": 3, "cache_keep_seconds": 60});
    let first = keep("one prompt, 20 bytes");
    for _ in 0..2 {
        assert_eq!(ask(&cluster, Some("one"), &first).await.status(), 200, "the same again counts once");
    }
    let over = ask(&cluster, Some("one"), &keep("one more")).await;
    let wait: u64 = header(&over, "retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    assert_eq!(error(over).await, (429, json!("rate_limit_exceeded")));
    let never = ask(&cluster, Some("one"), &keep("longer than all it may keep")).await;
    assert_eq!(error(never).await, (403, json!("insufficient_permissions")));
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 200, "what is not kept does not count");
    assert_eq!(ask(&cluster, Some("two"), &keep("another tenant's")).await.status(), 200);
    cluster.stop().await;
}

#[tokio::test]
async fn keys_change_while_the_router_runs() {
    let (cluster, folder) = cluster(&[("a", ONE, "")]).await;
    let path = folder.path().join("keys.toml");
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 200);
    std::fs::write(&path, "[[tenants]]\nname = 'half").unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 200, "a file that cannot be used changes nothing");
    write(&path, &[("a", TWO, "")]);
    while ask(&cluster, Some("two"), &hi()).await.status() == 401 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 401);
    cluster.stop().await;
}

#[tokio::test]
async fn a_router_does_not_start_with_keys_it_cannot_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    for (text, wrong) in [(None, "No such file"), (Some("[[tenants]]\nnam = 'a'"), "nam")] {
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
        let refused = Cluster::try_start(RouterConfig { keys_file: Some(path.clone()), ..config() }).await;
        let said = refused.err().unwrap().to_string();
        assert!(said.starts_with("keys_file") && said.contains(wrong), "{said}");
    }
}

#[tokio::test]
async fn who_floods_waits_and_makes_room_for_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, &[("flood", ONE, ""), ("calm", TWO, "weight = 3")]);
    let settings = RouterConfig { keys_file: Some(path), max_inflight: 20, ..config() };
    let mut cluster = Cluster::with(settings, 0, 0, &["hello"]).await;
    let worker = cluster.add(Role::Decode, |member| member.max_running = 8).await;
    cluster.readiness.wait().await;
    cluster.seen(1).await;
    worker.decode_will(vec![Decode::Stall(1); 7]);
    let stream = json!({"prompt": "hi", "max_tokens": 3, "stream": true});
    let mut flood = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let request = cluster.http.post(cluster.url("/v1/completions")).bearer_auth("one").json(&stream);
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
    assert_eq!(worker.asked().len(), 7, "an eighth of the places is left to others");
    // All twenty places of the router are taken, and the flood has most of what waits.
    let refused = ask(&cluster, Some("one"), &hi()).await;
    assert_eq!(error(refused).await, (429, json!("too_many_requests")), "it makes no room for itself");
    let served = ask(&cluster, Some("two"), &hi()).await;
    assert_eq!(served.status(), 200);
    let asked = worker.asked();
    assert_eq!((asked.len(), asked[7].weight, asked[0].weight), (8, 3, 1));
    assert!(asked[7].tenant != asked[0].tenant && asked[0].tenant != 0);
    assert_eq!(flood.join_next().await.unwrap().unwrap(), 429, "its last one was turned away");
    assert_eq!(flood.len(), 19);
    // Those that wait begin as others end.
    worker.decode_will([]);
    flood.shutdown().await;
    while worker.asked().len() > 8 && ask(&cluster, Some("one"), &hi()).await.status() == 429 {}
    assert_eq!(ask(&cluster, Some("one"), &hi()).await.status(), 200);
    cluster.stop().await;
}
