//! The OpenAI-compatible API over a real socket: shapes and text.

use crate::support::{self, CHAT, CONTEXT, Cluster, Decode, END, MODEL, TEXT, bytes, config, hello, streamed, text};
use serde_json::{Value, json};

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

/// The same when the tokens come in one message: what follows in it is dropped, and so is what a worker sends beyond the limit.
#[tokio::test]
async fn an_answer_ends_within_a_message_of_many_tokens() {
    let cluster = Cluster::start(1, 1, "one two\n\nUser: three").await;
    cluster.worker(1).decode_will(vec![Decode::Together(19, 0); 3]);
    let fields = json!({"stop": ["\n\nUser:"], "return_token_ids": true});
    let body = cluster.complete(fields.clone()).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("one two", &json!("stop")));
    assert_eq!(body["choices"][0]["token_ids"], json!(bytes("one two\n\nUser:")));
    let chunks = cluster.stream(TEXT, support::merged(json!({"prompt": "hi", "max_tokens": 50}), fields)).await;
    assert_eq!(streamed(&chunks, 0), "one two");
    let body = cluster.complete(json!({"max_tokens": 9, "return_token_ids": true})).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("one two\n\n", &json!("length")));
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
