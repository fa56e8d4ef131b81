//! KV below the pool: what a pool has no room for comes back from host memory, from disk and from an object store, also after a restart, with the
//! same answers (I1); what is damaged is computed again (I2).
#![allow(clippy::unwrap_used)]

mod disks;
mod objects;
mod s3;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::cluster::client::{prompt, sampled};
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::{Cluster, ClusterOptions, http, models, processes, wait};
use baton_tests::tiny;
use rustix::process::Signal;

/// Prompt tokens: 20 blocks and some.
const PROMPT: usize = 330;
/// Prompts of which a pool holds two.
const PROMPTS: u64 = 6;
/// Blocks of a pool.
const POOL: u64 = 50;

/// A worker without peers, with a small pool, and host memory for so many blocks; with a disk if there is a folder.
fn options(model: &Path, host: u64, disk: Option<&Path>) -> anyhow::Result<ClusterOptions> {
    options_with(POOL, model, host, disk)
}

/// The same, with a pool of so many blocks.
fn options_with(pool: u64, model: &Path, host: u64, disk: Option<&Path>) -> anyhow::Result<ClusterOptions> {
    let block = models::block_bytes(model)?;
    let bytes = |blocks: u64| format!("{}B", blocks * block);
    // A slot is a little larger than its block.
    let mut args = vec!["--kv-memory".to_owned(), bytes(pool), "--kv-host".to_owned(), bytes(host * 3)];
    if let Some(folder) = disk {
        args.extend(["--kv-disk".to_owned(), folder.display().to_string()]);
        args.extend(["--kv-disk-size".to_owned(), "64MiB".to_owned()]);
    }
    Ok(ClusterOptions { aggregated: true, args, ..ClusterOptions::new(model) })
}

/// The answer to a prompt, and how many of its tokens were cached or loaded.
fn ask(cluster: &Cluster, which: u64) -> anyhow::Result<(Vec<u32>, u32)> {
    let client = cluster.client()?;
    let request: v1::GenerateRequest = sampled(prompt(PROMPT, which), 6, which);
    let answer = cluster.block_on(client.ask(request))?;
    let usage = answer.finish.as_ref().and_then(|f| f.usage).context("usage")?;
    Ok((answer.ids, usage.cached_tokens))
}

fn all(cluster: &Cluster) -> anyhow::Result<(Vec<Vec<u32>>, Vec<u32>)> {
    let mut answers = Vec::new();
    for which in 0..PROMPTS {
        answers.push(ask(cluster, which)?);
        // Until what it leaves is saved.
        cluster.wait_idle()?;
    }
    Ok(answers.into_iter().unzip())
}

/// All answers, once what they leave is on disk.
fn all_on_disk(cluster: &Cluster) -> anyhow::Result<Vec<Vec<u32>>> {
    let (answers, _) = all(cluster)?;
    let blocks = 20.0 * PROMPTS as f64;
    wait(|| (metric(cluster, "baton_kv_tier_blocks", "tier=\"disk\"").ok()? >= blocks).then_some(()))?;
    Ok(answers)
}

fn metric(cluster: &Cluster, name: &str, labels: &str) -> anyhow::Result<f64> {
    Ok(cluster.wait_for_worker(Role::Decode, |_| true)?.metrics()?.sum(name, labels))
}

#[test]
fn what_the_pool_has_no_room_for_comes_back_from_host_memory() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(options(model.path(), 200, None)?)?;
    let (want, first) = all(&cluster)?;
    ensure!(first.iter().all(|cached| *cached == 0), "{first:?}");
    let computed = metric(&cluster, "baton_prefill_tokens_total", "")?;
    let (got, second) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(second.iter().all(|cached| *cached >= 320), "{second:?} tokens need not be computed");
    let again = metric(&cluster, "baton_prefill_tokens_total", "")? - computed;
    ensure!(again < 20.0 * PROMPTS as f64, "{again} tokens were computed again");
    let loaded = metric(&cluster, "baton_kv_loaded_tokens_total", "")?;
    ensure!(loaded >= 320.0 * (PROMPTS - 2) as f64, "{loaded} tokens loaded");
    wait(|| (metric(&cluster, "baton_kv_tier_hit_tokens_total", "tier=\"host\"").ok()? >= loaded).then_some(()))?;
    let loads = metric(&cluster, "baton_kv_tier_load_seconds_count", "tier=\"host\"")?;
    let seconds = metric(&cluster, "baton_kv_tier_load_seconds_sum", "tier=\"host\"")?;
    ensure!(loads >= (PROMPTS - 2) as f64 && seconds > 0.0, "{loads} loads took {seconds} s");
    cluster.stop()
}

/// The pool has room for two of them: the others are loaded when it has.
#[test]
fn prompts_that_come_together_are_loaded() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    for disk in [None, Some(folder.path())] {
        let cluster = Cluster::start(options(model.path(), 200, disk)?)?;
        let want = if disk.is_some() { all_on_disk(&cluster)? } else { all(&cluster)?.0 };
        if disk.is_some() {
            let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
            cluster.signal(worker.pid, Signal::KILL)?;
            cluster.wait_for_worker(Role::Decode, |again| again.member.id != worker.member.id)?;
        }
        let client = cluster.client()?;
        let ask = |which: u64| {
            let client = client.clone();
            cluster.spawn(async move { client.ask(sampled(prompt(PROMPT, which), 6, which)).await })
        };
        let asked: Vec<_> = (0..PROMPTS).map(ask).collect();
        let (mut got, mut cached) = (Vec::new(), Vec::new());
        for answer in asked {
            let answer = cluster.block_on(answer)??;
            cached.push(answer.finish.as_ref().and_then(|f| f.usage).context("usage")?.cached_tokens);
            got.push(answer.ids);
        }
        ensure!(got == want, "I1: {got:?} instead of {want:?}");
        // On a busy machine a load may be given up.
        let loaded = cached.iter().filter(|tokens| **tokens >= 320).count();
        ensure!(loaded as u64 >= PROMPTS - 1, "{cached:?} tokens need not be computed");
        cluster.stop()?;
    }
    Ok(())
}

/// A prompt that is kept comes back after as much else as neither pool nor host memory has room for, another one does not.
#[test]
fn what_is_asked_to_be_kept_stays_in_host_memory() -> anyhow::Result<()> {
    let model = models::slow()?;
    let mut options = options(model.path(), 40, None)?;
    options.env.push(("BATON_EVICTION".to_owned(), "priority".to_owned()));
    let cluster = Cluster::start(options)?;
    let client = cluster.client()?;
    let ask = |tokens: usize, which: u64, cache_keep_seconds| -> anyhow::Result<u32> {
        let request = v1::GenerateRequest { cache_keep_seconds, ..sampled(prompt(tokens, which), 6, which) };
        let answer = cluster.block_on(client.ask(request))?;
        // Until what it leaves is saved.
        cluster.wait_idle()?;
        Ok(answer.finish.as_ref().and_then(|f| f.usage).context("usage")?.cached_tokens)
    };
    ask(PROMPT, 1, 600)?;
    ask(PROMPT, 2, 0)?;
    // Each takes nearly the whole pool, also the blocks that are kept there.
    (10..20).try_for_each(|which| ask(700, which, 0).map(drop))?;
    let (kept, other) = (ask(PROMPT, 1, 0)?, ask(PROMPT, 2, 0)?);
    ensure!(kept >= 320 && other < 64, "{kept} tokens of what was kept, {other} of the other");
    let loaded = metric(&cluster, "baton_kv_loaded_tokens_total", "")?;
    ensure!(loaded >= 128.0, "{loaded} tokens loaded: the pool had them");
    cluster.stop()
}

/// Two answers at once.
fn both(cluster: &Cluster) -> anyhow::Result<Vec<Vec<u32>>> {
    let client = cluster.client()?;
    let asked = [0, 1].map(|which| {
        let client = client.clone();
        cluster.spawn(async move { client.ask(sampled(prompt(PROMPT, which), 300, which)).await })
    });
    asked.into_iter().map(|answer| Ok(cluster.block_on(answer)??.ids)).collect()
}

/// A pool has no room for both answers: one is preempted, and goes on with the KV that was kept of it.
#[test]
fn what_a_preempted_answer_had_comes_back() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(options(model.path(), 200, None)?)?;
    let got = both(&cluster)?;
    ensure!(metric(&cluster, "baton_preemptions_total", "")? >= 1.0, "there was room for both");
    let loaded = metric(&cluster, "baton_kv_loaded_tokens_total", "")?;
    ensure!(loaded >= 128.0, "{loaded} tokens loaded");
    cluster.stop()?;
    let roomy = Cluster::start(options_with(2 * POOL, model.path(), 200, None)?)?;
    let want = both(&roomy)?;
    ensure!(metric(&roomy, "baton_preemptions_total", "")? == 0.0, "there is room for both");
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    roomy.stop()
}

/// Prompts that are asked again and again: their KV is loaded before it is asked for.
#[test]
fn what_is_likely_to_be_asked_soon_is_loaded_ahead_of_need() -> anyhow::Result<()> {
    let model = models::slow()?;
    let mut options = options(model.path(), 200, None)?;
    options.env.push(("BATON_RECALL_TURNS".to_owned(), "true".to_owned()));
    let cluster = Cluster::start(options)?;
    let (want, _) = all(&cluster)?;
    for _ in 0..2 {
        ensure!(all(&cluster)?.0 == want, "I1");
    }
    let loaded = || metric(&cluster, "baton_kv_loaded_tokens_total", "");
    let before = loaded()?;
    // Nobody asks now.
    wait(|| (loaded().ok()? >= before + 320.0).then_some(()))?;
    ensure!(all(&cluster)?.0 == want, "I1");
    cluster.wait_idle()?;
    cluster.stop()
}

/// Neither by an answer nor by its time can a client find out what another tenant's prompts are: nothing of theirs is looked up, loaded or counted.
#[test]
fn what_another_tenant_stored_is_computed() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let cluster = Cluster::start(options(model.path(), 200, Some(folder.path()))?)?;
    let want = all_on_disk(&cluster)?;
    let counted = || -> anyhow::Result<[f64; 3]> {
        let hits = metric(&cluster, "baton_kv_tier_hit_tokens_total", "")?;
        let (loaded, computed) = (
            metric(&cluster, "baton_kv_loaded_tokens_total", "")?,
            metric(&cluster, "baton_prefill_tokens_total", "")?,
        );
        Ok([hits, loaded, computed])
    };
    let before = counted()?;
    let client = cluster.client()?;
    for which in 0..PROMPTS {
        let request =
            v1::GenerateRequest { cache_salt: "another".to_owned(), ..sampled(prompt(PROMPT, which), 6, which) };
        let answer = cluster.block_on(client.ask(request))?;
        let usage = answer.finish.as_ref().and_then(|f| f.usage).context("usage")?;
        ensure!((answer.ids == want[which as usize], usage.cached_tokens) == (true, 0), "I1: {answer:?}");
        cluster.wait_idle()?;
    }
    // Longer than between two updates of the metrics.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let [hits, loaded, computed] = counted()?;
    ensure!([hits, loaded] == before[..2], "{hits} tokens found and {loaded} loaded, {before:?} before");
    ensure!(computed - before[2] == (PROMPT as u64 * PROMPTS) as f64, "{} tokens computed", computed - before[2]);
    cluster.stop()
}

/// Prompts that were asked twice are on disk. A worker that is killed at once finds them there when it is back, and so does the next cluster.
#[test]
fn a_restarted_worker_finds_what_was_on_disk() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let start = || Cluster::start(options(model.path(), 200, Some(folder.path()))?);
    let cluster = start()?;
    let want = all_on_disk(&cluster)?;
    let comes_back = |cluster: &Cluster| {
        let (got, cached) = all(cluster)?;
        ensure!(got == want, "I1: {got:?} instead of {want:?}");
        ensure!(cached.iter().all(|cached| *cached >= 320), "{cached:?} tokens came from disk");
        // Counted a little later.
        let hits = || metric(cluster, "baton_kv_tier_hit_tokens_total", "tier=\"disk\"").ok();
        wait(|| (hits()? >= 320.0 * PROMPTS as f64).then_some(()))
    };
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    cluster.signal(worker.pid, Signal::KILL)?;
    cluster.wait_for_worker(Role::Decode, |again| again.member.id != worker.member.id)?;
    comes_back(&cluster)?;
    cluster.stop()?;
    let cluster = start()?;
    comes_back(&cluster)?;
    cluster.stop()?;
    // Without the secret that it was named by, nothing is found.
    let secret = folder.path().join("secret");
    ensure!(std::fs::metadata(&secret)?.permissions().mode() & 0o777 == 0o600, "others may read the secret");
    std::fs::write(&secret, "another secret of this cluster")?;
    let cluster = start()?;
    let (got, cached) = all(&cluster)?;
    ensure!(got == want && cached.iter().all(|cached| *cached == 0), "{got:?} instead of {want:?}, cached: {cached:?}");
    cluster.stop()
}

/// Each worker says what its disk holds. So a prompt goes to the one that has it, though all of them and the router are new.
#[test]
fn a_restarted_cluster_asks_the_worker_that_has_a_prompt_on_disk() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let start = || {
        let one = options(model.path(), 200, Some(folder.path()))?;
        Cluster::start(ClusterOptions { decode: 3, ..one })
    };
    let cluster = start()?;
    // All at once, so that they are spread.
    let client = cluster.client()?;
    let asked: Vec<_> = (0..PROMPTS)
        .map(|which| {
            let (client, request) = (client.clone(), sampled(prompt(PROMPT, which), 6, which));
            cluster.spawn(async move { client.ask(request).await })
        })
        .collect();
    let mut want = Vec::new();
    for answer in asked {
        want.push(cluster.block_on(answer)??.ids);
    }
    let on_disk = |cluster: &Cluster| -> anyhow::Result<Vec<f64>> {
        let workers = cluster.workers_of(Role::Decode);
        workers.iter().map(|worker| Ok(worker.metrics()?.sum("baton_kv_tier_blocks", "tier=\"disk\""))).collect()
    };
    let blocks = 20.0 * PROMPTS as f64;
    let held = wait(|| on_disk(&cluster).ok().filter(|held| held.iter().sum::<f64>() >= blocks))?;
    ensure!(held.iter().filter(|held| **held > 0.0).count() > 1, "{held:?}: the prompts are spread");
    cluster.stop()?;
    let cluster = start()?;
    let known = || cluster.router_metrics().is_ok_and(|m| m.sum("baton_kv_index_blocks", "of=\"stores\"") >= blocks);
    wait(|| known().then_some(()))?;
    let (got, cached) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached.iter().all(|cached| *cached >= 320), "{cached:?} tokens came from disk");
    let placed = cluster.router_metrics()?.sum("baton_placements_total", "kv=\"stored\"");
    // Once a disk was slow, computing may be predicted to be as soon.
    ensure!(placed >= 1.0, "{placed} prompts were placed by what stores hold");
    cluster.stop()
}

/// I2: a block that is not as it was stored is found, counted and computed.
#[test]
fn what_is_damaged_on_disk_is_computed_again() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let start = || Cluster::start(options(model.path(), 200, Some(folder.path()))?);
    let cluster = start()?;
    let want = all_on_disk(&cluster)?;
    cluster.stop()?;
    // Every 5,000th byte: some of each block.
    let mut flipped = 0;
    for file in files(folder.path())? {
        let mut bytes = std::fs::read(&file)?;
        for byte in bytes.iter_mut().skip(4500).step_by(5000) {
            *byte ^= 0x10;
            flipped += 1;
        }
        std::fs::write(&file, bytes)?;
    }
    ensure!(flipped > 1000, "{flipped} bytes changed");
    let cluster = start()?;
    let (got, cached) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached.iter().all(|cached| *cached == 0), "{cached:?}");
    // What has a damaged head is found when the disk is opened, the rest when it is read: each prompt's first block at least.
    let found = || metric(&cluster, "baton_kv_tier_verify_failures_total", "").ok();
    wait(|| (found()? >= PROMPTS as f64).then_some(()))?;
    cluster.stop()
}

/// The same in host memory.
#[test]
fn what_is_damaged_in_host_memory_is_computed_again() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(options(model.path(), 200, None)?)?;
    let (first, _) = ask(&cluster, 0)?;
    cluster.wait_idle()?;
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    // Some of its KV, to find it again.
    let pool = Pool::of(&worker)?;
    let some = pool.bytes()?[pool.used()?..][..64].to_vec();
    let (want, _) = all(&cluster)?;
    ensure!(want[0] == first, "I1: {:?} instead of {first:?}", want[0]);
    let flipped = processes::flip_private(worker.pid, &some)?;
    ensure!(flipped >= 1, "no block of the prompt is in host memory");
    let (got, cached) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached[0] < 320 && cached[1..].iter().all(|cached| *cached >= 320), "{cached:?}");
    let found = || metric(&cluster, "baton_kv_tier_verify_failures_total", "tier=\"host\"").ok();
    wait(|| (found()? == 1.0).then_some(()))?;
    cluster.stop()
}

/// Several answers to one prompt share what is loaded.
#[test]
fn several_answers_share_a_prefix_that_is_loaded() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(options(model.path(), 200, None)?)?;
    let ask = |which: u64| -> anyhow::Result<(Vec<String>, u64)> {
        let ids: Vec<String> = prompt(PROMPT, which).iter().map(u32::to_string).collect();
        let body = format!(
            "{{\"model\": \"\", \"prompt\": [{}], \"n\": 3, \"max_tokens\": 6, \"seed\": 1, \"temperature\": 0.9, \"ignore_eos\": true}}",
            ids.join(", ")
        );
        let (status, said) = http::post(cluster.http(), "/v1/completions", &body)?;
        ensure!(status == 200, "{status}: {said}");
        let said: serde_json::Value = serde_json::from_str(&said)?;
        let texts = said["choices"].as_array().context("choices")?.iter().map(|choice| choice["text"].to_string());
        let cached = said["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        cluster.wait_idle()?;
        Ok((texts.collect(), cached))
    };
    let (want, cached) = ask(50)?;
    ensure!(want.len() == 3 && want[0] != want[1] && cached == 0, "{want:?}, {cached} tokens cached");
    all(&cluster)?;
    let loaded = metric(&cluster, "baton_kv_loaded_tokens_total", "")?;
    let (got, cached) = ask(50)?;
    ensure!(got == want && cached >= 320, "I1: {got:?} instead of {want:?}, {cached} tokens cached");
    let once = metric(&cluster, "baton_kv_loaded_tokens_total", "")? - loaded;
    ensure!((320.0..=336.0).contains(&once), "{once} tokens loaded for three answers");
    cluster.stop()
}

fn files(folder: &Path) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

/// Layers with a window keep only what the next token sees: a conversation whose turns go on after they left the pool is loaded as far as each layer
/// group has what is needed, and answered as if all were computed.
#[test]
fn a_model_with_windows_goes_on_from_what_was_saved() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let config =
        tiny::configs()?.into_iter().find(|config| config.name.starts_with("gemma3")).context("a tiny model")?;
    config.write(folder.path())?;
    let talk = |cluster: &Cluster| -> anyhow::Result<Vec<Vec<u32>>> {
        let (client, mut answers) = (cluster.client()?, Vec::new());
        for turn in 1..=5 {
            for which in 0..4u64 {
                // Each turn has all tokens of the one before.
                let tokens = prompt(60 * turn, which);
                answers.push(cluster.block_on(client.ask(sampled(tokens, 6, which)))?.ids);
                cluster.wait_idle()?;
            }
        }
        Ok(answers)
    };
    // With a pool for one conversation, and for all.
    let small = options_with(40, folder.path(), 400, None)?;
    let large = ClusterOptions { aggregated: true, ..ClusterOptions::new(folder.path()) };
    let cluster = Cluster::start(large)?;
    let want = talk(&cluster)?;
    cluster.stop()?;
    let cluster = Cluster::start(small)?;
    let got = talk(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    let loaded = metric(&cluster, "baton_kv_loaded_tokens_total", "")?;
    ensure!(loaded > 0.0, "nothing was loaded");
    cluster.wait_idle()?;
    cluster.stop()
}

/// Split, too: a prompt that comes again is loaded by the prefill worker, or by the decode worker before its handoff.
#[test]
fn both_roles_have_tiers() -> anyhow::Result<()> {
    let model = models::slow()?;
    let options = options(model.path(), 400, None)?;
    let cluster = Cluster::start(ClusterOptions { aggregated: false, ..options })?;
    let (want, _) = all(&cluster)?;
    let (got, _) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    for role in [Role::Prefill, Role::Decode] {
        let worker = cluster.wait_for_worker(role, |_| true)?;
        let blocks = worker.metrics()?.sum("baton_kv_tier_blocks", "tier=\"host\"");
        ensure!(blocks >= 20.0 * PROMPTS as f64, "{role:?} has saved {blocks} blocks");
    }
    let workers = cluster.workers();
    let loaded: anyhow::Result<f64> =
        workers.iter().map(|worker| Ok(worker.metrics()?.sum("baton_kv_loaded_tokens_total", ""))).sum();
    ensure!(loaded? >= 320.0 * (PROMPTS - 2) as f64);
    cluster.wait_idle()?;
    cluster.stop()
}

#[test]
fn settings_that_cannot_work_are_refused() -> anyhow::Result<()> {
    let model = models::tiny()?;
    for (args, field) in [
        (vec!["--kv-disk", "/tmp/x"], "kv_host"),
        (vec!["--kv-host", "100B"], "kv_host"),
        (vec!["--kv-host", "1MiB", "--kv-min-uses", "0"], "kv_min_uses is 0; it must be 1 to 255"),
        (vec!["--kv-object", "file:///tmp/x"], "kv_host"),
        (vec!["--kv-host", "1MiB", "--kv-object", "gs://x"], "give s3://BUCKET/PREFIX or file:///DIRECTORY"),
        (vec!["--kv-host", "1MiB", "--kv-object", "file:///proc/nowhere"], "/proc/nowhere"),
        (vec!["--kv-host", "1MiB", "--kv-object", "s3://b/p", "--kv-object-size", "1B"], "object size is 1"),
    ] {
        let all = ["decode", "--model", &model.path().display().to_string(), "--registry", "http://127.0.0.1:1"];
        let refused = baton_tests::binary::output(&[&all[..], &args].concat()).unwrap_err().to_string();
        ensure!(refused.contains(field), "{args:?}: {refused}");
    }
    Ok(())
}
