//! KV stores: what a worker computed is not computed again when that worker is gone, with the same answers (I1); a store that is lost costs a
//! recompute and no request.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::binary;
use baton_tests::cluster::client::{Answer, prompt, sampled};
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, models, signal_pid, wait};
use rustix::process::Signal;

/// Prompt tokens, and those of its whole blocks.
const PROMPT: usize = 1610;
const BLOCKS: u32 = 100;

fn request(which: u64) -> v1::GenerateRequest {
    sampled(prompt(PROMPT, which), 12, which)
}

fn ask(cluster: &Cluster, which: u64) -> anyhow::Result<(Vec<u32>, u32)> {
    let client = cluster.client()?;
    said(cluster.block_on(client.ask(request(which)))?)
}

/// The tokens of an answer, and how many of its prompt's were not computed.
fn said(answer: Answer) -> anyhow::Result<(Vec<u32>, u32)> {
    let usage = answer.finish.as_ref().and_then(|f| f.usage).context("usage")?;
    Ok((answer.ids, usage.cached_tokens))
}

/// Waits until the store's pool holds so many blocks, and nothing is on its way.
fn wait_kept(cluster: &Cluster, blocks: u32) -> anyhow::Result<Worker> {
    cluster.wait_for_worker(Role::KvStore, |store| store.blocks().cached >= blocks && store.idle())
}

/// Kills the workers that compute, and waits for those that take their places.
fn lose_workers(cluster: &Cluster) -> anyhow::Result<()> {
    for role in [Role::Prefill, Role::Decode] {
        for old in cluster.workers_of(role) {
            cluster.signal(old.pid, Signal::KILL)?;
            cluster.wait_for_worker(role, |new| new.member.id != old.member.id)?;
        }
    }
    Ok(())
}

/// Waits until the router knows what is in the store's pool, or below it.
fn wait_indexed(cluster: &Cluster, of: &str, blocks: u32) -> anyhow::Result<()> {
    let (name, of) = ("baton_kv_index_blocks", format!("of=\"{of}\""));
    wait(|| cluster.router_metrics().is_ok_and(|m| m.sum(name, &of) >= f64::from(blocks)).then_some(()))
}

fn fetched(cluster: &Cluster) -> anyhow::Result<f64> {
    Ok(cluster.router_metrics()?.sum("baton_kv_fetches_total", "outcome=\"fetched\""))
}

fn with_store(model: &Path) -> ClusterOptions {
    let args = ["--kv-stores", "1", "--kv-store-memory", "64MiB"].map(str::to_owned).to_vec();
    ClusterOptions { args, ..ClusterOptions::new(model) }
}

#[test]
fn what_was_computed_is_not_computed_again_when_its_worker_is_gone() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(with_store(model.path()))?;
    let (want, cached) = ask(&cluster, 1)?;
    ensure!(cached == 0, "{cached} tokens cached of the first prompt");
    let store = wait_kept(&cluster, BLOCKS)?;
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    let (got, cached) = ask(&cluster, 1)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached >= 16 * BLOCKS - 16, "{cached} tokens cached after the workers were killed");
    ensure!(fetched(&cluster)? >= 1.0, "nothing was fetched");
    let (other, cached) = ask(&cluster, 2)?;
    ensure!(cached == 0 && other != want, "{cached} tokens of a prompt that nobody has asked");
    // No prompt is computed in a store, and no answer given.
    let after = cluster.wait_for_worker(Role::KvStore, |now| now.member.id == store.member.id)?;
    ensure!(after.status.steps == 0, "the store has computed {} steps", after.status.steps);
    let status = binary::output(&["status", "--kv", "--registry", cluster.registry()])?;
    ensure!(status.contains("kv-store"), "{status}");
    cluster.wait_idle_workers(3)?;
    cluster.stop()
}

/// I5: a store that stands still, and then dies, costs a bounded time.
#[test]
fn a_store_that_is_lost_costs_a_recompute_and_no_request() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(with_store(model.path()))?;
    let (want, _) = ask(&cluster, 1)?;
    let store = wait_kept(&cluster, BLOCKS)?;
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    cluster.signal(store.pid, Signal::STOP)?;
    let client = cluster.client()?;
    let asked = cluster.spawn(async move { client.ask(request(1)).await });
    // While the prompt waits for its prefix.
    std::thread::sleep(Duration::from_millis(150));
    cluster.signal(store.pid, Signal::KILL)?;
    let (got, cached) = said(cluster.block_on(asked)??)?;
    ensure!(got == want && cached == 0, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    ensure!(fetched(&cluster)? == 0.0, "a store that is gone gave something");
    // The one in its place takes in what is asked from now on.
    cluster.wait_for_worker(Role::KvStore, |new| new.member.id != store.member.id)?;
    let kept = |store: &Worker| store.member.role == Role::KvStore && store.blocks().cached >= BLOCKS;
    wait(|| {
        // The worker that was to fetch from the lost one may have no part in this for half a minute.
        let (again, _) = ask(&cluster, 1).ok()?;
        assert_eq!(again, want, "I1");
        std::thread::sleep(Duration::from_secs(2));
        cluster.workers_of(Role::KvStore).iter().any(kept).then_some(())
    })?;
    cluster.wait_idle_workers(3)?;
    cluster.stop()
}

/// I5: a store is killed after it has given some of a prefix: the rest is not waited for, and what came is not used.
#[test]
fn a_store_that_dies_while_it_is_read_costs_a_bounded_time() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(ClusterOptions { transport: "tcp", ..with_store(model.path()) })?;
    let (mut halves, mut failed) = (0, 0.0);
    for which in 1..=5 {
        let begun = Instant::now();
        let (want, _) = ask(&cluster, which)?;
        let alone = begun.elapsed();
        let store = wait_kept(&cluster, BLOCKS)?;
        lose_workers(&cluster)?;
        wait_indexed(&cluster, "pools", BLOCKS)?;
        let workers = [Role::Prefill, Role::Decode].into_iter().flat_map(|role| cluster.workers_of(role));
        let pools = workers.map(|worker| Pool::of(&worker)).collect::<anyhow::Result<Vec<_>>>()?;
        let written = || pools.iter().map(Pool::written).sum::<anyhow::Result<u64>>();
        let before = written()?;
        let client = cluster.client()?;
        let begun = Instant::now();
        let asked = cluster.spawn(async move { client.ask(request(which)).await });
        // It runs for an instant at a time, until the first of it has come.
        while written()? == before && !asked.is_finished() {
            cluster.signal(store.pid, Signal::CONT)?;
            std::thread::sleep(Duration::from_micros(200));
            cluster.signal(store.pid, Signal::STOP)?;
        }
        cluster.signal(store.pid, Signal::KILL)?;
        let (got, cached) = said(cluster.block_on(asked)??)?;
        let took = begun.elapsed();
        ensure!(got == want, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
        // Computing it, and a bound.
        ensure!(took < 2 * alone + Duration::from_secs(2), "{took:?}; computing takes {alone:?}");
        let now = cluster.router_metrics()?.sum("baton_kv_fetches_total", "outcome=\"failed\"");
        // Unless all of it had come.
        ensure!(cached == 0 || fetched(&cluster)? > 0.0, "half a prefix was taken for a whole one");
        halves += usize::from(cached == 0 && now > failed);
        failed = now;
        cluster.wait_for_worker(Role::KvStore, |new| new.member.id != store.member.id)?;
        cluster.wait_idle_workers(3)?;
        if halves == 2 {
            break;
        }
    }
    ensure!(halves > 0, "no store was killed in the middle of a read");
    cluster.stop()
}

/// I2: a byte that has changed in a store's pool is found by the store, before anybody uses it. It is counted, its prompt is computed, and the store takes
/// it in anew.
#[test]
fn what_changes_in_the_memory_of_a_store_is_computed_again() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(with_store(model.path()))?;
    let (want, _) = ask(&cluster, 1)?;
    let store = wait_kept(&cluster, BLOCKS)?;
    let pool = Pool::of(&store)?;
    pool.flip(pool.used()?)?;
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    let (got, cached) = ask(&cluster, 1)?;
    ensure!(got == want && cached == 0, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    let found = store.metrics()?.sum("baton_kv_tier_verify_failures_total", "tier=\"pool\"");
    ensure!(found == 1.0, "{found} changed blocks were found");
    ensure!(fetched(&cluster)? == 0.0, "it was taken");
    let whole = |store: &Worker| store.blocks().cached >= BLOCKS && store.idle();
    cluster.wait_for_worker(Role::KvStore, whole).context("it is not taken in again")?;
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    let (got, cached) = ask(&cluster, 1)?;
    ensure!(got == want && cached >= 16 * BLOCKS - 16, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    cluster.wait_idle_workers(3)?;
    cluster.stop()
}

/// A store process of its own, beside a cluster.
struct Store(Child);

impl Store {
    fn start(cluster: &Cluster, model: &Path, more: &[&str]) -> anyhow::Result<Store> {
        let mut command = binary::command()?;
        command.args(["kv-store", "--registry", cluster.registry(), "--insecure-internal", "--admin", "127.0.0.1:0"]);
        command.arg("--model").arg(model).args(more).stdout(Stdio::null()).stderr(Stdio::null());
        baton_runtime::die_with_parent(&mut command);
        Ok(Store(command.spawn()?))
    }

    /// Has it drain, and end.
    fn end(mut self) -> anyhow::Result<()> {
        signal_pid(self.0.id(), Signal::TERM)?;
        let status = wait(|| self.0.try_wait().transpose())??;
        ensure!(status.success(), "the store ended with {status}");
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may have ended, which is as well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a store has on disk outlives it: the next one gives it to workers that never saw it.
#[test]
fn a_store_finds_on_its_disk_what_the_one_before_took() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let args = ["--insecure-internal", "--log", "info,baton_router=debug"].map(str::to_owned).to_vec();
    let cluster = Cluster::start(ClusterOptions { args, ..ClusterOptions::new(model.path()) })?;
    let disk = folder.path().display().to_string();
    let tiers = ["--kv-memory", "64MiB", "--kv-host", "64MiB", "--kv-disk", &disk, "--kv-disk-size", "64MiB"];
    let member = |store: &Cluster| store.members().into_iter().find(|member| member.role == Role::KvStore);
    let store = Store::start(&cluster, model.path(), &tiers)?;
    cluster.wait_for_members(|members| members.iter().any(|member| member.role == Role::KvStore))?;
    let (want, _) = ask(&cluster, 1)?;
    wait(|| {
        let status = cluster.block_on(baton_tests::cluster::status(&member(&cluster)?)).ok()?;
        status.tiers.iter().any(|tier| tier.tier == "host" && tier.blocks >= BLOCKS.into()).then_some(())
    })?;
    store.end()?;
    cluster.wait_for_members(|members| !members.iter().any(|member| member.role == Role::KvStore))?;
    let store = Store::start(&cluster, model.path(), &tiers)?;
    cluster.wait_for_members(|members| members.iter().any(|member| member.role == Role::KvStore))?;
    // Its first load may be given up, on a machine that is busy: nothing is known yet of how long it takes.
    let mut cached = 0;
    for _ in 0..3 {
        lose_workers(&cluster)?;
        wait_indexed(&cluster, "stores", BLOCKS)?;
        // Routers are told every second how long a token takes to load there.
        std::thread::sleep(Duration::from_secs(2));
        let (got, came) = ask(&cluster, 1)?;
        ensure!(got == want, "I1: {got:?} instead of {want:?}");
        cached = came;
        if cached > 0 {
            break;
        }
    }
    let failed = cluster.router_metrics()?.sum("baton_kv_fetches_total", "outcome=\"failed\"");
    ensure!(cached >= 16 * BLOCKS - 16, "{cached} tokens cached, {failed} fetches failed\n{}", cluster.log());
    store.end()?;
    cluster.wait_idle_workers(2)?;
    cluster.stop()
}

/// Names follow from a secret: router, workers and store find each other's KV by it, and a store with another one takes nothing.
#[test]
fn those_with_one_secret_find_each_others_kv_and_others_do_not() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let secret = |name: &str| -> anyhow::Result<String> {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("the secret of {name}"))?;
        Ok(path.display().to_string())
    };
    let (ours, others) = (secret("our cluster")?, secret("another cluster")?);
    let args = ["--insecure-internal", "--kv-secret-file", &ours].map(str::to_owned).to_vec();
    let cluster = Cluster::start(ClusterOptions { args, ..ClusterOptions::new(model.path()) })?;
    let start = |file: &str| {
        let store = Store::start(&cluster, model.path(), &["--kv-memory", "64MiB", "--kv-secret-file", file])?;
        cluster.wait_for_members(|members| members.iter().any(|member| member.role == Role::KvStore))?;
        anyhow::Ok(store)
    };
    let kept = || {
        let store = cluster.members().into_iter().find(|member| member.role == Role::KvStore)?;
        Some(cluster.block_on(baton_tests::cluster::status(&store)).ok()?.blocks?.cached)
    };
    let store = start(&others)?;
    ask(&cluster, 1)?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(kept() == Some(0), "{:?} blocks under another secret", kept());
    store.end()?;
    cluster.wait_for_members(|members| !members.iter().any(|member| member.role == Role::KvStore))?;
    let store = start(&ours)?;
    let (want, _) = ask(&cluster, 2)?;
    wait(|| (kept()? >= BLOCKS).then_some(()))?;
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    let (got, cached) = ask(&cluster, 2)?;
    ensure!(got == want && cached >= 16 * BLOCKS - 16, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    store.end()?;
    cluster.wait_idle_workers(2)?;
    cluster.stop()
}

/// A cluster without stores gets two, loses one by `baton drain`, and then the other; what they held is computed again.
#[test]
fn stores_come_and_go_while_the_cluster_serves() -> anyhow::Result<()> {
    let model = models::slow()?;
    let args = ["--kv-store-memory", "64MiB"].map(str::to_owned).to_vec();
    let cluster = Cluster::start(ClusterOptions { args, ..ClusterOptions::new(model.path()) })?;
    let url = cluster.registry().to_owned();
    let scale = |stores: usize| {
        let said = binary::output(&["scale", "--kv-store", &stores.to_string(), "--wait", "--registry", &url])?;
        let there = if stores == 0 { String::new() } else { format!(", and {stores} of {stores} KV stores") };
        let wanted = format!("1 of 1 prefill and 1 of 1 decode workers serve{there}");
        ensure!(said.lines().last() == Some(&*wanted), "{said}");
        ensure!(cluster.pids("kv-store").len() == stores, "{:?}", cluster.pids("kv-store"));
        anyhow::Ok(said)
    };
    let said = scale(2)?;
    ensure!(said.starts_with("kv-store: 0 -> 2 workers"), "{said}");
    let (want, _) = ask(&cluster, 1)?;
    let holds = wait_kept(&cluster, BLOCKS)?;
    // The one that holds nothing goes.
    let other = cluster.workers_of(Role::KvStore).into_iter().find(|store| store.member.id != holds.member.id);
    let other = other.context("another store")?;
    binary::output(&["drain", &other.member.id.to_string(), "--wait", "--registry", &url])?;
    ensure!(cluster.pids("kv-store") == [holds.pid], "{:?} instead of {}", cluster.pids("kv-store"), holds.pid);
    lose_workers(&cluster)?;
    wait_indexed(&cluster, "pools", BLOCKS)?;
    let (got, cached) = ask(&cluster, 1)?;
    ensure!(got == want && cached >= 16 * BLOCKS - 16, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    scale(0)?;
    lose_workers(&cluster)?;
    let (got, cached) = ask(&cluster, 1)?;
    ensure!(got == want && cached == 0, "I1: {got:?} instead of {want:?}, {cached} tokens cached of no store");
    let said = binary::run(&["scale", "--kv-store", "65", "--registry", &url])?;
    ensure!(said.code == Some(1) && said.err.contains("kv_store is above 64"), "{said:?}");
    cluster.wait_idle_workers(2)?;
    cluster.stop()
}

/// I8.
#[test]
fn bad_settings_of_a_store_are_refused_by_name() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let path = model.path().display().to_string();
    for (flags, wrong) in [
        (&["--computed-by", "gpu"][..], "computed_by is gpu; it must be cpu, or the backend of workers"),
        (&["--kv-memory", "1KiB"][..], "kv_memory is 1KiB; it must be at least"),
        (&["--kv-disk", "/tmp/none"][..], "kv_host is 0B; it must be at least"),
        (&["--block-size", "20"][..], "block_size is 20; it must be a multiple of 16"),
        (&["--quantization", "fp8"][..], "quantization is fp8; it must be none"),
        (&["--registry-ttl", "1ms"][..], "registry_ttl is 1ms; it must be at least 1s"),
    ] {
        let args = [&["kv-store", "--model", &path, "--admin", "127.0.0.1:0"][..], flags].concat();
        let said = binary::run(&args)?;
        ensure!(said.code == Some(1) && said.err.contains(wrong), "{flags:?}: {said:?}");
    }
    let said = binary::run(&["kv-store", "--threads", "4"])?;
    ensure!(said.code == Some(2) && said.err.contains("--threads"), "it computes nothing: {said:?}");
    Ok(())
}
