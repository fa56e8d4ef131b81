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

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6 * b
}

#[test]
fn the_load_of_workers_follows_what_they_have_to_do() -> anyhow::Result<()> {
    let model = models::slow()?;
    // Times that this model cannot keep with several requests.
    let settings = [("BATON_SLO_TTFT", "50ms"), ("BATON_SLO_ITL", "100us"), ("BATON_CHUNK", "64")];
    let env = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new(&model) })?;
    let of = |role| cluster.wait_for_worker(role, |_| true)?.load();
    for role in [Role::Prefill, Role::Decode] {
        let idle = of(role)?;
        ensure!(["load", "queued_tokens", "running"].map(|name| number(&idle, name)) == [0.0; 3], "{role:?}: {idle}");
    }
    let client = cluster.client()?;
    let asked: Vec<_> = (0..12)
        .map(|seed| {
            let client = client.clone();
            cluster.spawn(async move { client.ask(apart(greedy(prompt(600, seed), 20))).await })
        })
        .collect();
    // Once a rate is known, the queue is a time, and that time is most of the load.
    let prefill = wait(|| of(Role::Prefill).ok().filter(|load| number(load, "load") > 1.0))?;
    ensure!(number(&prefill, "queued_tokens") > 600.0, "{prefill}");
    ensure!(is_near(number(&prefill, "queue_seconds") / 0.05, number(&prefill, "load")), "{prefill}");
    ensure!(number(&prefill, "inter_token_seconds") == 0.0, "it decodes nothing: {prefill}");
    let metrics = cluster.wait_for_worker(Role::Prefill, |_| true)?.metrics()?;
    ensure!(metrics.sum("baton_load", "") > 0.0 && metrics.sum("baton_queued_tokens", "") > 0.0, "{metrics:?}");
    let decode = wait(|| of(Role::Decode).ok().filter(|load| number(load, "load") > 1.0))?;
    ensure!(is_near(number(&decode, "inter_token_seconds") / 1e-4, number(&decode, "load")), "{decode}");
    ensure!(number(&decode, "queued_tokens") == 0.0, "others compute its prompts: {decode}");
    ensure!((0.0..=1.0).contains(&number(&decode, "kv_in_use")), "{decode}");
    for answer in asked {
        let answer = cluster.block_on(answer)??;
        ensure!(answer.ids.len() == 20, "{answer:?}");
    }
    cluster.wait_idle()?;
    let prefill =
        wait(|| of(Role::Prefill).ok().filter(|load| number(load, "load") == 0.0)).context("it stays high")?;
    ensure!(
        ["queued_tokens", "queue_seconds", "kv_in_use", "waiting"].iter().all(|name| number(&prefill, name) == 0.0),
        "{prefill}"
    );
    cluster.stop()
}
