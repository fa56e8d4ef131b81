//! Log probabilities: of answers, of prompts, and answers chosen by them.

use baton_router::RouterConfig;
use baton_runtime::Bytes;
use serde_json::{Value, json};

use crate::support::{self, CHAT, Cluster, TEXT, bytes, hello, text};

#[tokio::test]
async fn log_probabilities_in_both_forms() {
    let cluster = Cluster::start(1, 1, "aé").await;
    let (_, body) = cluster.ask(CHAT, &support::merged(hello(), json!({"logprobs": true, "top_logprobs": 3}))).await;
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 4, "one for each token");
    let top = json!([{"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "x", "logprob": -2.0, "bytes": [120]},
        {"token": "y", "logprob": -9999.0, "bytes": [121]}]);
    assert_eq!(content[0], json!({"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": top}));
    assert_eq!((&content[1]["token"], &content[1]["bytes"]), (&json!("\u{fffd}"), &json!([0xc3])), "half of é");
    let body = cluster.complete(json!({"logprobs": 2})).await;
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "\u{fffd}", "\u{fffd}", "<|im_end|>"]));
    assert_eq!(logprobs["token_logprobs"], json!([-0.25, -0.25, -0.25, -0.25]));
    assert_eq!(logprobs["top_logprobs"][0], json!({"a": -0.25, "x": -2.0}));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2]));
    let chunks = cluster.stream(TEXT, json!({"prompt": "hi", "logprobs": 0})).await;
    let of = |c: &Value| c["choices"][0]["logprobs"]["tokens"].as_array().cloned().unwrap_or_default();
    assert_eq!(chunks.iter().flat_map(of).count(), 4);
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["top_logprobs"][0], json!({"a": -0.25}));
    cluster.stop().await;
}

#[tokio::test]
async fn a_prompt_is_repeated_with_its_log_probabilities() {
    let cluster = Cluster::start(1, 1, "aé").await;
    let asked = json!({"prompt": "héy", "echo": true, "logprobs": 1});
    let body = cluster.complete(asked.clone()).await;
    assert_eq!(text(&body), "héyaé");
    let logprobs = &body["choices"][0]["logprobs"];
    let tokens = ["h", "\u{fffd}", "\u{fffd}", "y", "a", "\u{fffd}", "\u{fffd}", "<|im_end|>"];
    assert_eq!(logprobs["tokens"], json!(tokens));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.25, -0.25, -0.25, -0.25]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][3], json!({"y": -0.5, "x": -1.0}));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2, 3, 4, 4, 5]));
    // The same in a stream, chunk by chunk.
    let chunks = cluster.stream(TEXT, asked.clone()).await;
    let of =
        |name: &'static str| move |c: &Value| c["choices"][0]["logprobs"][name].as_array().cloned().unwrap_or_default();
    assert_eq!(Value::from(chunks.iter().flat_map(of("tokens")).collect::<Vec<_>>()), logprobs["tokens"]);
    assert_eq!(Value::from(chunks.iter().flat_map(of("text_offset")).collect::<Vec<_>>()), logprobs["text_offset"]);
    let said = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect::<String>();
    assert_eq!(said, "héyaé");
    // The prompt alone, as evaluation harnesses ask for it; token ids, two prompts.
    let prompts = json!({"prompt": [bytes("ab"), bytes("c")], "max_tokens": 0, "return_token_ids": true});
    let body = cluster.complete(support::merged(asked.clone(), prompts)).await;
    assert_eq!((text(&body), &body["choices"][1]["text"]), ("ab", &json!("c")));
    assert_eq!(body["choices"][0]["logprobs"]["token_logprobs"], json!([null, -0.5]));
    assert_eq!(body["choices"][1]["logprobs"]["token_logprobs"], json!([null]), "a prompt of one token has none");
    assert_eq!((&body["choices"][0]["token_ids"], &body["usage"]["completion_tokens"]), (&json!([]), &json!(0)));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    // Without log probabilities it is only the text.
    let body = cluster.complete(json!({"prompt": "hey", "echo": true})).await;
    assert_eq!((text(&body), &body["choices"][0]["logprobs"]), ("heyaé", &Value::Null));
    cluster.stop().await;
}

#[tokio::test]
async fn the_likeliest_of_several_answers_are_sent() {
    let cluster = Cluster::with(support::config(), 1, 1, &["a", "b", "c"]).await;
    let body = cluster.complete(json!({"n": 2, "best_of": 3, "seed": 0})).await;
    let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|c| (&c["index"], &c["text"])).collect();
    assert_eq!(texts, [(&json!(0), &json!("c")), (&json!(1), &json!("b"))]);
    assert_eq!(body["choices"][0]["logprobs"], Value::Null, "they were not asked for");
    assert_eq!(body["usage"]["completion_tokens"], json!(6), "all were generated");
    cluster.stop().await;
}

#[tokio::test]
async fn a_request_gets_log_probabilities_of_so_many_prompt_tokens_at_most() {
    let cluster = Cluster::start(1, 1, "a").await;
    let body = json!({"prompt": bytes(&"x".repeat(500)), "max_tokens": 0, "echo": true});
    let ask = async |fields: Value| cluster.ask(TEXT, &support::merged(body.clone(), fields)).await;
    let (status, refused) = ask(json!({"logprobs": 0, "n": 66})).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("prompt")), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("33000 prompt tokens"), "{refused}");
    assert_eq!(cluster.worker(0).asked().len(), 0, "nothing was spent");
    let (status, _) = ask(json!({"logprobs": 0, "n": 65})).await;
    assert_eq!(status, 200);
    let (status, _) = ask(json!({"n": 66})).await;
    assert_eq!(status, 200, "they were not asked for");
    cluster.stop().await;
}

/// I5: answers that are put together before they are sent share the memory for bodies, with all that belongs to their tokens.
#[tokio::test]
async fn a_whole_answer_takes_its_share_of_the_memory() {
    let config = RouterConfig { body_limit: Bytes(64 << 10), body_memory: Bytes(64 << 10), ..support::config() };
    let cluster = Cluster::with(config, 1, 1, &[&"x".repeat(300)]).await;
    let asked = |fields: Value| support::merged(json!({"prompt": "hi", "max_tokens": 300}), fields);
    let (status, body) = cluster.ask(TEXT, &asked(json!({"logprobs": 2}))).await;
    assert_eq!(status, 429, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("--body-memory"), "{body}");
    // What was taken is free again: without log probabilities there is room, and in a stream for any.
    assert_eq!(cluster.ask(TEXT, &asked(json!({}))).await.0, 200);
    assert_eq!(support::streamed(&cluster.stream(TEXT, asked(json!({"logprobs": 2}))).await, 0).len(), 300);
    cluster.stop().await;
}
