//! What autoscalers read of workers rises with what they have to do, and falls again.
#![allow(clippy::unwrap_used)]

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::cluster::client::{apart, greedy, prompt};
use baton_tests::cluster::{Cluster, ClusterOptions, models, wait};
use serde_json::Value;

/// A number of what a worker of this role says.
fn number(load: &Value, name: &str) -> f64 {
    load[name].as_f64().unwrap_or(f64::NAN)
}

#[test]
fn the_load_of_workers_follows_what_they_have_to_do() -> anyhow::Result<()> {
    let model = models::slow()?;
    // Limits that this model cannot keep with so many requests.
    let settings = [("BATON_SLO_TTFT", "50ms"), ("BATON_MAX_RUNNING", "4"), ("BATON_CHUNK", "64")];
    let env = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new(&model) })?;
    let of = |role| cluster.wait_for_worker(role, |_| true)?.load();
    for role in [Role::Prefill, Role::Decode] {
        let idle = of(role)?;
        ensure!(["load", "queued_tokens", "running"].map(|name| number(&idle, name)) == [0.0; 3], "{role:?}: {idle}");
    }
    let client = cluster.client()?;
    let asked: Vec<_> = (0..8)
        .map(|seed| {
            let client = client.clone();
            cluster.spawn(async move { client.ask(apart(greedy(prompt(300, seed), 20))).await })
        })
        .collect();
    // Once a rate is known, the queue is a time, and that time is most of the load.
    let prefill = wait(|| of(Role::Prefill).ok().filter(|load| number(load, "queue_seconds") > 0.05))?;
    ensure!(number(&prefill, "queued_tokens") > 300.0, "{prefill}");
    ensure!(number(&prefill, "load") >= number(&prefill, "queue_seconds") / 0.05 - 1e-6, "{prefill}");
    let metrics = cluster.wait_for_worker(Role::Prefill, |_| true)?.metrics()?;
    ensure!(metrics.sum("baton_load", "") > 0.0 && metrics.sum("baton_queued_tokens", "") > 0.0, "{metrics:?}");
    let decode = wait(|| of(Role::Decode).ok().filter(|load| number(load, "inter_token_seconds") > 0.0))?;
    ensure!(number(&decode, "load") > 1.0, "more are here than may run: {decode}");
    ensure!(number(&decode, "queued_tokens") == 0.0, "others compute its prompts: {decode}");
    ensure!(number(&decode, "kv_in_use") > 0.0 && number(&decode, "kv_in_use") <= 1.0, "{decode}");
    for answer in asked {
        let answer = cluster.block_on(answer)??;
        ensure!(answer.ids.len() == 20, "{answer:?}");
    }
    cluster.wait_idle()?;
    let prefill =
        wait(|| of(Role::Prefill).ok().filter(|load| number(load, "queue_seconds") == 0.0)).context("it stays high")?;
    ensure!(
        ["queued_tokens", "kv_in_use", "running", "waiting"].iter().all(|name| number(&prefill, name) == 0.0),
        "{prefill}"
    );
    ensure!(number(&prefill, "inter_token_seconds") == 0.0, "first tokens follow from prompts: {prefill}");
    ensure!(number(&prefill, "prefilling") > 0.0, "{prefill}");
    cluster.stop()
}
