//! What a worker's settings decide between requests, seen through a whole cluster: who is served first, and whose KV makes
//! room. None of them changes an answer (I1).
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::cluster::client::{apart, greedy, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, models};
use tempfile::TempDir;

/// One worker that does everything, with these settings.
fn alone(model: &TempDir, settings: &[(&str, &str)]) -> anyhow::Result<Cluster> {
    let env = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Cluster::start(ClusterOptions { aggregated: true, env, ..ClusterOptions::new(model) })
}

fn metric(cluster: &Cluster, name: &str) -> anyhow::Result<f64> {
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    Ok(worker.metrics()?.sum(name, ""))
}

/// In which order three that wait for the only place in the batch are answered. Prompts of 200, 20 and 100 tokens, of low,
/// high and middle numbers of priority.
fn served(model: &TempDir, order: &str) -> anyhow::Result<Vec<u32>> {
    let settings = [("BATON_ORDER", order), ("BATON_MAX_RUNNING", "1")];
    let cluster = alone(model, &settings)?;
    let client = cluster.client()?;
    let ended = Arc::new(Mutex::new(Vec::new()));
    let busy = cluster.block_on(async {
        let mut busy = client.start(apart(greedy(prompt(20, 1), 8000))).await?;
        busy.until(1).await?;
        anyhow::Ok(busy)
    })?;
    let mut asked = Vec::new();
    for (number, (tokens, priority)) in [(200, -1), (20, 1), (100, 0)].into_iter().enumerate() {
        let request = v1::GenerateRequest { priority, ..apart(greedy(prompt(tokens, 2 + number as u64), 3)) };
        let (client, ended) = (client.clone(), ended.clone());
        asked.push(cluster.spawn(async move {
            let answer = client.ask(request).await;
            ended.lock().unwrap().push(number as u32);
            answer
        }));
        let waiting = number as u32 + 1;
        // One after the other, while the place is taken.
        cluster.wait_for_worker(Role::Decode, |w| (w.status.running, w.status.waiting) == (1, waiting))?;
    }
    drop(busy);
    for answer in asked {
        cluster.block_on(answer)??;
    }
    cluster.wait_idle()?;
    cluster.stop()?;
    let ended = ended.lock().unwrap().clone();
    Ok(ended)
}

#[test]
fn each_order_serves_in_its_own() -> anyhow::Result<()> {
    let model = models::slow()?;
    for (order, want) in [("fcfs", [0, 1, 2]), ("shortest-first", [1, 2, 0]), ("priority", [0, 2, 1])] {
        let ended = served(&model, order)?;
        ensure!(ended == want, "{order}: ended in the order {ended:?}, not {want:?}");
    }
    Ok(())
}

/// Asks with a prompt of 100 tokens, 6 blocks and a partial one; how many of them were cached.
fn ask(cluster: &Cluster, seed: u64, keep: u32) -> anyhow::Result<u32> {
    let request = v1::GenerateRequest { cache_keep_seconds: keep, ..sampled(prompt(100, seed), 2, 5) };
    let client = cluster.client()?;
    let answer = cluster.block_on(client.ask(request))?;
    Ok(answer.finish.and_then(|finish| finish.usage).context("usage")?.cached_tokens)
}

/// Twice as much as a cache of 16 blocks holds, from three that come once.
fn flood(cluster: &Cluster) -> anyhow::Result<()> {
    for seed in 100..103 {
        let cached = ask(cluster, seed, 0)?;
        ensure!(cached == 0, "{cached} tokens of a new prompt were cached");
    }
    Ok(())
}

#[test]
fn each_eviction_keeps_its_own() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let size = ("BATON_PREFIX_CACHE_BLOCKS", "16");
    // What was asked for three times, lately but not last: only LFU looks at how often.
    for (eviction, stays) in [("lru", false), ("lfu", true)] {
        let cluster = alone(&model, &[size, ("BATON_EVICTION", eviction)])?;
        for _ in 0..3 {
            ask(&cluster, 1, 0)?;
        }
        flood(&cluster)?;
        let cached = ask(&cluster, 1, 0)?;
        ensure!((cached == 99) == stays, "{eviction}: {cached} tokens cached");
        ensure!(metric(&cluster, "baton_prefix_evictions_total")? > 0.0, "{eviction} evicted nothing");
        cluster.wait_idle()?;
        cluster.stop()?;
    }
    Ok(())
}

#[test]
fn what_a_request_asks_to_keep_is_kept_within_the_workers_bounds() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let (size, priority) = (("BATON_PREFIX_CACHE_BLOCKS", "16"), ("BATON_EVICTION", "priority"));
    // Of 16 blocks 8 may be kept: the first prompt's 7, and one of the second's.
    let cluster = alone(&model, &[size, priority])?;
    ask(&cluster, 1, 600)?;
    ask(&cluster, 2, 600)?;
    flood(&cluster)?;
    ensure!(metric(&cluster, "baton_prefix_kept_blocks")? == 8.0, "I5: half of the cache, no more");
    let cached = [ask(&cluster, 1, 0)?, ask(&cluster, 2, 0)?];
    ensure!(cached == [99, 16], "{cached:?} tokens cached");
    cluster.wait_idle()?;
    cluster.stop()?;
    // Whatever is asked for: not where nothing is kept, and for no longer than the worker keeps anything.
    for settings in [vec![size], vec![size, priority, ("BATON_MAX_KEEP", "1ms")]] {
        let cluster = alone(&model, &settings)?;
        ask(&cluster, 1, 600)?;
        flood(&cluster)?;
        let cached = ask(&cluster, 1, 600)?;
        ensure!(cached == 0, "{settings:?}: {cached} tokens cached");
        cluster.wait_idle()?;
        cluster.stop()?;
    }
    Ok(())
}

/// A worker finds out at its start how many prompt tokens fill a step, or is told. Either way the answers are the same (I1).
#[test]
fn prompts_are_packed_as_measured_or_as_told() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let mut answers = Vec::new();
    for told in ["auto", "5", "100"] {
        let cluster = alone(&model, &[("BATON_PACK_TOKENS", told)])?;
        let packed = metric(&cluster, "baton_pack_tokens")?;
        match told.parse::<f64>() {
            Ok(told) => ensure!(packed == told, "{packed} tokens, {told} were asked for"),
            Err(_) => ensure!((16.0..=512.0).contains(&packed), "{packed} tokens were measured to fill a step"),
        }
        let measured = cluster.log().contains("found how many prompt tokens fill a step");
        ensure!(measured == (told == "auto"), "{told}: measured: {measured}");
        let client = cluster.client()?;
        let requests = (0..8).map(|i| apart(sampled(prompt(10 + 13 * i, i as u64), 12, 3)));
        let together = cluster.block_on(futures::future::try_join_all(requests.map(|request| client.ask(request))))?;
        answers.push(together.into_iter().map(|answer| answer.ids).collect::<Vec<_>>());
        cluster.wait_idle()?;
        cluster.stop()?;
    }
    ensure!(answers[1] == answers[0] && answers[2] == answers[0], "{answers:?}");
    Ok(())
}
