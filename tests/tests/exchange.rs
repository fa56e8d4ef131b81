//! Prefixes that move from one worker's prefix cache to another's: by every pair of roles, with the same answers (I1), and with nothing lost when it
//! fails (I3, I5, I6).
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use anyhow::{Context, ensure};
use baton_cluster::{Member, Role};
use baton_proto::v1::{self, fetch_event::Event};
use baton_tests::binary;
use baton_tests::cluster::client::{Answer, apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, exchange_with, models, wait};
use rustix::process::Signal;
use tempfile::TempDir;

/// Prompt tokens, and those of its blocks that move.
const PROMPT: usize = 310;
const MOVES: u32 = 304;

fn ask(cluster: &Cluster, tokens: &[u32], salt: &str) -> anyhow::Result<(Answer, u32)> {
    let request = v1::GenerateRequest { cache_salt: salt.to_owned(), ..sampled(tokens, 12, 5) };
    let client = cluster.client()?;
    let answer = cluster.block_on(client.ask(request))?;
    let usage = answer.finish.as_ref().and_then(|f| f.usage).context("usage")?;
    Ok((answer, usage.cached_tokens))
}

fn scale(cluster: &Cluster, each: u32) -> anyhow::Result<()> {
    let (each, url) = (each.to_string(), cluster.registry());
    let args = ["scale", "--prefill", &each, "--decode", &each, "--wait", "--registry", url];
    binary::output(&args).map(drop)
}

fn prefix(tokens: &[u32], salt: &str) -> Option<v1::Prefix> {
    let (request_id, tokens) = (format!("move-{salt}"), tokens.to_vec());
    Some(v1::Prefix { request_id, tokens, cache_salt: salt.to_owned(), ..v1::Prefix::default() })
}

/// Has a worker take a prefix from another one, as a router does; returns its tokens.
async fn moved(from: &Member, to: &Member, tokens: &[u32], salt: &str) -> anyhow::Result<u32> {
    let request = v1::FetchRequest { prefix: prefix(tokens, salt) };
    let mut fetches = exchange_with(to).await?.fetch(request).await?.into_inner();
    let Some(Event::Reserved(v1::Reserved { target })) = fetches.message().await?.and_then(|said| said.event) else {
        anyhow::bail!("no target")
    };
    let request = v1::ServeRequest { prefix: prefix(tokens, salt), target };
    let mut serves = exchange_with(from).await?.serve(request).await?.into_inner();
    let served = serves.message().await?.context("served")?;
    ensure!(served.event.is_some(), "{served:?}");
    match fetches.message().await?.and_then(|said| said.event) {
        Some(Event::Fetched(v1::Fetched { tokens })) => Ok(tokens),
        other => anyhow::bail!("{other:?}"),
    }
}

/// One worker of each role that has computed or received something, and one of each that has not.
struct Four {
    _model: TempDir,
    cluster: Cluster,
    old: [Member; 2],
    new: [Member; 2],
}

const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];

fn four(transport: &'static str, first: impl FnOnce(&Cluster) -> anyhow::Result<()>) -> anyhow::Result<Four> {
    let model = models::tiny()?;
    // A decode worker computes what little its prefix leaves.
    let env = vec![("BATON_LOCAL_PROMPT".to_owned(), "256".to_owned())];
    let cluster = Cluster::start(ClusterOptions { transport, env, ..ClusterOptions::new(&model) })?;
    first(&cluster)?;
    let of = |role, before: &[Member]| {
        let known = |member: &Member| before.iter().any(|old| old.id == member.id);
        cluster.wait_for_worker(role, |worker| !known(&worker.member)).map(|worker| worker.member)
    };
    let old = [of(ROLES[0], &[])?, of(ROLES[1], &[])?];
    scale(&cluster, 2)?;
    let new = [of(ROLES[0], &old)?, of(ROLES[1], &old)?];
    Ok(Four { _model: model, cluster, old, new })
}

/// I1: what was fetched gives the answers that what was computed gave.
fn every_pair(transport: &'static str) -> anyhow::Result<()> {
    let mut answers = Vec::new();
    let salts = ["pp", "pd", "dp", "dd"];
    let tokens = prompt(PROMPT, 1);
    let Four { cluster, old, new, _model } = four(transport, |cluster| {
        salts.iter().try_for_each(|salt| {
            let (answer, cached) = ask(cluster, &tokens, salt)?;
            ensure!(cached == 0, "{cached} tokens of another tenant");
            answers.push(answer.ids);
            Ok(())
        })
    })?;
    for (at, salt) in salts.iter().enumerate() {
        let (from, to) = (&old[at / 2], &new[at % 2]);
        let came = cluster.block_on(moved(from, to, &tokens, salt)).with_context(|| format!("{from:?} to {to:?}"))?;
        ensure!(came == MOVES, "{came} tokens came");
        let again = cluster.block_on(moved(from, to, &tokens, salt)).unwrap_err();
        ensure!(again.to_string().contains("in the prefix cache already"), "{again:#}");
    }
    let stranger = cluster.block_on(moved(&old[0], &new[0], &tokens, "another tenant")).unwrap_err();
    ensure!(stranger.to_string().contains("0 of 304 tokens of a prefix are in the cache"), "{stranger:#}");
    cluster.wait_idle_workers(4)?;
    for member in &new {
        let worker = cluster.wait_for_worker(member.role, |worker| worker.member.id == member.id)?;
        let fetched = worker.metrics()?.sum("baton_kv_fetched_tokens_total", "");
        ensure!(fetched == f64::from(2 * MOVES), "{fetched} tokens fetched");
    }
    for member in &old {
        let worker = cluster.wait_for_worker(member.role, |worker| worker.member.id == member.id)?;
        cluster.signal(worker.pid, Signal::TERM)?;
    }
    cluster.wait_for_members(|members| !members.iter().any(|member| old.iter().any(|old| old.id == member.id)))?;
    for (salt, want) in salts.iter().zip(&answers) {
        let (answer, cached) = ask(&cluster, &tokens, salt)?;
        ensure!(answer.ids == *want, "I1: {salt}: {:?} instead of {want:?}", answer.ids);
        ensure!(cached >= MOVES, "{salt}: {cached} tokens were cached");
    }
    // Others have taken the places of the old ones by then.
    cluster.wait_idle_workers(4)?;
    cluster.stop()
}

#[test]
fn every_worker_gives_prefixes_to_every_other_over_shared_memory() -> anyhow::Result<()> {
    every_pair("shm")
}

#[test]
fn every_worker_gives_prefixes_to_every_other_over_tcp() -> anyhow::Result<()> {
    every_pair("tcp")
}

/// I3, I6: whoever leaves, and whenever, all blocks come back.
#[test]
fn an_exchange_that_is_broken_off_keeps_no_blocks() -> anyhow::Result<()> {
    let tokens = prompt(PROMPT, 1);
    let Four { cluster, old, new, _model } = four("auto", |cluster| ask(cluster, &tokens, "").map(drop))?;
    cluster.block_on(async {
        // The stream of a fetch is dropped before anybody writes.
        let mut taker = exchange_with(&new[0]).await?;
        let request = || v1::FetchRequest { prefix: prefix(&tokens, "") };
        drop(taker.fetch(request()).await?.into_inner().message().await?);
        // Nobody serves: its time runs out. Until the worker has heard that the stream is dropped, the prefix seems to be on its way.
        let hurried = v1::Prefix { deadline_ms: 200, ..prefix(&tokens, "").unwrap() };
        let mut fetches = loop {
            match taker.fetch(v1::FetchRequest { prefix: Some(hurried.clone()) }).await {
                Err(coming) if coming.message().contains("on their way") => tokio::task::yield_now().await,
                begun => break begun?.into_inner(),
            }
        };
        fetches.message().await?;
        let late = fetches.message().await.unwrap_err();
        ensure!(late.code() == tonic::Code::DeadlineExceeded, "{late}");
        // A target for another prefix, a stranger's, and a changed one.
        let mut fetches = taker.fetch(request()).await?.into_inner();
        let Some(Event::Reserved(v1::Reserved { target })) = fetches.message().await?.and_then(|said| said.event)
        else {
            anyhow::bail!("no target")
        };
        let mut giver = exchange_with(&old[0]).await?;
        let shorter = v1::ServeRequest { prefix: prefix(&tokens[..200], ""), target: target.clone() };
        let refused = giver.serve(shorter).await.unwrap_err();
        ensure!(refused.message().contains("tokens"), "{refused}");
        let garbage = v1::ServeRequest { prefix: prefix(&tokens, ""), target: vec![7; 40] };
        ensure!(giver.serve(garbage).await.unwrap_err().code() == tonic::Code::InvalidArgument);
        let none = giver.serve(v1::ServeRequest { prefix: None, target: target.clone() }).await.unwrap_err();
        ensure!(none.message() == "prefix is missing", "{none}");
        let unknown = v1::Prefix { tokens: vec![u32::MAX; 40], ..prefix(&tokens, "").unwrap() };
        let refused = taker.fetch(v1::FetchRequest { prefix: Some(unknown) }).await.unwrap_err();
        ensure!(refused.message().contains("the model's vocabulary"), "{refused}");
        // The right one still works.
        let right = v1::ServeRequest { prefix: prefix(&tokens, ""), target };
        giver.serve(right).await?.into_inner().message().await?;
        ensure!(matches!(fetches.message().await?.and_then(|said| said.event), Some(Event::Fetched(_))));
        anyhow::Ok(())
    })?;
    cluster.wait_idle_workers(4)?;
    // The worker that serves dies while the other one waits.
    let mut fetches = cluster.block_on(async {
        let request = v1::FetchRequest { prefix: prefix(&tokens, "") };
        let fetches = exchange_with(&new[1]).await?.fetch(request).await?.into_inner();
        anyhow::Ok(fetches)
    })?;
    let giver = cluster.wait_for_worker(Role::Decode, |worker| worker.member.id == old[1].id)?;
    cluster.signal(giver.pid, Signal::STOP)?;
    cluster.block_on(fetches.message())?;
    drop(fetches);
    cluster.signal(giver.pid, Signal::KILL)?;
    wait(|| cluster.workers().iter().all(|worker| worker.idle()).then_some(()))?;
    cluster.stop()
}

/// Requests with one long prefix are shared out among the prefill workers, and the prefix is computed once (I1).
#[test]
fn a_hot_prefix_spreads_instead_of_being_computed_again() -> anyhow::Result<()> {
    const PREFIX: usize = 1600;
    const REST: usize = 400;
    let model = models::slow()?;
    let cluster = Cluster::start(ClusterOptions { prefill: 2, ..ClusterOptions::new(&model) })?;
    let request = |seed| {
        let tokens = [prompt(PREFIX, 1), prompt(REST, seed)].concat();
        sampled(tokens, 4, seed)
    };
    let client = cluster.client()?;
    cluster.block_on(client.ask(request(2)))?;
    cluster.wait_idle()?;
    // Workers tell every 50 ms what they hold and have to do.
    wait(|| {
        cluster.router_metrics().is_ok_and(|m| m.sum("baton_kv_index_blocks", "") >= (PREFIX / 16) as f64).then_some(())
    })?;
    std::thread::sleep(Duration::from_millis(500));
    let asked: Vec<_> = (3..9)
        .map(|seed| {
            let (client, request) = (client.clone(), request(seed));
            cluster.spawn(async move { client.ask(request).await })
        })
        .collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(cluster.block_on(answer)??.ids);
    }
    cluster.wait_idle()?;
    let workers = cluster.workers_of(Role::Prefill);
    let sum = |name| workers.iter().map(|worker| Ok(worker.metrics()?.sum(name, ""))).sum::<anyhow::Result<f64>>();
    let (computed, fetched) = (sum("baton_prefill_tokens_total")?, sum("baton_kv_fetched_tokens_total")?);
    let fetches = cluster.router_metrics()?.sum("baton_kv_fetches_total", "outcome=\"fetched\"");
    ensure!(fetches == 1.0 && fetched == PREFIX as f64, "{fetches} fetches, {fetched} tokens");
    let once = (PREFIX + 7 * REST) as f64;
    ensure!((once..once + 100.0).contains(&computed), "{computed} tokens computed, {once} are in all prompts");
    for (seed, got) in (3..).zip(&answers) {
        let want = cluster.block_on(client.ask(apart(request(seed))))?.ids;
        ensure!(*got == want, "I1: {got:?} instead of {want:?}");
    }
    cluster.wait_idle()?;
    cluster.stop()
}

/// What a worker has only in its store below the pool, it loads and serves (I1, I6).
#[test]
fn a_prefix_comes_from_another_workers_store() -> anyhow::Result<()> {
    let model = models::slow()?;
    let bytes = |blocks: u64| anyhow::Ok(format!("{}B", blocks * models::block_bytes(model.path())?));
    // A pool for two prompts, and host memory for all.
    let args = ["--kv-memory".to_owned(), bytes(50)?, "--kv-host".to_owned(), bytes(600)?].to_vec();
    let cluster = Cluster::start(ClusterOptions { aggregated: true, args, ..ClusterOptions::new(model.path()) })?;
    let tokens = prompt(PROMPT, 1);
    let (want, _) = ask(&cluster, &tokens, "")?;
    for other in 2..7 {
        cluster.wait_idle()?;
        ask(&cluster, &prompt(PROMPT, other), "")?;
    }
    cluster.wait_idle()?;
    let old = cluster.wait_for_worker(Role::Decode, |_| true)?.member;
    binary::output(&["scale", "--decode", "2", "--wait", "--registry", cluster.registry()])?;
    let new = cluster.wait_for_worker(Role::Decode, |worker| worker.member.id != old.id)?.member;
    let moves = cluster.block_on(moved(&old, &new, &tokens, ""))?;
    ensure!(moves == MOVES, "{moves} tokens moved");
    let metric = |id, name: &str| {
        let worker = cluster.wait_for_worker(Role::Decode, |worker| worker.member.id == id)?;
        anyhow::Ok(worker.metrics()?.sum(name, ""))
    };
    ensure!(metric(old.id, "baton_kv_loaded_tokens_total")? == f64::from(MOVES), "it was only in the store");
    cluster.signal(cluster.wait_for_worker(Role::Decode, |worker| worker.member.id == old.id)?.pid, Signal::KILL)?;
    let computed = metric(new.id, "baton_prefill_tokens_total")?;
    let (got, cached) = ask(&cluster, &tokens, "")?;
    ensure!(
        got.ids == want.ids && cached >= MOVES,
        "I1: {:?} instead of {:?}, {cached} tokens cached",
        got.ids,
        want.ids
    );
    ensure!(computed == 0.0, "{computed} tokens computed before");
    cluster.wait_idle_workers(1)?;
    cluster.stop()
}

/// An idle worker takes what many prompts begin with, and computes the next of them from there, with the same answer (I1).
#[test]
fn an_idle_worker_takes_what_many_prompts_begin_with() -> anyhow::Result<()> {
    let model = models::tiny()?;
    // One after the other, all are computed by the prefill worker that has their beginning.
    let env = ["BATON_LOCAL_PROMPT", "BATON_LOCAL_PREFILL"].map(|name| (name.to_owned(), "0".to_owned())).to_vec();
    let cluster = Cluster::start(ClusterOptions { prefill: 2, env, ..ClusterOptions::new(&model) })?;
    let of = |which: u32| {
        let mut tokens = prompt(PROMPT, 1);
        tokens[MOVES as usize] = which;
        tokens
    };
    let mut answers = Vec::new();
    for which in 0..10 {
        answers.push(ask(&cluster, &of(which), "")?.0.ids);
    }
    let metric = |worker: &Worker, name: &str| Ok::<f64, anyhow::Error>(worker.metrics()?.sum(name, ""));
    let has_taken = |worker: &Worker| metric(worker, "baton_kv_fetched_tokens_total").is_ok_and(|tokens| tokens > 0.0);
    let (takers, others) = wait(|| {
        let workers = cluster.workers_of(Role::Prefill);
        let (takers, others): (Vec<_>, Vec<_>) = workers.into_iter().partition(has_taken);
        (!takers.is_empty()).then_some((takers, others))
    })?;
    let [taker] = &takers[..] else { anyhow::bail!("{} workers have taken a copy", takers.len()) };
    let tokens = metric(taker, "baton_kv_fetched_tokens_total")?;
    ensure!(tokens == f64::from(MOVES), "{tokens} tokens were taken, and {MOVES} are what many prompts begin with");
    let [holder] = &others[..] else { anyhow::bail!("{} other workers", others.len()) };
    cluster.signal(holder.pid, Signal::KILL)?;
    let (again, _) = ask(&cluster, &of(3), "")?;
    ensure!(again.ids == answers[3], "I1: {:?} instead of {:?}", again.ids, answers[3]);
    let hits = metric(taker, "baton_prefix_hit_tokens_total")?;
    ensure!(hits >= f64::from(MOVES), "{hits} tokens of the copy were used");
    cluster.wait_idle()?;
    cluster.stop()
}
