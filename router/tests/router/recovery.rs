//! Workers fail in many ways. Clients get each token once and in order, or a typed error (I4, I5).

use std::time::Duration;

use crate::support::{self, Cluster, Decode, Prefill, config, text};
use baton_cluster::{Role, member_to_proto};
use baton_proto::v1::RegisterRequest;
use baton_proto::v1::registry_client::RegistryClient;
use baton_router::{PlacementKind, RouterConfig};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::Status;

const ANSWER: &str = "the quick brown fox";

/// The token ids of a whole answer, including its end token.
fn ids(answer: &str) -> serde_json::Value {
    answer.bytes().map(u32::from).chain([support::END]).collect::<Vec<_>>().into()
}

/// Asks for the answer, and checks that it is whole, with each token once.
async fn whole(cluster: &Cluster) {
    let body = cluster.complete(json!({"return_token_ids": true})).await;
    assert_eq!(text(&body), ANSWER);
    assert_eq!(body["choices"][0]["token_ids"], ids(ANSWER), "I4");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let usage = (&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]);
    assert_eq!(usage, (&json!(2), &json!(ANSWER.len() + 1)));
}

#[tokio::test]
async fn the_plain_route_over_two_workers_and_over_one() {
    let split = Cluster::start(1, 1, ANSWER).await;
    whole(&split).await;
    assert_eq!((split.worker(0).asked().len(), split.worker(1).asked().len()), (1, 1));
    split.stop().await;
    let aggregated = Cluster::start(0, 1, ANSWER).await;
    whole(&aggregated).await;
    aggregated.stop().await;
}

/// A decode worker that has almost all of a prompt in its cache is sent no KV for it.
#[tokio::test]
async fn a_decode_worker_that_has_the_prompt_needs_no_prefill_worker() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.worker(1).decode_will([Decode::Has(1)]);
    let body = cluster.complete(json!({"return_token_ids": true})).await;
    assert_eq!(body["choices"][0]["token_ids"], ids(ANSWER), "I4: its own first token");
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
    // Both were asked at once; it is told nothing more.
    cluster.worker(0).was_dropped(1).await;
    assert_eq!((cluster.worker(0).asked().len(), cluster.worker(1).asked().len()), (1, 1));
    cluster.stop().await;
}

#[tokio::test]
async fn decode_dies_in_mid_stream() {
    for plan in [Decode::Fail(3, Status::unavailable("bye")), Decode::Cut(3), Decode::Vanish, Decode::Muddle] {
        let cluster = Cluster::start(1, 2, ANSWER).await;
        cluster.worker(1).decode_will([plan]);
        whole(&cluster).await;
        assert_eq!(cluster.worker(2).asked().len(), 1);
        cluster.stop().await;
    }
}

/// I4: a message with several tokens is as good as as many messages, and as bad.
#[tokio::test]
async fn tokens_may_come_in_one_message() {
    for (tokens, first, recoveries) in [(4, 0, 0), (18, 0, 0), (3, 1, 1)] {
        let cluster = Cluster::start(1, 2, ANSWER).await;
        cluster.worker(1).decode_will([Decode::Together(tokens, first)]);
        whole(&cluster).await;
        assert_eq!(cluster.worker(2).asked().len(), recoveries);
        cluster.stop().await;
    }
}

#[tokio::test]
async fn the_answer_goes_on_at_the_next_index() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    cluster.worker(1).decode_will([Decode::Fail(3, Status::internal("bug"))]);
    whole(&cluster).await;
    let resumed = &cluster.worker(2).asked()[0];
    assert_eq!(resumed.prompt_tokens, 2);
    let want: Vec<u32> = format!("hi{}", &ANSWER[..4]).bytes().map(u32::from).collect();
    assert_eq!(resumed.tokens, want, "prompt and the four tokens the client has");
    assert_eq!(cluster.worker(0).asked().len(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn a_stopped_process_is_noticed_by_its_silence() {
    // I5: the socket is open and the kernel acknowledges data, but nobody answers pings.
    let settings = RouterConfig { worker_timeout: Duration::from_millis(500), ..config() };
    let cluster = Cluster::with(settings, 0, 2, &[ANSWER]).await;
    cluster.worker(0).decode_will([Decode::Freeze(2)]);
    whole(&cluster).await;
    cluster.stop().await;
}

#[tokio::test]
async fn the_only_worker_hangs_and_is_not_asked_again() {
    // I5: another attempt on this worker would cost the same time again.
    let settings = RouterConfig { worker_timeout: Duration::from_millis(500), ..config() };
    let cluster = Cluster::with(settings, 0, 1, &[ANSWER]).await;
    cluster.worker(0).decode_will([Decode::Freeze(2)]);
    let (status, body) = cluster.ask("/v1/completions", &json!({"prompt": "hi", "max_tokens": 50})).await;
    assert_eq!((status, &body["error"]["type"]), (503, &json!("unavailable_error")), "{body}");
    assert_eq!(cluster.worker(0).asked().len(), 1);
    cluster.stop().await;
}

/// The cluster's only decode worker dies, and another one takes its place after longer than a new request would wait.
#[tokio::test]
async fn answers_wait_for_the_worker_that_takes_the_place_of_the_last_one() {
    let settings = RouterConfig { worker_wait: Duration::from_secs(20), ..config() };
    let mut cluster = Cluster::with(settings, 0, 1, &[ANSWER]).await;
    cluster.worker(0).decode_will([Decode::Stall(4)]);
    let fields = json!({"prompt": "hi", "max_tokens": 50, "return_token_ids": true});
    let (http, url) = (cluster.http.clone(), cluster.url("/v1/completions"));
    let answer = tokio::spawn(async move { http.post(url).json(&fields).send().await.unwrap() });
    while cluster.worker(0).asked().is_empty() {
        tokio::task::yield_now().await;
    }
    cluster.worker(0).cut();
    cluster.forget(0).revoke().await;
    cluster.seen(0).await;
    // A new request is told within a short time.
    let asked = tokio::time::Instant::now();
    let (status, error) = cluster.ask("/v1/completions", &json!({"prompt": "hi", "max_tokens": 50})).await;
    assert_eq!((status, asked.elapsed() >= baton_policy::NEW_WAITS), (503, true), "{error}");
    cluster.add(Role::Decode, |_| {}).await;
    let body: serde_json::Value = answer.await.unwrap().json().await.unwrap();
    assert_eq!(body["choices"][0]["token_ids"], ids(ANSWER), "I4");
    assert_eq!(cluster.worker(1).asked().len(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn a_decode_worker_that_is_gone_already() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    cluster.worker(1).cut();
    whole(&cluster).await;
    whole(&cluster).await;
    cluster.stop().await;
}

/// I4, I5: their processes are well and answer pings, but their engines stand still.
#[tokio::test]
async fn workers_that_stand_still_are_given_up() {
    let (first_token_timeout, token_timeout) = (Duration::from_millis(400), Duration::from_millis(200));
    let settings = || RouterConfig { first_token_timeout, token_timeout, ..config() };
    for after in [0, 3] {
        let cluster = Cluster::with(settings(), 0, 2, &[ANSWER]).await;
        cluster.worker(0).decode_will([Decode::Stall(after)]);
        whole(&cluster).await;
        cluster.worker(0).was_dropped(1).await;
        assert_eq!(cluster.worker(1).asked().len(), 1);
        cluster.stop().await;
    }
    let cluster = Cluster::with(settings(), 2, 1, &[ANSWER]).await;
    cluster.worker(0).prefill_will([Prefill::Stall]);
    whole(&cluster).await;
    cluster.worker(0).was_dropped(1).await;
    assert_eq!(cluster.worker(1).asked().len(), 1);
    cluster.stop().await;
}

/// A worker that fails at once is always the idlest, so the policy that looks at load prefers it.
#[tokio::test]
async fn a_worker_that_answers_errors_at_once_does_not_attract_load() {
    let settings = RouterConfig { placement: PlacementKind::LeastLoaded, ..config() };
    let cluster = Cluster::with(settings, 0, 2, &[ANSWER]).await;
    cluster.worker(0).decode_will(std::iter::repeat_n(Decode::Fail(0, Status::internal("its device is gone")), 100));
    for _ in 0..40 {
        whole(&cluster).await;
    }
    let asked = cluster.worker(0).asked().len();
    assert!((6..10).contains(&asked), "asked {asked} times");
    let ejected = |at: usize| cluster.router.cluster()["members"][at]["ejected"] == true;
    assert!(ejected(0) && !ejected(1));
    cluster.stop().await;
}

/// What the router has checked, a worker may still refuse by mistake.
#[tokio::test]
async fn a_worker_that_refuses_what_others_take_refuses_no_client() {
    let settings = RouterConfig { placement: PlacementKind::LeastLoaded, ..config() };
    let cluster = Cluster::with(settings, 0, 2, &[ANSWER]).await;
    cluster.worker(0).decode_will(std::iter::repeat_n(Decode::Refuse(Status::invalid_argument("it is too long")), 100));
    for _ in 0..10 {
        whole(&cluster).await;
    }
    assert_eq!(cluster.worker(1).asked().len(), 10);
    cluster.stop().await;
}

#[tokio::test]
async fn a_lost_worker_is_left_alone_until_it_answers_again() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    let lost = || cluster.router.cluster()["members"].as_array().unwrap().iter().filter(|m| m["lost"] == true).count();
    // One worker of each role. Without the prefill worker, decode workers prefill themselves.
    for cut in [0, 1] {
        cluster.worker(cut).cut();
    }
    while lost() < 2 {
        whole(&cluster).await;
    }
    let before = cluster.worker(2).asked().len();
    for _ in 0..4 {
        whole(&cluster).await;
    }
    assert_eq!(cluster.worker(2).asked().len(), before + 4);
    for cut in [0, 1] {
        cluster.worker(cut).mend();
    }
    while lost() > 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..2 {
        whole(&cluster).await;
    }
    assert!(!cluster.worker(1).asked().is_empty() && !cluster.worker(0).asked().is_empty());
    cluster.stop().await;
}

#[tokio::test]
async fn prefill_dies_and_another_takes_over_under_a_new_reservation() {
    for plan in
        [Prefill::Cut, Prefill::Refuse(Status::unavailable("no")), Prefill::FailAfterToken(Status::internal("bug"))]
    {
        let cluster = Cluster::start(2, 1, ANSWER).await;
        cluster.worker(0).prefill_will([plan]);
        whole(&cluster).await;
        assert_eq!(cluster.worker(1).asked().len(), 1, "the other prefill worker");
        // The first reservation was dropped, which fences its epoch (I3).
        assert_eq!(cluster.worker(2).asked().len(), 2);
        cluster.worker(2).was_dropped(1).await;
        cluster.stop().await;
    }
}

#[tokio::test]
async fn a_decode_worker_that_waits_in_vain_is_not_left_for_it() {
    let cluster = Cluster::start(2, 2, ANSWER).await;
    cluster.worker(0).prefill_will([Prefill::Stall]);
    cluster.worker(2).decode_will([Decode::NoKv]);
    whole(&cluster).await;
    let asked = [1, 2, 3].map(|w| cluster.worker(w).asked().len());
    assert_eq!(asked, [1, 2, 0], "the same decode worker with another prefill worker");
    cluster.stop().await;
}

#[tokio::test]
async fn without_another_prefill_worker_decode_computes_the_prompt() {
    for plan in [Prefill::Cut, Prefill::FailAfterToken(Status::unavailable("no"))] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.worker(0).prefill_will([plan]);
        whole(&cluster).await;
        assert_eq!(cluster.worker(1).asked().len(), 2);
        cluster.stop().await;
    }
}

#[tokio::test]
async fn kv_that_does_not_verify_is_sent_again_and_then_computed() {
    // I2
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.worker(1).decode_will([Decode::BadKv]);
    whole(&cluster).await;
    assert_eq!(cluster.worker(0).asked().len(), 2, "prefill ran again");
    cluster.worker(1).decode_will([Decode::BadKv, Decode::BadKv]);
    whole(&cluster).await;
    assert_eq!(cluster.worker(0).asked().len(), 4, "and the third time nobody was asked");
    cluster.stop().await;
}

#[tokio::test]
async fn decode_may_be_ahead_of_the_first_token() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.worker(0).prefill_will([Prefill::LateToken]);
    whole(&cluster).await;
    cluster.stop().await;
}

#[tokio::test]
async fn an_answer_of_one_token_lets_decode_go() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = cluster.complete(json!({"max_tokens": 1, "return_token_ids": true})).await;
    assert_eq!((text(&body), &body["choices"][0]["finish_reason"]), ("t", &json!("length")));
    cluster.worker(1).was_dropped(1).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_failure_that_follows_everywhere_ends_in_a_typed_error() {
    let cluster = Cluster::start(0, 2, ANSWER).await;
    let refuse = |status: Status| {
        for worker in [0, 1] {
            cluster.worker(worker).decode_will([Decode::Refuse(status.clone())]);
        }
    };
    refuse(Status::unavailable("stopping"));
    cluster.worker(0).decode_will([Decode::Refuse(Status::unavailable("stopping"))]);
    let (status, body) = cluster.ask("/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!((status, &body["error"]["type"]), (503, &json!("unavailable_error")), "{body}");
    refuse(Status::resource_exhausted("no blocks"));
    let response = cluster.post("/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("retry-after"));
    cluster.stop().await;
}

/// The view does not say that these workers drain: the registry may be away (I7).
#[tokio::test]
async fn workers_that_drain_cost_no_attempt_and_are_asked_once() {
    let drains = || baton_proto::draining_status("draining");
    let cluster = Cluster::start(0, 6, ANSWER).await;
    for worker in 0..5 {
        cluster.worker(worker).decode_will([Decode::Refuse(drains())]);
    }
    for _ in 0..8 {
        whole(&cluster).await;
    }
    let asked: Vec<usize> = (0..6).map(|worker| cluster.worker(worker).asked().len()).collect();
    assert_eq!(asked, [1, 1, 1, 1, 1, 8], "more than there are attempts, and nobody twice");
    cluster.stop().await;
}

/// The view does not say that other processes listen at these workers' addresses by now: the registry may be away (I7).
#[tokio::test]
async fn workers_that_others_have_replaced_cost_no_attempt_and_get_no_prompt() {
    let cluster = Cluster::start(0, 6, ANSWER).await;
    for worker in 0..5 {
        cluster.worker(worker).is_replaced();
    }
    for _ in 0..8 {
        whole(&cluster).await;
    }
    let asked: Vec<usize> = (0..6).map(|worker| cluster.worker(worker).asked().len()).collect();
    assert_eq!(asked, [0, 0, 0, 0, 0, 8]);
    cluster.stop().await;
}

#[tokio::test]
async fn what_two_workers_refuse_is_not_tried_again() {
    let cluster = Cluster::start(0, 3, ANSWER).await;
    for worker in 0..3 {
        cluster.worker(worker).decode_will([Decode::Refuse(Status::invalid_argument("sequence.tokens is odd"))]);
    }
    let (status, body) = cluster.ask("/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!((status, &body["error"]["type"]), (400, &json!("invalid_request_error")));
    assert_eq!((0..3).map(|worker| cluster.worker(worker).asked().len()).sum::<usize>(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn an_error_in_mid_stream_is_the_last_event() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let fail = || Decode::Fail(1, Status::unavailable("bye"));
    cluster.worker(0).decode_will([fail(), fail(), fail()]);
    let response = cluster.post("/v1/completions", &json!({"prompt": "hi", "stream": true})).await;
    assert_eq!(response.status(), 200);
    let lines = support::data_lines(&response.text().await.unwrap());
    let last: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    assert_eq!(last["error"]["type"], "unavailable_error");
    assert_eq!(lines.len(), 4, "three tokens and the error, no [DONE]: {lines:?}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_on_every_worker() {
    for stream in [true, false] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.worker(1).decode_will([Decode::Stall(1)]);
        let body = json!({"prompt": "hi", "stream": stream});
        let request = tokio::spawn(cluster.http.post(cluster.url("/v1/completions")).json(&body).send());
        cluster.worker(1).was_asked(1).await;
        if stream {
            let mut response = request.await.unwrap().unwrap();
            assert!(response.chunk().await.unwrap().is_some());
        } else {
            request.abort();
        }
        cluster.worker(1).was_dropped(1).await;
        cluster.stop().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_cancels_both_legs() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.worker(0).prefill_will([Prefill::Stall]);
    let body = json!({"prompt": "hi"});
    let request = tokio::spawn(cluster.http.post(cluster.url("/v1/completions")).json(&body).send());
    cluster.worker(0).was_asked(1).await;
    cluster.worker(1).was_asked(1).await;
    request.abort();
    cluster.worker(0).was_dropped(1).await;
    cluster.worker(1).was_dropped(1).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_deadline_ends_a_request_everywhere() {
    let settings = RouterConfig { request_timeout: Duration::from_millis(300), ..config() };
    let cluster = Cluster::with(settings, 1, 1, &[ANSWER]).await;
    cluster.worker(0).prefill_will([Prefill::Stall]);
    let (status, body) = cluster.ask("/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!((status, &body["error"]["type"]), (504, &json!("timeout_error")));
    cluster.worker(0).was_dropped(1).await;
    cluster.worker(1).was_dropped(1).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_that_leaves_the_view_keeps_its_requests() {
    // I7: a change in the registry does not break a stream that works.
    let mut cluster = Cluster::start(0, 2, ANSWER).await;
    cluster.worker(0).decode_will([Decode::Stall(3)]);
    let url = cluster.url("/v1/completions");
    let mut response = cluster.http.post(url).json(&json!({"prompt": "hi", "stream": true})).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    cluster.forget(0).revoke().await;
    cluster.seen(1).await;
    whole(&cluster).await;
    // Only now does the worker die; its request goes on elsewhere.
    cluster.worker(0).cut();
    let mut rest = String::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        rest += std::str::from_utf8(&chunk).unwrap();
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    cluster.stop().await;
}

#[tokio::test]
async fn only_workers_of_one_layout_hand_over() {
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    let other = cluster.add(Role::Decode, |m| m.layout = 8).await;
    cluster.seen(3).await;
    for _ in 0..4 {
        whole(&cluster).await;
    }
    assert_eq!(other.asked().len(), 2);
    assert_eq!(cluster.worker(0).asked().len(), 2, "the other half was computed where it was decoded");
    cluster.stop().await;
}

#[tokio::test]
async fn a_drain_does_not_wait_for_connections_that_ask_nothing() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut half = TcpStream::connect(cluster.router.http_addr).await.unwrap();
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le").await.unwrap();
    let mut bodiless = TcpStream::connect(cluster.router.http_addr).await.unwrap();
    bodiless.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
    // Both connections were accepted before the one of this request.
    whole(&cluster).await;
    cluster.stop().await;
}

#[tokio::test]
async fn workers_stay_registered_until_the_last_stream_of_a_drain_has_ended() {
    // I7
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.worker(0).decode_will([Decode::Stall(1)]);
    let url = cluster.url("/v1/completions");
    let mut response = cluster.http.post(url).json(&json!({"prompt": "hi", "stream": true})).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    cluster.shutdown.start("test");
    let channel = tonic::transport::Endpoint::new(cluster.registry_url()).unwrap().connect().await.unwrap();
    let mut registry = RegistryClient::new(channel);
    let renewal = RegisterRequest { member: Some(member_to_proto(cluster.member(0))), ttl_ms: 5000 };
    registry.register(renewal).await.unwrap();
    drop(response);
    cluster.stop().await;
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_refuses_the_rest() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.worker(0).decode_will([Decode::Stall(1)]);
    let url = cluster.url("/v1/completions");
    let mut response = cluster.http.post(&url).json(&json!({"prompt": "hi", "stream": true})).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    cluster.shutdown.start("test");
    // No new connection is accepted.
    assert!(reqwest::Client::new().post(&url).json(&json!({"prompt": "hi"})).send().await.is_err());
    cluster.worker(0).cut();
    cluster.shutdown.force("test");
    let mut rest = String::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        rest += std::str::from_utf8(&chunk).unwrap();
    }
    assert!(rest.contains("unavailable_error"), "{rest}");
    cluster.tasks.join().await;
}
