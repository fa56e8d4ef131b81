//! Prefixes that one worker takes from another: the prompt follows once that has begun, and is answered whatever becomes of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_policy::BlockName;
use baton_proto::v1::worker_event::Event;
use baton_proto::v1::{CacheEvent, LinksEvent, LoadEvent, StepCost};
use baton_router::{PlacementKind, RouterConfig};
use serde_json::{Value, json};
use tonic::Status;

use crate::support::{Cluster, Decode, Exchanges, FakeWorker, bytes, config};

const ANSWER: &str = "yes";

/// Tenants whose prompt the first worker holds.
const SALTS: usize = 100;

/// A prompt of 21 blocks and a few tokens, of which the first worker holds the blocks.
fn prompt() -> String {
    "What was asked before need not be computed again. ".repeat(7)[..340].to_owned()
}

/// What a prefill worker says of itself, with so many tokens to compute and these blocks.
fn says(tokens: u64, names: &[BlockName]) -> Vec<Event> {
    let cost = Some(StepCost { base: 0.01, row: 1e-3, token: 1e-3, ..StepCost::default() });
    let load = LoadEvent { tokens, room: 1000, step_tokens: 512, cost, ..LoadEvent::default() };
    let stored = names.iter().flat_map(|name| name.0.to_le_bytes()).collect();
    let cache = CacheEvent { number: 1, afresh: true, stored, ..CacheEvent::default() };
    // Who has read the last of these has read all.
    vec![
        Event::Cache(cache),
        Event::Links(LinksEvent { token_bytes: 1000, links: Vec::new(), load_seconds: 0.0 }),
        Event::Load(load),
    ]
}

/// A router, a decode worker, and two prefill workers: a busy one that holds the prompt's blocks and an idle one.
struct Two {
    cluster: Cluster,
    holder: Arc<FakeWorker>,
    idle: Arc<FakeWorker>,
}

async fn two(plan: impl IntoIterator<Item = Exchanges>, gives: impl IntoIterator<Item = Exchanges>) -> Two {
    held_by(Role::Prefill, 0, plan, gives).await
}

/// The holder is of this role, and the other worker has so many tokens to compute.
async fn held_by(
    role: Role,
    tokens: u64,
    plan: impl IntoIterator<Item = Exchanges>,
    gives: impl IntoIterator<Item = Exchanges>,
) -> Two {
    let settings = RouterConfig { placement: PlacementKind::Predicted, local_prompt: 0, ..config() };
    let mut cluster = Cluster::with(settings, 0, 0, &[ANSWER]).await;
    let of = |salt: String| BlockName::root(&salt, 16).chain(&bytes(&prompt()), 16).collect::<Vec<_>>();
    let names: Vec<BlockName> = (0..SALTS).flat_map(|salt| of(salt.to_string())).collect();
    let mut workers = Vec::new();
    for (role, events) in [(role, says(2000, &names)), (Role::Prefill, says(tokens, &[])), (Role::Decode, says(0, &[]))]
    {
        let worker = cluster.add_and(role, |member| member.exchanges = 5, |worker| worker.news_will_be([events])).await;
        workers.push(worker);
    }
    cluster.readiness.wait().await;
    cluster.seen(3).await;
    let [holder, idle, decode] = &workers[..] else { panic!() };
    for worker in [holder, idle, decode] {
        worker.was_followed(1).await;
    }
    idle.exchange_will(plan);
    holder.exchange_will(gives);
    Two { holder: Arc::clone(holder), idle: Arc::clone(idle), cluster }
}

impl Two {
    /// Asks for what the holder holds, once the router has read what it says: has the prefix fetched. Returns where the request was placed, and how
    /// long it took.
    async fn fetches(&self) -> (Value, Duration) {
        self.is_read().await;
        let (told, took) = self.ask("0").await;
        assert!(told["fetches"].is_object(), "{told}");
        (told, took)
    }

    /// Until the router has read what the holder says.
    async fn is_read(&self) {
        let reading = async {
            for salt in 0.. {
                let (told, _) = self.ask(&format!("other {salt}")).await;
                if told["next_best"]["predicted"]["queue_s"].as_f64().is_some_and(|queue| queue > 1.0) {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), reading).await.expect("the router reads what workers say");
    }

    async fn ask(&self, salt: &str) -> (Value, Duration) {
        let begun = Instant::now();
        let http = self.cluster.http.post(self.cluster.url("/v1/completions"));
        let asked =
            http.json(&json!({"prompt": prompt(), "max_tokens": 4, "cache_salt": salt})).header("x-baton-trace", "1");
        let response = asked.send().await.unwrap();
        let told: Value = serde_json::from_slice(response.headers()["x-baton-placement"].as_bytes()).unwrap();
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["choices"][0]["text"], ANSWER, "{body}");
        (told.as_array().unwrap().last().unwrap().clone(), begun.elapsed())
    }
}

#[tokio::test]
async fn the_worker_that_computes_takes_the_prefix_from_the_one_that_has_it() {
    let two = two([], []).await;
    let (told, _) = two.fetches().await;
    assert_eq!((&told["fetches"]["tokens"], &told["fetches"]["from"]), (&json!(336), &json!("w1")), "{told}");
    assert_eq!(told["prefill"], "w2", "{told}");
    let ((taken, _), (_, given)) = (two.idle.exchanged(), two.holder.exchanged());
    assert_eq!((taken.len(), taken[0].tokens.len()), (1, 337), "one token after the last block");
    let same = given[0].prefix.as_ref().map(|prefix| &prefix.tokens);
    assert_eq!((given.len(), &given[0].target[..], same), (1, &b"here"[..], Some(&taken[0].tokens)));
    assert!((400..=2000).contains(&taken[0].deadline_ms), "{} ms", taken[0].deadline_ms);
    two.cluster.stop().await;
}

/// I5: whatever becomes of a fetch, the request is answered, and soon.
#[tokio::test]
async fn a_prefix_that_does_not_come_holds_up_nobody() {
    let refuses = || Exchanges::Refuse(Status::resource_exhausted("no room"));
    let lost = || Exchanges::Refuse(Status::not_found("evicted"));
    // The one that takes refuses, the one that gives refuses, the one that takes never has it, neither says anything.
    let plans = [
        (vec![refuses()], vec![]),
        (vec![], vec![lost()]),
        (vec![Exchanges::Stall], vec![]),
        (vec![Exchanges::Stall], vec![Exchanges::Stall]),
    ];
    for (at, (takes, gives)) in plans.into_iter().enumerate() {
        let two = two(takes, gives).await;
        let (_, took) = two.fetches().await;
        assert!(took < Duration::from_secs(5), "{at}: {took:?}");
        two.cluster.stop().await;
    }
}

/// A prompt that came before its fetch has begun would be computed from its beginning.
#[tokio::test]
async fn a_prompt_is_held_back_until_its_fetch_begins_but_not_for_long() {
    let two = two([Exchanges::Silent], []).await;
    let (_, took) = two.fetches().await;
    assert!((Duration::from_millis(95)..Duration::from_secs(5)).contains(&took), "{took:?}");
    two.cluster.stop().await;
}

/// A worker that computes hears of a fetch when its step has ended.
#[tokio::test]
async fn a_worker_in_a_long_step_has_time_to_begin() {
    let late = Exchanges::Late(Duration::from_millis(250));
    let two = held_by(Role::Prefill, 300, [late], []).await;
    let (_, took) = two.fetches().await;
    assert!((Duration::from_millis(245)..Duration::from_secs(5)).contains(&took), "{took:?}");
    assert_eq!(two.holder.exchanged().1.len(), 1, "what was lent is written to");
    two.cluster.stop().await;
}

/// What was begun for a request's first placement is there for the next one.
#[tokio::test]
async fn a_request_that_is_placed_again_waits_for_the_fetch_that_has_begun() {
    let late = Exchanges::Late(Duration::from_millis(250));
    let two = held_by(Role::Prefill, 200, [late], []).await;
    two.is_read().await;
    two.cluster.worker(2).decode_will([Decode::Refuse(Status::unavailable("no"))]);
    let (_, took) = two.ask("0").await;
    assert!((Duration::from_millis(245)..Duration::from_secs(5)).contains(&took), "{took:?}");
    assert_eq!((two.idle.exchanged().0.len(), two.holder.exchanged().1.len()), (1, 1), "one fetch");
    two.cluster.stop().await;
}

/// Where the network lets no KV through, nobody waits for it again and again.
#[tokio::test]
async fn no_further_prefix_is_fetched_where_one_did_not_get_through() {
    let two = two([Exchanges::Stall], []).await;
    two.fetches().await;
    // The router learns of it when the time of a fetch is over.
    let mut salts = (1..SALTS).map(|salt| salt.to_string());
    let left_alone = async {
        for salt in salts.by_ref() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if !two.ask(&salt).await.0["fetches"].is_object() {
                return true;
            }
        }
        false
    };
    assert!(left_alone.await, "it is tried again and again");
    let tried = two.idle.exchanged().0.len();
    assert!(!two.ask(&salts.next().unwrap()).await.0["fetches"].is_object());
    assert_eq!(two.idle.exchanged().0.len(), tried);
    two.cluster.stop().await;
}

/// A worker that takes prefixes is not left out for what the one that holds them does.
#[tokio::test]
async fn what_the_holder_does_not_give_is_not_held_against_who_asks() {
    let gone = || Exchanges::Refuse(Status::unavailable("gone"));
    let two = two([Exchanges::Stall, Exchanges::Stall], [gone(), gone()]).await;
    two.fetches().await;
    for salt in 1..5 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(two.ask(&salt.to_string()).await.0["fetches"].is_object(), "{salt}");
    }
    two.cluster.stop().await;
}

/// A store that was killed stays in the view until its registration ends. Nothing is asked of it from when its stream of news ends.
#[tokio::test]
async fn nothing_is_fetched_from_a_store_that_is_gone() {
    let two = held_by(Role::KvStore, 0, [], []).await;
    let mut salts = 0..SALTS;
    // From whom a prompt's prefix is fetched that only the store holds.
    let from = async |salt: usize| two.ask(&salt.to_string()).await.0["fetches"]["from"].clone();
    let read = async {
        // The router may not have read yet what the store says.
        while from(salts.next().expect("the router reads what workers say")).await != "w1" {}
    };
    read.await;
    two.holder.cut();
    let noticed = async { while !from(salts.next().expect("it is asked again and again")).await.is_null() {} };
    noticed.await;
    for salt in salts.by_ref().take(3) {
        assert!(from(salt).await.is_null());
    }
    two.cluster.stop().await;
}
