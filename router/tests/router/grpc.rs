//! The gRPC front door over a real socket.

use std::time::Duration;

use crate::support::{CONTEXT, Cluster, Decode, END, MODEL, config, digest_at};
use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

type Client = InferenceClient<Channel>;

async fn client(cluster: &Cluster) -> Client {
    InferenceClient::new(channel(cluster).await)
}

async fn channel(cluster: &Cluster) -> Channel {
    Channel::from_shared(cluster.grpc_url()).unwrap().connect().await.unwrap()
}

fn ask(input: Input) -> v1::GenerateRequest {
    let sampling = v1::Sampling { max_tokens: Some(50), ..Default::default() };
    v1::GenerateRequest { input: Some(input), sampling: Some(sampling), ..Default::default() }
}

/// Reads a whole answer: token ids, text and end. Checks the numbering of tokens (I4).
async fn whole(client: &mut Client, request: v1::GenerateRequest) -> (Vec<u32>, String, v1::Finish) {
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(response) = stream.message().await.unwrap() {
        assert_eq!(response.index as usize, ids.len());
        for token in response.tokens {
            assert_eq!(token.index as usize, ids.len(), "I4");
            ids.push(token.id);
        }
        text += &response.text;
        if let Some(finish) = response.finish {
            assert!(stream.message().await.unwrap().is_none(), "finish is last");
            return (ids, text, finish);
        }
    }
    panic!("no finish");
}

#[tokio::test]
async fn text_ids_and_chat() {
    let cluster = Cluster::start(1, 1, "né🙂").await;
    let mut client = client(&cluster).await;
    let want: Vec<u32> = "né🙂".bytes().map(u32::from).chain([END]).collect();
    let chat = v1::Chat {
        messages: vec![v1::ChatMessage { role: "user".into(), content: "hi".into(), ..Default::default() }],
        ..Default::default()
    };
    let ids = v1::TokenIds { ids: vec![104, 105] };
    for (input, prompt) in [(Input::Text("hi".into()), 2), (Input::TokenIds(ids), 2), (Input::Chat(chat), 21)] {
        let (ids, text, finish) = whole(&mut client, ask(input)).await;
        assert_eq!((ids, text.as_str(), finish.reason()), (want.clone(), "né🙂", v1::FinishReason::Stop));
        let usage = finish.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt, want.len() as u32));
    }
    cluster.stop().await;
}

#[tokio::test]
async fn what_a_request_says_of_its_place_reaches_both_workers() {
    let cluster = Cluster::start(1, 1, "fine").await;
    let mut client = client(&cluster).await;
    let text = ask(Input::Text("hi".into()));
    let request = v1::GenerateRequest { cache_salt: "tenant".into(), priority: -7, cache_keep_seconds: 90, ..text };
    whole(&mut client, request).await;
    for worker in [0, 1] {
        let asked = cluster.worker(worker).asked().remove(0);
        let place = (asked.cache_salt.as_str(), asked.priority, asked.cache_keep_seconds);
        assert_eq!(place, ("tenant", -7, 90), "worker {worker}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_traced_call_is_told_where_it_ran_and_another_is_not() {
    let cluster = Cluster::start(1, 1, "fine").await;
    let mut client = client(&cluster).await;
    let (.., finish) = whole(&mut client, ask(Input::Text("hi".into()))).await;
    assert_eq!(finish.placement, "");
    let mut request = Request::new(ask(Input::Text("hi".into())));
    request.metadata_mut().insert("x-baton-trace", "1".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut last = None;
    while let Some(response) = stream.message().await.unwrap() {
        last = response.finish;
    }
    let told: serde_json::Value = serde_json::from_str(&last.unwrap().placement).unwrap();
    assert!(told[0]["decode"].is_string() && told.as_array().unwrap().len() == 1, "{told}");
    cluster.stop().await;
}

#[tokio::test]
async fn logits_digests_come_with_logprobs_and_only_then() {
    let cluster = Cluster::start(1, 1, "né").await;
    let mut client = client(&cluster).await;
    for top_logprobs in [None, Some(0), Some(2)] {
        let mut request = ask(Input::Text("hi".into()));
        request.sampling = Some(v1::Sampling { max_tokens: Some(50), top_logprobs, ..Default::default() });
        let mut stream = client.generate(request).await.unwrap().into_inner();
        let mut tokens = Vec::new();
        while let Some(response) = stream.message().await.unwrap() {
            tokens.extend(response.tokens);
        }
        // Token 0 comes from the prefill worker, the others from the decode worker.
        assert!(tokens.len() > 2);
        for (index, token) in tokens.iter().enumerate() {
            assert_eq!(token.logits_digest, top_logprobs.map(|_| digest_at(index)), "token {index}");
        }
    }
    cluster.stop().await;
}

#[tokio::test]
async fn calls_come_apart_from_the_text() {
    const CALL: &str = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": 1}}\n</tool_call>";
    let cluster = Cluster::start(1, 1, CALL).await;
    let mut client = client(&cluster).await;
    let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), ..Default::default() };
    let tool = v1::Tool { name: "look".into(), ..Default::default() };
    let choice = v1::ToolChoice { mode: v1::ToolMode::Required.into(), ..Default::default() };
    let chat = v1::Chat { messages: vec![message], tools: vec![tool], tool_choice: Some(choice), ..Default::default() };
    let sampling = Some(v1::Sampling { max_tokens: Some(100), ..Default::default() });
    let request = v1::GenerateRequest { sampling, ..ask(Input::Chat(chat.clone())) };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let (mut text, mut calls) = (String::new(), Vec::new());
    while let Some(response) = stream.message().await.unwrap() {
        text += &response.text;
        calls.extend(response.tool_calls.into_iter().map(|call| (call.name, call.arguments)));
    }
    assert_eq!((text.as_str(), &calls[..]), ("", &[("look".to_owned(), "{\"at\": 1}".to_owned())][..]));
    let asked = cluster.worker(0).asked().pop().unwrap();
    assert!(asked.sampling.unwrap().constraint.is_some(), "the call is forced");
    let nameless = v1::Chat { tools: vec![v1::Tool::default()], ..chat };
    let refused = client.generate(ask(Input::Chat(nameless))).await.unwrap_err();
    assert_eq!(refused.metadata().get("param").unwrap(), "chat.tools[0].name");
    cluster.stop().await;
}

#[tokio::test]
async fn log_probabilities_of_the_prompt_come_before_the_answer() {
    let cluster = Cluster::start(1, 1, "né").await;
    let mut client = client(&cluster).await;
    for max_tokens in [0, 50] {
        let mut request = ask(Input::Text("hey".into()));
        let sampling = v1::Sampling { max_tokens: Some(max_tokens), prompt_logprobs: Some(2), ..Default::default() };
        request.sampling = Some(sampling);
        let mut stream = client.generate(request).await.unwrap().into_inner();
        let (mut prompt, mut tokens, mut finish) = (Vec::new(), 0, None);
        while let Some(response) = stream.message().await.unwrap() {
            assert!(response.prompt.is_empty() || tokens == 0);
            prompt.extend(response.prompt);
            tokens += response.tokens.len();
            finish = finish.or(response.finish);
        }
        let scores: Vec<_> = prompt.iter().map(|t| (t.index, t.id as u8, t.logprob, t.top.len())).collect();
        assert_eq!(scores, [(1, b'e', Some(-0.5), 2), (2, b'y', Some(-0.5), 2)]);
        assert_eq!(
            (tokens > 0, finish.unwrap().usage.unwrap().completion_tokens > 0),
            (max_tokens > 0, max_tokens > 0)
        );
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_that_dies_is_not_seen_by_the_client() {
    let cluster = Cluster::start(1, 2, "the quick brown fox").await;
    cluster.worker(1).decode_will([Decode::Cut(4)]);
    let mut client = client(&cluster).await;
    let (_, text, _) = whole(&mut client, ask(Input::Text("hi".into()))).await;
    assert_eq!(text, "the quick brown fox");
    cluster.stop().await;
}

#[tokio::test]
async fn errors_have_codes_and_name_the_field() {
    let cluster = Cluster::start(1, 1, "fine").await;
    let mut client = client(&cluster).await;
    let text = || ask(Input::Text("hi".into()));
    let sampling = |s: v1::Sampling| v1::GenerateRequest { sampling: Some(s), ..text() };
    let long = Input::TokenIds(v1::TokenIds { ids: vec![1; CONTEXT as usize] });
    for (request, code, param) in [
        (v1::GenerateRequest { model: "nope".into(), ..text() }, Code::NotFound, "model"),
        (v1::GenerateRequest { input: None, ..text() }, Code::InvalidArgument, "input"),
        (ask(Input::Chat(v1::Chat::default())), Code::InvalidArgument, "chat.messages"),
        (ask(long), Code::InvalidArgument, "prompt"),
        (
            sampling(v1::Sampling { temperature: Some(f32::NAN), ..Default::default() }),
            Code::InvalidArgument,
            "temperature",
        ),
        (
            sampling(v1::Sampling { top_logprobs: Some(50), ..Default::default() }),
            Code::InvalidArgument,
            "top_logprobs",
        ),
        (v1::GenerateRequest { stop: vec![String::new()], ..text() }, Code::InvalidArgument, "stop"),
        (v1::GenerateRequest { request_id: "x".repeat(200), ..text() }, Code::InvalidArgument, "request_id"),
        (v1::GenerateRequest { cache_salt: "x".repeat(257), ..text() }, Code::InvalidArgument, "cache_salt"),
        (v1::GenerateRequest { cache_keep_seconds: 86_401, ..text() }, Code::InvalidArgument, "cache_keep_seconds"),
    ] {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(
            (status.code(), status.metadata().get("param").unwrap().to_str().unwrap()),
            (code, param),
            "{status}"
        );
    }
    let (_, text, _) = whole(&mut client, text()).await;
    assert_eq!(text, "fine");
    cluster.stop().await;
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_a_status() {
    let cluster = Cluster::start(0, 1, "fine").await;
    let fail = || Decode::Fail(1, tonic::Status::unavailable("bye"));
    cluster.worker(0).decode_will([fail(), fail(), fail()]);
    let mut stream = client(&cluster).await.generate(ask(Input::Text("hi".into()))).await.unwrap().into_inner();
    let mut ids = Vec::new();
    let status = loop {
        match stream.message().await {
            Ok(response) => ids.extend(response.unwrap().tokens.into_iter().map(|t| t.index)),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), ids), (Code::Unavailable, vec![0, 1, 2]));
    assert!(status.metadata().contains_key("retry-after"));
    cluster.stop().await;
}

#[tokio::test]
async fn the_clients_deadline_and_its_leaving_reach_the_worker() {
    let cluster = Cluster::start(0, 1, "fine").await;
    cluster.worker(0).decode_will([Decode::Stall(1), Decode::Stall(1)]);
    let mut client = client(&cluster).await;
    let mut request = Request::new(ask(Input::Text("hi".into())));
    request.metadata_mut().insert("grpc-timeout", "200m".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DeadlineExceeded);
    cluster.worker(0).was_dropped(1).await;
    assert!(cluster.worker(0).asked()[0].deadline_ms <= 200);
    let mut stream = client.generate(ask(Input::Text("hi".into()))).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    drop(stream);
    cluster.worker(0).was_dropped(2).await;
    cluster.stop().await;
}

#[tokio::test]
async fn health_and_models() {
    let mut cluster = Cluster::start(0, 0, "fine").await;
    let mut health = HealthClient::new(channel(&cluster).await);
    let service = || HealthCheckRequest { service: "baton.v1.Inference".into() };
    let mut watch = health.watch(service()).await.unwrap().into_inner();
    let not_serving = tonic_health::ServingStatus::NotServing as i32;
    let serving = tonic_health::ServingStatus::Serving as i32;
    let mut next = async || watch.message().await.unwrap().unwrap().status;
    while next().await != not_serving {}
    cluster.add(baton_cluster::Role::Decode, |_| {}).await;
    while next().await != serving {}
    let unknown = HealthCheckRequest { service: "no.such".into() };
    assert_eq!(health.check(unknown).await.unwrap_err().code(), Code::NotFound);
    let models = client(&cluster).await.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models[0].id.as_str(), models[0].context_tokens, models[0].vocab_size), (MODEL, CONTEXT, 260));
    cluster.stop().await;
}

#[tokio::test]
async fn services_are_listed_by_reflection() {
    let cluster = Cluster::start(0, 0, "x").await;
    let mut client = ServerReflectionClient::new(channel(&cluster).await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) = answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list");
    };
    let names: Vec<_> = list.service.into_iter().map(|s| s.name).collect();
    for want in ["baton.v1.Inference", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|n| n == want), "{want} is not in {names:?}");
    }
    for not in ["baton.v1.Registry", "baton.v1.Worker", "baton.v1.Supervisor"] {
        assert!(!names.iter().any(|n| n == not), "{not} is not served here");
    }
    drop(client);
    cluster.stop().await;
}

/// Reads HTTP/2 frames until one of this type. False at the end of the connection.
async fn frame_comes(stream: &mut TcpStream, kind: u8) -> bool {
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).await.is_err() {
            return false;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        if head[3] == kind {
            return true;
        }
    }
}

#[tokio::test]
async fn a_connection_that_is_old_is_asked_to_end_and_its_calls_go_on() {
    const GOAWAY: u8 = 7;
    let settings = RouterConfig { connection_age: Some(Duration::from_millis(100)), ..config() };
    let cluster = Cluster::with(settings, 0, 1, &["abc"]).await;
    let mut raw = TcpStream::connect(cluster.router.grpc_addr).await.unwrap();
    raw.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut client = client(&cluster).await;
    // This call is older than its connection may be.
    cluster.worker(0).decode_will([Decode::Stall(1)]);
    let mut old = client.generate(ask(Input::Text("hi".into()))).await.unwrap().into_inner();
    assert!(old.message().await.unwrap().is_some());
    assert!(frame_comes(&mut raw, GOAWAY).await);
    let quiet = tokio::time::timeout(Duration::from_millis(300), old.message()).await;
    assert!(quiet.is_err(), "it goes on: {quiet:?}");
    drop(old);
    cluster.stop().await;
}
