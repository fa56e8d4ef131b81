//! Batch work beside interactive requests, through whole clusters: it gives way, it is served, and its answers are the same.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use anyhow::ensure;
use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::cluster::client::{apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, models};

const FLOOD: usize = 8;
const ASKED: usize = 4;
/// Places of a decode worker. Batch requests take all.
const PLACES: u32 = 2;

fn batch(number: usize) -> v1::GenerateRequest {
    v1::GenerateRequest { class: v1::Class::Batch.into(), ..apart(sampled(prompt(40, number as u64), 100, 7)) }
}

fn interactive(number: usize) -> v1::GenerateRequest {
    apart(sampled(prompt(60, 100 + number as u64), 5, 7))
}

/// A flood of batch requests, and then interactive ones, one after the other, as somebody asks who waits for each answer.
fn floods(aggregated: bool) -> anyhow::Result<()> {
    let model = models::slow()?;
    let env = vec![("BATON_MAX_RUNNING".to_owned(), PLACES.to_string())];
    let cluster = Cluster::start(ClusterOptions { aggregated, env, ..ClusterOptions::new(&model) })?;
    let client = cluster.client()?;
    let ended = Arc::new(Mutex::new(0));
    let mut flood = Vec::new();
    for number in 0..FLOOD {
        let (client, ended) = (client.clone(), ended.clone());
        flood.push(cluster.spawn(async move {
            let answer = client.ask(batch(number)).await;
            *ended.lock().unwrap() += 1;
            answer
        }));
    }
    cluster.wait_for_worker(Role::Decode, |worker| worker.status.running == PLACES)?;
    for number in 0..ASKED {
        let answer = cluster.block_on(client.ask(interactive(number)))?;
        let class = answer.finish.as_ref().map(|finish| finish.class());
        ensure!(class == Some(v1::Class::Interactive) && answer.ids.len() == 5, "{answer:?}");
    }
    let served = *ended.lock().unwrap();
    ensure!(
        served < FLOOD / 2,
        "{served} batch answers of {FLOOD} were complete before {ASKED} short ones that came later"
    );
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    let preempted = worker.metrics()?.sum("baton_preemptions_total", "");
    ensure!(preempted > 0.0, "no batch request gave up its place");
    let answers = flood.into_iter().map(|answer| cluster.block_on(answer)?).collect::<anyhow::Result<Vec<_>>>()?;
    let class = |answer: &baton_tests::cluster::client::Answer| answer.finish.as_ref().map(|finish| finish.class());
    ensure!(answers.iter().all(|answer| class(answer) == Some(v1::Class::Batch)), "all are served, as what they are");
    // I1: the first ones gave way.
    for (number, answer) in answers.iter().enumerate().take(3) {
        let again = cluster.block_on(client.ask(v1::GenerateRequest { class: 0, ..batch(number) }))?;
        ensure!(again.ids == answer.ids, "batch request {number} was answered otherwise than alone");
    }
    cluster.wait_idle()?;
    cluster.stop()
}

#[test]
fn interactive_requests_go_before_a_flood_of_batch_ones_and_all_are_served() -> anyhow::Result<()> {
    floods(true)
}

#[test]
fn so_they_do_where_prefill_and_decode_are_apart() -> anyhow::Result<()> {
    floods(false)
}
