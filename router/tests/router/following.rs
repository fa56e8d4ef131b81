//! Workers tell what they hold and what they have to do, and prompts go where they are answered first.

use std::time::Duration;

use crate::support::{Cluster, FakeWorker, bytes, config};
use baton_cluster::Role;
use baton_policy::BlockName;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::worker_event::Event;
use baton_proto::v1::{self, BatchLoad, CacheEvent, CacheTally, Link, LinksEvent, LoadEvent, StepCost};
use baton_router::{PlacementKind, RouterConfig};
use serde_json::{Value, json};

const ANSWER: &str = "yes";

/// Two prompts of four blocks.
const ONE: &str = "What was asked before is not computed again, is it not, my dear?";
const OTHER: &str = "Whoever asks something else gets another answer, would you agree?";

fn names(prompt: &str) -> Vec<BlockName> {
    BlockName::root("", 16).chain(&bytes(prompt), 16).collect()
}

fn stored(number: u64, names: &[BlockName]) -> CacheEvent {
    let stored = names.iter().flat_map(|name| name.0.to_le_bytes()).collect();
    CacheEvent { number, afresh: number == 1, stored, ..CacheEvent::default() }
}

/// With this tally after it.
fn and_holds(event: CacheEvent, names: &[BlockName]) -> CacheEvent {
    let sum = names.iter().fold(0u64, |sum, name| sum.wrapping_add(name.short()));
    CacheEvent { tally: Some(CacheTally { blocks: names.len() as u64, sum }), ..event }
}

pub(crate) fn predicted() -> RouterConfig {
    RouterConfig { placement: PlacementKind::Predicted, ..config() }
}

/// A router, and three decode workers of which the last says this of its cache.
async fn three(script: impl IntoIterator<Item = Vec<CacheEvent>>) -> Cluster {
    three_that_say(script.into_iter().map(|list| list.into_iter().map(Event::Cache).collect())).await
}

/// A router, and three decode workers of which the last says this.
async fn three_that_say(script: impl IntoIterator<Item = Vec<Event>>) -> Cluster {
    let mut cluster = Cluster::with(predicted(), 0, 2, &[ANSWER]).await;
    cluster.add_with(Role::Decode, |worker| worker.news_will_be(script)).await;
    cluster.seen(3).await;
    cluster
}

/// Asks until three times in a row the last worker got the prompt, which by turns alone it does not.
async fn goes_to_the_last(cluster: &Cluster, prompt: &str) {
    let mut in_a_row = 0;
    let asking = async {
        while in_a_row < 3 {
            let before = cluster.worker(2).asked().len();
            cluster.complete(json!({"prompt": prompt})).await;
            in_a_row = if cluster.worker(2).asked().len() > before { in_a_row + 1 } else { 0 };
        }
    };
    tokio::time::timeout(Duration::from_secs(30), asking).await.expect("the prompt goes to the worker that holds it");
}

#[tokio::test]
async fn a_prompt_goes_to_the_worker_that_says_it_holds_most_of_it() {
    let all = names(ONE);
    let cluster = three([vec![stored(1, &all[..1]), and_holds(stored(2, &all[1..]), &all)]]).await;
    goes_to_the_last(&cluster, ONE).await;
    // It holds nothing of these.
    let before = cluster.worker(2).asked().len();
    for salt in ["a", "b", "c", "d", "e", "f"] {
        cluster.complete(json!({"prompt": ONE, "cache_salt": salt})).await;
    }
    assert!(cluster.worker(2).asked().len() - before < 6, "another salt is another prompt");
    cluster.stop().await;
}

/// Below the pool, in a store that gives tokens sooner than they are computed.
#[tokio::test]
async fn a_prompt_goes_to_the_worker_that_has_it_in_its_store() {
    // Each is asked once, so that nothing else says where to ask.
    let prompts: Vec<String> = (0..40).map(|at| format!("{at:02} {ONE}")).collect();
    let all: Vec<BlockName> = prompts.iter().flat_map(|prompt| names(prompt)).collect();
    let stored = and_holds(stored(1, &all), &all);
    let links = LinksEvent { token_bytes: 100, links: Vec::new(), load_seconds: 1e-7 };
    let cluster = three_that_say([vec![Event::Links(links), Event::Store(stored)]]).await;
    let mut in_a_row = 0;
    for prompt in &prompts {
        let before = cluster.worker(2).asked().len();
        cluster.complete(json!({"prompt": prompt})).await;
        in_a_row = if cluster.worker(2).asked().len() > before { in_a_row + 1 } else { 0 };
    }
    assert!(in_a_row > 20, "{in_a_row} prompts in a row went to the worker that has them in its store");
    cluster.stop().await;
}

/// What is missing, and what is wrong, is read again.
#[tokio::test]
async fn a_worker_is_followed_anew_after_a_gap_a_wrong_tally_and_half_a_name() {
    let (one, other) = (names(ONE), names(OTHER));
    let gap = vec![stored(1, &one), stored(3, &other)];
    let wrong = vec![and_holds(stored(1, &one), &other)];
    let half = vec![CacheEvent { number: 1, afresh: true, stored: vec![7; 24], ..CacheEvent::default() }];
    let right = vec![and_holds(stored(1, &other), &other)];
    let cluster = three([gap, wrong, half, right]).await;
    cluster.worker(2).was_followed(4).await;
    goes_to_the_last(&cluster, OTHER).await;
    cluster.stop().await;
}

/// I7: the connection to a worker breaks and comes back.
#[tokio::test]
async fn a_worker_is_followed_anew_when_it_is_back() {
    let (one, other) = (names(ONE), names(OTHER));
    let list = |names: &[BlockName]| vec![and_holds(stored(1, names), names)];
    let cluster = three([list(&one), list(&other)]).await;
    goes_to_the_last(&cluster, ONE).await;
    cluster.worker(2).cut();
    cluster.complete(json!({"prompt": ONE})).await;
    cluster.worker(2).mend();
    cluster.worker(2).was_followed(2).await;
    goes_to_the_last(&cluster, OTHER).await;
    cluster.stop().await;
}

/// What a worker says that gives so many answers.
pub(crate) fn gives(rows: u64) -> Vec<Event> {
    let cost = Some(StepCost { base: 0.01, row: 1e-3, token: 1e-4, ..StepCost::default() });
    let (context, room) = (100 * rows, 1000);
    vec![Event::Load(LoadEvent { rows, context, room, step_tokens: 512, cost, ..LoadEvent::default() })]
}

/// Asks until none of these workers is asked any more: once the router has read what they say.
async fn leave_out(cluster: &Cluster, others: [&FakeWorker; 2]) {
    let asked = || others.iter().map(|worker| worker.asked().len()).sum::<usize>();
    let asking = async {
        let mut in_a_row = 0;
        while in_a_row < 5 {
            let before = asked();
            cluster.complete(json!({"prompt": ONE, "cache_salt": in_a_row.to_string()})).await;
            in_a_row = if asked() == before { in_a_row + 1 } else { 0 };
        }
    };
    tokio::time::timeout(Duration::from_secs(30), asking).await.expect("prompts go to the one that is left");
}

#[tokio::test]
async fn a_prompt_goes_where_there_is_least_to_do() {
    let mut cluster = Cluster::with(predicted(), 0, 0, &[ANSWER]).await;
    let mut workers = Vec::new();
    for rows in [90, 10, 60] {
        workers.push(cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(rows)])).await);
    }
    cluster.readiness.wait().await;
    cluster.seen(3).await;
    for worker in &workers {
        worker.was_followed(1).await;
    }
    // To the worker with fewest answers.
    leave_out(&cluster, [&workers[0], &workers[2]]).await;
    cluster.stop().await;
}

/// A worker that computes prompts says that so many tokens are queued; each takes a millisecond.
pub(crate) fn queues(tokens: u64) -> Vec<Event> {
    let cost = Some(StepCost { base: 0.01, row: 1e-3, token: 1e-3, ..StepCost::default() });
    vec![Event::Load(LoadEvent { tokens, room: 1000, step_tokens: 512, cost, ..LoadEvent::default() })]
}

/// KV is handed over where that is fast enough.
#[tokio::test]
async fn a_prompt_does_not_go_where_its_kv_would_be_late() {
    let mut cluster = Cluster::with(RouterConfig { local_prompt: 0, ..predicted() }, 0, 0, &[ANSWER]).await;
    let rates = [(2, 1e6), (3, 1e12), (4, 1e6)];
    let links = rates.map(|(worker, bytes_per_second)| Link { worker, bytes_per_second }).to_vec();
    let mut says = queues(0);
    says.push(Event::Links(LinksEvent { token_bytes: 1 << 17, links, load_seconds: 0.0 }));
    let prefill = cluster.add_with(Role::Prefill, |worker| worker.news_will_be([says])).await;
    let mut decodes = Vec::new();
    for _ in rates {
        decodes.push(cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(1)])).await);
    }
    cluster.readiness.wait().await;
    cluster.seen(4).await;
    for worker in decodes.iter().chain([&prefill]) {
        worker.was_followed(1).await;
    }
    leave_out(&cluster, [&decodes[0], &decodes[2]]).await;
    cluster.stop().await;
}

/// What is predicted to come too late is refused before any worker is asked, and the error says why.
#[tokio::test]
async fn what_would_miss_its_slo_is_refused_and_says_why() {
    let settings = RouterConfig { reject_ttft: Some(Duration::from_secs(2)), local_prompt: 0, ..predicted() };
    let mut cluster = Cluster::with(settings, 0, 0, &[ANSWER]).await;
    let prefill = cluster.add_with(Role::Prefill, |worker| worker.news_will_be([queues(9000)])).await;
    let decode = cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(1)])).await;
    cluster.readiness.wait().await;
    cluster.seen(2).await;
    prefill.was_followed(1).await;
    // Until the router has read what they say.
    let refused = async {
        loop {
            let body = json!({"prompt": ONE, "stream": true});
            let response = cluster.http.post(cluster.url("/v1/completions")).json(&body).send().await.unwrap();
            if response.status() == 429 {
                return response;
            }
        }
    };
    let refused = tokio::time::timeout(Duration::from_secs(30), refused).await.expect("a prompt is refused");
    let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    let error: Value = refused.json().await.unwrap();
    assert!((2..=9).contains(&after), "the queue is worked on meanwhile: {after}");
    assert_eq!(error["error"]["code"], "slo_missed");
    let message = error["error"]["message"].as_str().unwrap();
    for word in
        ["first token is predicted after", "must come within 2.0 s (reject_ttft)", "retry in", "add prefill workers"]
    {
        assert!(message.contains(word), "{message}");
    }
    let asked = || prefill.asked().len() + decode.asked().len();
    let before = asked();
    let (status, _) = cluster.ask("/v1/completions", &json!({"prompt": ONE})).await;
    assert_eq!((status, asked()), (429, before), "no worker was asked");
    cluster.stop().await;
}

/// A request may have an SLO of its own. Without one, it is refused when it would begin after its deadline, and only then.
#[tokio::test]
async fn a_request_is_refused_by_its_own_slo_and_by_its_deadline() {
    let settings = RouterConfig { local_prompt: 0, request_timeout: Duration::from_secs(600), ..predicted() };
    let mut cluster = Cluster::with(settings, 0, 0, &[ANSWER]).await;
    let prefill = cluster.add_with(Role::Prefill, |worker| worker.news_will_be([queues(200_000)])).await;
    cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(1)])).await;
    cluster.readiness.wait().await;
    cluster.seen(2).await;
    prefill.was_followed(1).await;
    let ask = async |ttft: Value| cluster.ask("/v1/completions", &json!({"prompt": ONE, "reject_ttft_ms": ttft})).await;
    // Until the router has read what they say.
    let refused = async { while ask(json!(2000)).await.0 != 429 {} };
    tokio::time::timeout(Duration::from_secs(30), refused).await.expect("a prompt is refused");
    assert_eq!((ask(Value::Null).await.0, ask(json!(300_000)).await.0), (200, 200));
    let mut client = InferenceClient::connect(cluster.grpc_url()).await.unwrap();
    let mut call = async |seconds, reject_ttft_ms| {
        let input = Some(v1::generate_request::Input::Text("hi".into()));
        let mut request = tonic::Request::new(v1::GenerateRequest { input, reject_ttft_ms, ..Default::default() });
        request.set_timeout(Duration::from_secs(seconds));
        client.generate(request).await.unwrap().into_inner().message().await
    };
    let refused = call(30, None).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert!(refused.message().contains("(the request's deadline)"), "{refused}");
    assert!(refused.metadata().contains_key("retry-after"));
    assert!(call(600, None).await.is_ok());
    assert!(call(600, Some(9000)).await.unwrap_err().message().contains("within 9.0 s (reject_ttft)"));
    cluster.stop().await;
}

/// What a worker has to do is batch work: an interactive request goes before it, a batch request waits for it.
#[tokio::test]
async fn batch_work_is_in_the_way_of_batch_requests_alone() {
    let settings = RouterConfig { local_prompt: 0, request_timeout: Duration::from_secs(600), ..predicted() };
    let mut cluster = Cluster::with(settings, 0, 0, &[ANSWER]).await;
    let batch = Some(BatchLoad { tokens: 200_000, ..BatchLoad::default() });
    let load = queues(200_000).into_iter().map(|event| match event {
        Event::Load(load) => Event::Load(LoadEvent { batch, ..load }),
        event => event,
    });
    let load: Vec<Event> = load.collect();
    let prefill = cluster.add_with(Role::Prefill, |worker| worker.news_will_be([load])).await;
    cluster.add_with(Role::Decode, |worker| worker.news_will_be([gives(1)])).await;
    cluster.readiness.wait().await;
    cluster.seen(2).await;
    prefill.was_followed(1).await;
    let ask = async |tier: &str| {
        let body = json!({"prompt": ONE, "reject_ttft_ms": 20_000, "service_tier": tier});
        cluster.ask("/v1/completions", &body).await.0
    };
    // Until the router has read what they say.
    let refused = async { while ask("flex").await != 429 {} };
    tokio::time::timeout(Duration::from_secs(30), refused).await.expect("a batch request is refused");
    assert_eq!(ask("default").await, 200);
    cluster.stop().await;
}

#[tokio::test]
async fn a_request_that_asks_is_told_why_it_was_placed_so() {
    let mut cluster = Cluster::with(RouterConfig { local_prompt: 0, ..predicted() }, 1, 1, &[ANSWER]).await;
    cluster.add(Role::Decode, |_| {}).await;
    cluster.seen(3).await;
    let ask = |trace: bool, stream: bool| {
        let body = json!({"prompt": ONE, "stream": stream});
        let request = cluster.http.post(cluster.url("/v1/completions")).json(&body).header("x-request-id", "mine");
        if trace { request.header("x-baton-trace", "1") } else { request }.send()
    };
    assert!(ask(false, false).await.unwrap().headers().get("x-baton-placement").is_none());
    for stream in [false, true] {
        let response = ask(true, stream).await.unwrap();
        let told: Value = serde_json::from_slice(response.headers()["x-baton-placement"].as_bytes()).unwrap();
        let last = told.as_array().unwrap().last().unwrap();
        assert!(last["prefill"].is_string() && last["options"] == 2 && last["predicted"]["sum_s"].is_f64(), "{told}");
        assert_ne!(last["next_best"]["decode"], last["decode"]);
        let measured = &last["measured"];
        assert!(stream || measured["first_token_s"].is_f64() && measured["cached_tokens"].is_u64(), "{told}");
    }
    cluster.stop().await;
}
