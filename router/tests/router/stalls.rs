//! Clients that stop reading their answers.

use std::time::Duration;

use crate::support::{Cluster, Decode, config};
use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tonic::transport::Channel;

/// Answers of a request; together they are far larger than what sockets hold.
const CHOICES: usize = 64;

/// Starts a request whose answer nobody reads.
async fn ask_and_stall(cluster: &Cluster) -> TcpStream {
    let stream = TcpStream::connect(cluster.router.http_addr).await.unwrap();
    let body = json!({"prompt": "hi", "max_tokens": 400, "n": CHOICES, "stream": true, "logprobs": 3});
    begin(stream, &body).await
}

/// Sends a request and reads the beginning of its answer.
async fn begin(mut stream: TcpStream, body: &serde_json::Value) -> TcpStream {
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    // The answer has begun.
    stream.read_exact(&mut [0; 512]).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_place_and_its_connection() {
    let limits = RouterConfig { send_timeout: Duration::from_millis(300), max_inflight: CHOICES, ..config() };
    let cluster = Cluster::with(limits, 0, 1, &["x".repeat(400).as_str()]).await;
    // Each answer's end would come only later.
    cluster.worker(0).decode_will(vec![Decode::Stall(390); CHOICES]);
    let mut stalled = ask_and_stall(&cluster).await;
    let all = json!({"prompt": "hi", "max_tokens": 1, "n": CHOICES});
    assert_eq!(cluster.ask("/v1/completions", &all).await.0, 429, "every place is taken");
    // I5: the places come back, and the worker is told.
    while cluster.ask("/v1/completions", &all).await.0 == 429 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.worker(0).was_dropped(CHOICES).await;
    // What was sent is there, but the answer is not complete.
    let mut rest = Vec::new();
    let _ = stalled.read_to_end(&mut rest).await;
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    cluster.stop().await;
}

/// I5: all of the answer so far fits into this system's buffers, so no write waits; the client's system has no room for it.
#[tokio::test]
async fn a_client_that_reads_nothing_of_a_slow_answer_loses_its_place() {
    let limits = RouterConfig { send_timeout: Duration::from_millis(300), max_inflight: 1, ..config() };
    let cluster = Cluster::with(limits, 0, 1, &["x".repeat(400).as_str()]).await;
    cluster.worker(0).decode_will(vec![Decode::Stall(200)]);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let stream = socket.connect(cluster.router.http_addr).await.unwrap();
    let _stalled = begin(stream, &json!({"prompt": "hi", "max_tokens": 400, "stream": true, "logprobs": 3})).await;
    // Long before the router asks another worker to go on.
    tokio::time::timeout(Duration::from_secs(20), cluster.worker(0).was_dropped(1)).await.unwrap();
    let next = json!({"prompt": "hi", "max_tokens": 1});
    while cluster.ask("/v1/completions", &next).await.0 == 429 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.stop().await;
}

/// I5: the answers are so short that nothing waits for room.
#[tokio::test]
async fn a_grpc_client_that_never_reads_loses_its_places() {
    const PLACES: usize = 8;
    let limits = RouterConfig { send_timeout: Duration::from_millis(300), max_inflight: PLACES, ..config() };
    let cluster = Cluster::with(limits, 0, 1, &["hello"]).await;
    cluster.worker(0).decode_will(vec![Decode::Slow(Duration::from_millis(20)); PLACES]);
    let endpoint = Channel::from_shared(cluster.grpc_url()).unwrap();
    let client = InferenceClient::new(endpoint.initial_stream_window_size(0).connect().await.unwrap());
    let sampling = Some(v1::Sampling { max_tokens: Some(3), ..Default::default() });
    let request = v1::GenerateRequest { input: Some(Input::Text("hi".into())), sampling, ..Default::default() };
    let mut stalled = Vec::new();
    for _ in 0..PLACES {
        stalled.push(client.clone().generate(request.clone()).await.unwrap());
    }
    let all = json!({"prompt": "hi", "max_tokens": 1, "n": PLACES});
    assert_eq!(cluster.ask("/v1/completions", &all).await.0, 429, "every place is taken");
    while cluster.ask("/v1/completions", &all).await.0 == 429 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(stalled);
    cluster.stop().await;
}

#[tokio::test]
async fn a_client_that_reads_slowly_gets_everything() {
    let limits = RouterConfig { send_timeout: Duration::from_secs(2), max_inflight: CHOICES, ..config() };
    let cluster = Cluster::with(limits, 0, 1, &["x".repeat(400).as_str()]).await;
    let mut slow = ask_and_stall(&cluster).await;
    let mut rest = Vec::new();
    while !rest.ends_with(b"0\r\n\r\n") {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let mut part = vec![0; 256 << 10];
        let count = slow.read(&mut part).await.unwrap();
        assert!(count > 0, "the connection ended");
        rest.extend_from_slice(&part[..count]);
    }
    assert!(String::from_utf8_lossy(&rest).contains("[DONE]"));
    drop(slow);
    cluster.stop().await;
}
