//! The OpenAI-compatible API over a real socket: shapes, text, limits.

use std::time::Duration;

use crate::support::{self, CONTEXT, Cluster, Decode, END, MODEL, NAME, Prefill, config, data_lines, streamed, text};
use baton_router::RouterConfig;
use baton_runtime::Bytes;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[tokio::test]
async fn a_whole_chat() {
    let cluster = Cluster::start(1, 1, "Hello!").await;
    let (status, body) = cluster.ask(CHAT, &hello()).await;
    assert_eq!(status, 200, "{body}");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!(MODEL)));
    assert!(body["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(body["system_fingerprint"], "fp_0000000000000007", "the layout of the worker");
    let want = json!([{"index": 0, "message": {"role": "assistant", "content": "Hello!", "refusal": null},
        "logprobs": null, "finish_reason": "stop"}]);
    assert_eq!(body["choices"], want);
    // The test model's template around "hi", and its three special tokens.
    let prompt = "user\nhi\nassistant\n".len() + 3;
    let want = json!({"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 1}});
    assert_eq!(body["usage"], want);
    let asked = cluster.worker(1).asked();
    assert_eq!((asked[0].tokens[0], asked[0].prompt_tokens), (256, prompt as u32), "the template's first token");
    cluster.stop().await;
}

#[tokio::test]
async fn a_streamed_chat() {
    let cluster = Cluster::start(1, 1, "Hey").await;
    let chunks =
        cluster.stream(CHAT, support::merged(hello(), json!({"stream_options": {"include_usage": true}}))).await;
    let deltas: Vec<_> = chunks.iter().flat_map(|c| c["choices"].as_array().unwrap()).map(|c| &c["delta"]).collect();
    // Tokens that are ready together share a chunk.
    let [role, content @ .., end] = &deltas[..] else { panic!("{deltas:?}") };
    assert_eq!((*role, *end), (&json!({"role": "assistant", "content": ""}), &json!({})));
    assert_eq!(content.iter().map(|delta| delta["content"].as_str().unwrap()).collect::<String>(), "Hey");
    let (last, others) = chunks.split_last().unwrap();
    let (finish, others) = others.split_last().unwrap();
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    assert!(others.iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    assert!(others.iter().chain([finish]).all(|c| c.get("usage") == Some(&Value::Null)), "null until the last");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(4)));
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == chunks[0]["id"]));
    let unasked = cluster.stream(CHAT, hello()).await;
    assert!(unasked.iter().all(|c| c.get("usage").is_none()));
    cluster.stop().await;
}

#[tokio::test]
async fn completions_whole_and_streamed() {
    let cluster = Cluster::start(0, 1, "abc").await;
    let body = cluster.complete(json!({})).await;
    assert_eq!((&body["object"], text(&body)), (&json!("text_completion"), "abc"));
    assert!(body["choices"][0].get("token_ids").is_none() && body.get("prompt_token_ids").is_none());
    let chunks = cluster.stream(TEXT, json!({"prompt": "hi"})).await;
    assert_eq!(streamed(&chunks, 0), "abc");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    let short = cluster.complete(json!({"max_tokens": 2})).await;
    assert_eq!((text(&short), &short["choices"][0]["finish_reason"]), ("ab", &json!("length")));
    cluster.stop().await;
}

#[tokio::test]
async fn token_ids_in_and_out() {
    let cluster = Cluster::start(1, 1, "abc").await;
    let ids = json!({"prompt": [104, 105], "return_token_ids": true});
    let body = cluster.complete(ids.clone()).await;
    let out = [bytes("abc"), vec![END]].concat();
    assert_eq!(body["prompt_token_ids"], json!([104, 105]));
    assert_eq!(body["choices"][0]["prompt_token_ids"], json!([104, 105]));
    assert_eq!(body["choices"][0]["token_ids"], json!(out));
    assert_eq!(cluster.worker(1).asked()[0].tokens, [104, 105]);
    let chunks = cluster.stream(TEXT, ids).await;
    assert_eq!(chunks[0]["prompt_token_ids"], json!([104, 105]));
    assert!(chunks[1..].iter().all(|c| c.get("prompt_token_ids").is_none()));
    let ids = |c: &Value| c["choices"][0]["token_ids"].as_array().unwrap().clone();
    assert_eq!(Value::from(chunks.iter().flat_map(ids).collect::<Vec<_>>()), json!(out));
    let (_, chat) = cluster.ask(CHAT, &support::merged(hello(), json!({"return_token_ids": true}))).await;
    assert_eq!(chat["prompt_token_ids"][0], 256);
    assert_eq!(chat["choices"][0]["token_ids"], json!(out));
    cluster.stop().await;
}

#[tokio::test]
async fn several_prompts_and_several_choices() {
    let cluster = Cluster::with(config(), 1, 2, &["zero", "one", "two"]).await;
    let body = cluster.complete(json!({"prompt": ["a", "b"], "n": 3, "seed": 0, "return_token_ids": true})).await;
    let choices = body["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["zero", "one", "two", "zero", "one", "two"], "seed + index, for each prompt");
    assert!(choices.iter().enumerate().all(|(i, c)| c["index"] == i));
    assert_eq!((&choices[0]["prompt_token_ids"], &choices[3]["prompt_token_ids"]), (&json!([97]), &json!([98])));
    assert_eq!(body["usage"]["prompt_tokens"], 2, "each prompt counts once");
    assert_eq!(body["usage"]["completion_tokens"], 2 * (5 + 4 + 4));
    let fields = json!({"n": 3, "seed": 1, "stream_options": {"include_usage": true}});
    let chunks = cluster.stream(CHAT, support::merged(hello(), fields)).await;
    assert_eq!([0, 1, 2].map(|i| streamed(&chunks, i)), ["one", "two", "zero"]);
    for choice in 0..3 {
        let own = || chunks.iter().flat_map(|c| c["choices"].as_array().unwrap()).filter(|c| c["index"] == choice);
        assert_eq!(own().next().unwrap()["delta"]["role"], "assistant");
        assert_eq!(own().next_back().unwrap()["finish_reason"], "stop");
    }
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 4 + 4 + 5);
    cluster.stop().await;
}

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
async fn seeds_are_the_clients_or_random() {
    let cluster = Cluster::start(0, 1, "a").await;
    for seed in [json!(7), json!(-1), json!(u64::MAX), Value::Null, Value::Null] {
        cluster.complete(json!({"seed": seed})).await;
    }
    let seeds: Vec<u64> = cluster.worker(0).asked().iter().map(|s| s.sampling.as_ref().unwrap().seed).collect();
    assert_eq!(seeds[..3], [7, u64::MAX, u64::MAX]);
    assert_ne!(seeds[3], seeds[4]);
    cluster.stop().await;
}

#[tokio::test]
async fn characters_are_never_split() {
    let answer = "a🙂né 中文";
    let cluster = Cluster::start(1, 1, answer).await;
    let chunks = cluster.stream(TEXT, json!({"prompt": "hi", "max_tokens": 100})).await;
    // A token is one byte here, and each chunk is valid text.
    assert_eq!(streamed(&chunks, 0), answer);
    // The limit falls inside the emoji. Its incomplete bytes come at the end, as a replacement character.
    let cut = cluster.complete(json!({"max_tokens": 3})).await;
    assert_eq!(text(&cut), "a\u{fffd}");
    cluster.stop().await;
}

#[tokio::test]
async fn stop_strings_over_tokens_are_cut_off_and_cancel_the_worker() {
    let cluster = Cluster::start(1, 1, "one two\n\nUser: three").await;
    cluster.worker(1).decode_will([Decode::Stall(13), Decode::Stall(13)]);
    let fields = json!({"stop": ["\n\nUser:"], "return_token_ids": true});
    let body = cluster.complete(fields.clone()).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("one two", &json!("stop")));
    assert_eq!(body["usage"]["completion_tokens"], 14, "the tokens of the stop string were made");
    assert_eq!(body["choices"][0]["token_ids"], json!(bytes("one two\n\nUser:")));
    cluster.worker(1).was_dropped(1).await;
    let chunks = cluster.stream(TEXT, support::merged(json!({"prompt": "hi", "max_tokens": 50}), fields)).await;
    assert_eq!(streamed(&chunks, 0), "one two");
    // Text that only looks like the beginning of a stop string is delivered, also at the very end.
    let body = cluster.complete(json!({"stop": ["threes", "two\n\n\n"]})).await;
    assert_eq!(text(&body), "one two\n\nUser: three");
    cluster.stop().await;
}

#[tokio::test]
async fn stop_tokens_end_the_answer_without_being_in_its_text() {
    let cluster = Cluster::start(1, 1, "abcdef").await;
    let body = cluster.complete(json!({"stop_token_ids": [100], "return_token_ids": true})).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("abc", &json!("stop")));
    assert_eq!(body["choices"][0]["token_ids"], json!(bytes("abcd")));
    let ids = |ignore: bool| json!({"ignore_eos": ignore, "max_tokens": 9, "return_token_ids": true});
    let body = cluster.complete(ids(true)).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("abcdef", &json!("length")));
    assert_eq!(body["choices"][0]["token_ids"].as_array().unwrap().len(), 9, "end tokens have no text");
    cluster.stop().await;
}

#[tokio::test]
async fn sampling_reaches_the_workers() {
    let cluster = Cluster::start(0, 1, "a").await;
    cluster
        .complete(json!({"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 1.0,
            "frequency_penalty": -1.0, "repetition_penalty": 1.1, "logit_bias": {"65": 5}, "stop_token_ids": [7]}))
        .await;
    let sampling = cluster.worker(0).asked()[0].sampling.clone().unwrap();
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.5, 0.9, 40, 0.05));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (1.0, -1.0));
    assert_eq!((sampling.repetition_penalty, sampling.logit_bias[&65]), (1.1, 5.0));
    assert_eq!(sampling.stop_token_ids, [7, END]);
    let (_, chat) = cluster.ask(CHAT, &hello()).await;
    let left = CONTEXT - chat["usage"]["prompt_tokens"].as_u64().unwrap() as u32;
    let sampling = cluster.worker(0).asked()[1].sampling.clone().unwrap();
    assert_eq!((sampling.temperature, sampling.max_tokens), (1.0, left), "defaults; as many as fit");
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
    let text = metrics.render();
    for want in [
        "baton_time_to_first_token_seconds_count",
        "baton_inter_token_latency_seconds_count",
        "baton_requests_in_flight",
        "baton_rejected_total{reason=\"model_not_found\"}",
        "baton_recoveries_total{leg=\"transfer\",cause=\"kv_verification_error\"}",
        "baton_requests_total{outcome=\"ok\"}",
        "baton_cluster_members{role=\"decode\"}",
    ] {
        assert!(text.contains(want), "{want} is missing in\n{text}");
    }
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

#[tokio::test]
async fn tokens_of_a_prompt_and_back() {
    let cluster = Cluster::start(0, 1, "x").await;
    let (status, body) = cluster.ask("/tokenize", &json!({"prompt": "h\u{e9}", "return_token_strs": true})).await;
    assert_eq!((status, &body["tokens"], &body["count"]), (200, &json!(bytes("h\u{e9}")), &json!(3)), "{body}");
    assert_eq!((&body["max_model_len"], body["token_strs"].as_array().unwrap().len()), (&json!(CONTEXT), 3));
    let bare = json!({"prompt": "ab", "add_special_tokens": false});
    assert_eq!(cluster.ask("/tokenize", &bare).await.1["tokens"], json!(bytes("ab")));
    // The same as a chat's prompt.
    let (_, chat) = cluster.ask("/tokenize", &hello()).await;
    cluster.ask(CHAT, &hello()).await;
    assert_eq!(chat["tokens"], json!(cluster.worker(0).asked()[0].tokens));
    let (status, text) = cluster.ask("/detokenize", &json!({"tokens": chat["tokens"]})).await;
    assert_eq!((status, &text["prompt"]), (200, &json!("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")));
    for (path, body, param) in [
        ("/tokenize", json!({}), Some("prompt")),
        ("/tokenize", json!({"prompt": "a", "messages": []}), Some("prompt")),
        ("/tokenize", json!({"prompt": 5}), Some("prompt")),
        ("/tokenize", json!({"messages": [{"role": "nobody"}]}), Some("messages[0].role")),
        ("/detokenize", json!({"tokens": [1, 260]}), Some("tokens[1]")),
        ("/detokenize", json!({"tokens": [-1]}), Some("tokens[0]")),
    ] {
        let (status, answer) = cluster.ask(path, &body).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, param), "{body}: {answer}");
    }
    let unknown = cluster.ask("/tokenize", &json!({"model": "other", "prompt": "a"})).await;
    assert_eq!((unknown.0, &unknown.1["error"]["code"]), (404, &json!("model_not_found")));
    let version = cluster.http.get(cluster.url("/version")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    cluster.stop().await;
}

#[tokio::test]
async fn a_chat_template_gets_the_clients_options() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}!{% endif %}";
    let cluster = Cluster::of_model(template, config(), 0, 1, &["x"]).await;
    for (options, want) in [(json!({"thinking": true}), "hi!"), (json!({}), "hi"), (json!({"messages": []}), "hi")] {
        let body = support::merged(hello(), json!({"chat_template_kwargs": options}));
        assert_eq!(cluster.ask(CHAT, &body).await.0, 200);
        assert_eq!(cluster.worker(0).asked().last().unwrap().tokens, bytes(want), "{options}");
        assert_eq!(cluster.ask("/tokenize", &body).await.1["tokens"], json!(bytes(want)));
    }
    let wrong = support::merged(hello(), json!({"chat_template_kwargs": 5}));
    assert_eq!(cluster.ask(CHAT, &wrong).await.1["error"]["param"], "chat_template_kwargs");
    cluster.stop().await;
}

#[tokio::test]
async fn an_answer_has_its_least_length() {
    let cluster = Cluster::start(0, 1, "a stop b stop c").await;
    let body = json!({"prompt": "x", "max_tokens": 15, "min_tokens": 8, "stop": "stop"});
    let (status, answer) = cluster.ask(TEXT, &body).await;
    assert_eq!((status, text(&answer)), (200, "a stop b "), "{answer}");
    assert_eq!(cluster.worker(0).asked()[0].sampling.as_ref().unwrap().min_tokens, 8);
    for wrong in [json!({"min_tokens": 16}), json!({"min_tokens": 1, "guided_regex": "a"}), json!({"min_tokens": -1})] {
        let (status, answer) = cluster.ask(TEXT, &support::merged(body.clone(), wrong)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("min_tokens")), "{answer}");
    }
    cluster.stop().await;
}
