//! One request is one trace over all processes that worked on it, also where one of them is killed in the middle.
#![allow(clippy::unwrap_used)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::cluster::client::{apart, greedy, prompt};
use baton_tests::cluster::{Cluster, ClusterOptions, models};
use baton_tests::collector::{Collector, Span};
use rustix::process::Signal;

/// The caller's trace, and its span.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// One cluster at a time: two cores are all there may be.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Rig {
    runtime: tokio::runtime::Runtime,
    collector: Collector,
    cluster: Cluster,
}

impl Rig {
    fn start(options: ClusterOptions, args: &[&str]) -> Rig {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let collector = runtime.block_on(Collector::start()).unwrap();
        let mut args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        args.extend(["--otlp-endpoint".to_owned(), collector.endpoint()]);
        // Every prompt is handed over.
        let env = vec![("BATON_LOCAL_PROMPT".to_owned(), "0".to_owned())];
        let cluster = Cluster::start(ClusterOptions { args, env, ..options }).unwrap();
        Rig { runtime, collector, cluster }
    }

    fn stop(self) {
        self.cluster.stop().unwrap();
        drop(self.runtime);
    }
}

fn traced(request: v1::GenerateRequest, flags: &str) -> tonic::Request<v1::GenerateRequest> {
    let mut request = tonic::Request::new(request);
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{CALLER}-{flags}").parse().unwrap());
    request
}

/// The only span of that name.
fn only<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let all: Vec<_> = spans.iter().filter(|span| span.name == name).collect();
    let [one] = all[..] else { panic!("{} spans named {name}: {spans:#?}", all.len()) };
    one
}

/// Below which span another one is, both by name, within its times.
fn below(spans: &[Span], child: &str, parent: &str) {
    let (child, parent) = (only(spans, child), only(spans, parent));
    assert_eq!(child.parent, parent.id, "{child:?} is not below {parent:?}");
    // Clocks are read one after the other.
    let slack = 5_000_000;
    assert!(parent.from <= child.from + slack && child.to <= parent.to + slack, "{child:?} is not within {parent:?}");
}

#[test]
fn a_split_request_is_one_trace() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let rig = Rig::start(ClusterOptions::new(&model), &["--otlp-sample", "0"]);
    let client = rig.cluster.client().unwrap();
    let ask = |request| rig.cluster.block_on(client.ask(request)).unwrap();
    // Neither drawn, nor kept by the caller.
    ask(tonic::Request::new(apart(greedy(prompt(40, 1), 8))));
    ask(traced(apart(greedy(prompt(40, 2), 8)), "00"));
    let answer = ask(traced(apart(greedy(prompt(40, 3), 40)), "01"));
    assert_eq!(answer.ids.len(), 40);
    // What the workers send comes later, or earlier.
    let whole = |spans: &[Span]| {
        ["request", "prefill worker", "decode worker"].iter().all(|name| spans.iter().any(|span| span.name == *name))
    };
    let spans = rig.collector.trace(TRACE, whole).unwrap();
    assert_eq!(only(&spans, "request").parent, CALLER);
    for (child, parent) in [
        ("choice", "request"),
        ("queue", "choice"),
        ("prefill", "choice"),
        ("transfer", "choice"),
        ("prefill worker", "prefill"),
        ("send", "prefill worker"),
        ("decode", "choice"),
        ("decode worker", "decode"),
        ("generate", "decode worker"),
        ("reserve", "decode worker"),
        ("receive", "decode worker"),
    ] {
        if child != "prefill worker" {
            below(&spans, child, parent);
        } else {
            // Its call ends when the KV is verified, which is after the prompt is computed.
            assert_eq!(only(&spans, child).parent, only(&spans, parent).id);
        }
    }
    let services =
        [("request", "baton-router"), ("prefill worker", "baton-prefill"), ("decode worker", "baton-decode")];
    services.iter().for_each(|(name, service)| assert_eq!(only(&spans, name).service, *service));
    let choice = only(&spans, "choice");
    assert_eq!((&*choice.about["baton.completion_tokens"], &*choice.about["baton.outcome"]), ("40", "ok"));
    assert_eq!(choice.events, ["placed", "token", "token", "token"], "tokens 0, 16 and 32");
    assert!(only(&spans, "transfer").about["baton.bytes"].parse::<u64>().unwrap() > 0);
    assert!(spans.iter().all(|span| span.error.is_none()), "{spans:#?}");
    assert!(rig.collector.spans().iter().all(|span| span.trace == TRACE), "no other request is traced");
    assert!(rig.cluster.log().contains(TRACE), "the log names the trace");
    rig.stop();
}

#[test]
fn a_killed_decode_worker_leaves_a_whole_trace() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let rig = Rig::start(ClusterOptions { decode: 2, ..ClusterOptions::new(&model) }, &[]);
    let client = rig.cluster.client().unwrap();
    let request = traced(apart(greedy(prompt(60, 1), 300)), "01");
    let mut answering = rig.cluster.block_on(client.start(request)).unwrap();
    rig.cluster.block_on(answering.until(5)).unwrap();
    let busy = rig.cluster.wait_for_worker(Role::Decode, |worker| worker.blocks().used > 0).unwrap();
    rig.cluster.signal(busy.pid, Signal::KILL).unwrap();
    let answer = rig.cluster.block_on(answering.rest()).unwrap();
    assert_eq!(answer.ids.len(), 300);
    let whole =
        |spans: &[Span]| ["request", "decode worker"].iter().all(|name| spans.iter().any(|span| span.name == *name));
    let spans = rig.collector.trace(TRACE, whole).unwrap();
    let mut decodes: Vec<_> = spans.iter().filter(|span| span.name == "decode").collect();
    decodes.sort_by_key(|span| span.from);
    let [first, second] = &decodes[..] else { panic!("{spans:#?}") };
    assert!(first.error.is_some() && second.error.is_none(), "{first:?} {second:?}");
    assert_eq!(first.about["baton.worker"], busy.member.id.to_string());
    let choice = only(&spans, "choice");
    assert!(decodes.iter().all(|span| span.parent == choice.id));
    assert!(choice.events.contains(&"recovering".to_owned()) && choice.error.is_none(), "{choice:?}");
    assert_eq!(only(&spans, "request").parent, CALLER);
    // What the killed one did is lost with it.
    assert_eq!(only(&spans, "decode worker").parent, second.id);
    rig.stop();
}
