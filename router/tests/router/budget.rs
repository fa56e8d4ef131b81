//! What requests become, and what answers take until they are read, counts against the memory for bodies (I5).

use std::time::Duration;

use crate::support::{CHAT, CONTEXT, Cluster, TEXT, config, merged, streamed};
use crate::tenants::{ONE, ask, error, write};
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_runtime::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tonic::Code;

/// A router with this much memory for bodies.
async fn cluster(memory: u64) -> Cluster {
    let settings = RouterConfig { body_limit: Bytes(memory.min(1 << 20)), body_memory: Bytes(memory), ..config() };
    Cluster::with(settings, 0, 1, &["x"]).await
}

/// Arguments of a call, with so many elements.
fn arguments(elements: usize) -> String {
    format!("{{\"a\":[{}0]}}", "0,".repeat(elements - 1))
}

fn called(arguments: &str) -> Value {
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
    json!({"messages": [{"role": "assistant", "tool_calls": [call]}]})
}

fn code(answer: &(u16, Value)) -> (u16, Option<&str>) {
    (answer.0, answer.1["error"]["code"].as_str())
}

const FULL: (u16, Option<&str>) = (429, Some("too_many_requests"));

#[tokio::test]
async fn arguments_of_calls_count_as_what_they_become() {
    let cluster = cluster(4 << 20).await;
    let few = cluster.ask(CHAT, &called(&arguments(1000))).await;
    assert_eq!(code(&few), (400, Some("context_length_exceeded")), "{few:?}");
    // 400 kB as text.
    let many = arguments(200_000);
    assert_eq!(code(&cluster.ask(CHAT, &called(&many)).await), FULL);
    assert_eq!(code(&cluster.ask("/tokenize", &called(&many)).await), FULL);
    let item = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": many});
    assert_eq!(code(&cluster.ask("/v1/responses", &json!({"input": [item]})).await), FULL);
    let call = v1::ToolCall { id: "c".into(), name: "f".into(), arguments: many };
    let message = v1::ChatMessage { role: "assistant".into(), tool_calls: vec![call], ..Default::default() };
    let chat = v1::Chat { messages: vec![message], ..Default::default() };
    let input = Some(v1::generate_request::Input::Chat(chat));
    let mut client = InferenceClient::connect(cluster.grpc_url()).await.unwrap();
    let refused = client.generate(v1::GenerateRequest { input, ..Default::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    // More than any request may have.
    let (status, answer) = cluster.ask(CHAT, &called(&arguments(300_000))).await;
    let param = "messages[0].tool_calls[0].function.arguments";
    assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    cluster.stop().await;
}

#[tokio::test]
async fn answers_of_the_tokenizer_take_memory() {
    let cluster = cluster(1 << 20).await;
    let of = |bytes: usize, texts: bool| json!({"prompt": "x".repeat(bytes), "return_token_strs": texts});
    assert_eq!(cluster.ask("/tokenize", &of(10_000, true)).await.0, 200);
    assert_eq!(cluster.ask("/tokenize", &of(40_000, false)).await.0, 200);
    assert_eq!(code(&cluster.ask("/tokenize", &of(40_000, true)).await), FULL);
    assert_eq!(code(&cluster.ask("/tokenize", &of(100_000, false)).await), FULL);
    // As many bytes of JSON as there are control characters, times six.
    let ids = |id: u32| json!({"tokens": vec![id; 8000]});
    assert_eq!(cluster.ask("/detokenize", &ids(120)).await.0, 200);
    assert_eq!(cluster.ask("/detokenize", &ids(1)).await.0, 200);
    cluster.stop().await;
}

#[tokio::test]
async fn a_tokenizers_answer_is_its_tenants_request_until_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, &[("a", ONE, "streams = 1")]);
    let cluster = Cluster::with(RouterConfig { keys_file: Some(path), ..config() }, 0, 1, &["x"]).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut reader = socket.connect(cluster.router.http_addr).await.unwrap();
    let body = json!({"prompt": "x".repeat(200_000), "return_token_strs": true}).to_string();
    let head = format!(
        "POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    reader.write_all(head.as_bytes()).await.unwrap();
    reader.write_all(body.as_bytes()).await.unwrap();
    // Its answer has begun.
    reader.read_u8().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let short = json!({"prompt": "hi", "max_tokens": 3});
    assert_eq!(error(ask(&cluster, Some("one"), &short).await).await.0, 429);
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() > 1_000_000 && rest.ends_with(b"\"x\"]}"), "{} bytes", rest.len());
    assert_eq!(ask(&cluster, Some("one"), &short).await.status(), 200);
    cluster.stop().await;
}

#[tokio::test]
async fn prompts_that_answers_repeat_take_memory() {
    let cluster = cluster(256 << 10).await;
    let prompt = vec![120; CONTEXT as usize - 20];
    let of = |n: u32, more: Value| merged(json!({"prompt": prompt, "max_tokens": 2, "n": n}), more);
    for more in [json!({"echo": true, "return_token_ids": true}), json!({"return_token_ids": true}), json!({})] {
        assert_eq!(cluster.ask(TEXT, &of(2, more)).await.0, 200);
    }
    assert_eq!(code(&cluster.ask(TEXT, &of(120, json!({"return_token_ids": true}))).await), FULL);
    assert_eq!(code(&cluster.ask(TEXT, &of(120, json!({"echo": true, "return_token_ids": true}))).await), FULL);
    let (status, answer) = cluster.ask(TEXT, &of(120, json!({"echo": true}))).await;
    assert_eq!((status, answer["choices"].as_array().map(Vec::len)), (200, Some(120)));
    assert!(answer["choices"][7]["text"].as_str().unwrap().starts_with(&"x".repeat(prompt.len())));
    // A stream's choices may all begin at once.
    let wanted = |n: u32| of(n, json!({"echo": true, "return_token_ids": true, "stream": true}));
    assert_eq!(code(&cluster.ask(TEXT, &wanted(120)).await), FULL);
    // Together these would not fit: each gives its share back.
    for _ in 0..60 {
        let chunks = cluster.stream(TEXT, wanted(2)).await;
        assert!(streamed(&chunks, 1).starts_with(&"x".repeat(prompt.len())));
    }
    cluster.stop().await;
}
