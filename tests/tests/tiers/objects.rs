//! A folder as an object store: `--kv-object file:///DIRECTORY`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::binary;
use baton_tests::cluster::{Cluster, ClusterOptions, models, wait};
use rustix::process::Signal;

use super::{PROMPTS, all, files, metric, options};

/// Blocks that the prompts leave.
pub const BLOCKS: f64 = 20.0 * PROMPTS as f64;

/// A worker with an object store below its host memory.
pub fn with_objects(model: &Path, url: &str) -> anyhow::Result<ClusterOptions> {
    let mut options = options(model, 200, None)?;
    options.args.extend(["--kv-object", url, "--kv-object-size", "64MiB"].map(str::to_owned));
    Ok(options)
}

fn over(model: &Path, folder: &Path) -> anyhow::Result<Cluster> {
    Cluster::start(with_objects(model, &format!("file://{}", folder.display()))?)
}

/// All answers, once what they leave is uploaded.
pub fn all_uploaded(cluster: &Cluster) -> anyhow::Result<Vec<Vec<u32>>> {
    let (answers, _) = all(cluster)?;
    uploaded(cluster)?;
    Ok(answers)
}

pub fn uploaded(cluster: &Cluster) -> anyhow::Result<()> {
    wait(|| (metric(cluster, "baton_kv_tier_blocks", "tier=\"object\"").ok()? >= BLOCKS).then_some(()))
}

/// The same answers again, all loaded from the object store.
pub fn comes_back(cluster: &Cluster, want: &[Vec<u32>]) -> anyhow::Result<()> {
    // Until it has listed what is there.
    uploaded(cluster)?;
    let (got, cached) = all(cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached.iter().all(|cached| *cached >= 320), "{cached:?} tokens came from the object store");
    let hits = || metric(cluster, "baton_kv_tier_hit_tokens_total", "tier=\"object\"").ok();
    wait(|| (hits()? >= 320.0 * PROMPTS as f64).then_some(()))
}

/// The same answers again, all computed.
fn computed(cluster: &Cluster, want: &[Vec<u32>]) -> anyhow::Result<()> {
    let (got, cached) = all(cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached.iter().all(|cached| *cached == 0), "{cached:?} tokens were not computed");
    Ok(())
}

/// The objects of the one worker.
fn objects(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let found = files(&folder.join("decode-0"))?;
    ensure!(found.len() as f64 >= BLOCKS, "{} objects", found.len());
    Ok(found)
}

#[test]
fn a_restarted_worker_finds_what_was_uploaded() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let cluster = over(model.path(), folder.path())?;
    let want = all_uploaded(&cluster)?;
    let written = metric(&cluster, "baton_kv_tier_written_bytes_total", "tier=\"object\"")?;
    ensure!(written >= BLOCKS * models::block_bytes(model.path())? as f64, "{written} bytes uploaded");
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    cluster.signal(worker.pid, Signal::KILL)?;
    cluster.wait_for_worker(Role::Decode, |again| again.member.id != worker.member.id)?;
    comes_back(&cluster, &want)?;
    let shown = binary::output(&["status", "--kv", "--registry", cluster.registry()])?;
    let row = shown.lines().find(|line| line.contains(" object ")).context("a row of the object store")?;
    ensure!(row.contains(" 63.9 MiB "), "{row}");
    cluster.stop()?;
    let cluster = over(model.path(), folder.path())?;
    comes_back(&cluster, &want)?;
    cluster.stop()?;
    objects(folder.path()).map(drop)
}

/// I2: one byte of each object is flipped. All are found, counted, computed, and uploaded again.
#[test]
fn what_changed_in_an_object_is_computed_again() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let cluster = over(model.path(), folder.path())?;
    let want = all_uploaded(&cluster)?;
    cluster.stop()?;
    let before = objects(folder.path())?;
    for (at, file) in before.iter().enumerate() {
        let mut bytes = std::fs::read(file)?;
        let byte = (977 * at + 50) % bytes.len();
        bytes[byte] ^= 0x10;
        std::fs::write(file, bytes)?;
    }
    let cluster = over(model.path(), folder.path())?;
    uploaded(&cluster)?;
    computed(&cluster, &want)?;
    // The first block of each prompt was read.
    let found = || metric(&cluster, "baton_kv_tier_verify_failures_total", "tier=\"object\"").ok();
    wait(|| (found()? >= PROMPTS as f64).then_some(()))?;
    cluster.stop()
}

/// Reading a pipe hangs, as a file system does whose server is away.
#[test]
fn an_object_store_that_hangs_costs_no_request() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let cluster = over(model.path(), folder.path())?;
    let begun = Instant::now();
    let want = all_uploaded(&cluster)?;
    let alone = begun.elapsed();
    cluster.stop()?;
    let cluster = over(model.path(), folder.path())?;
    uploaded(&cluster)?;
    for file in objects(folder.path())? {
        std::fs::remove_file(&file)?;
        ensure!(Command::new("mkfifo").arg(&file).status()?.success());
    }
    let begun = Instant::now();
    computed(&cluster, &want)?;
    // Each prompt waits for half a second, and then is computed.
    let most = 2 * alone + Duration::from_secs(2 * PROMPTS);
    ensure!(begun.elapsed() < most, "{:?} for {PROMPTS} prompts; {alone:?} without", begun.elapsed());
    let failed = || metric(&cluster, "baton_kv_tier_object_errors_total", "").ok();
    wait(|| (failed()? >= 1.0).then_some(()))?;
    cluster.stop()
}

#[test]
fn an_object_store_that_is_lost_costs_a_recompute() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let cluster = over(model.path(), folder.path())?;
    let want = all_uploaded(&cluster)?;
    cluster.stop()?;
    let cluster = over(model.path(), folder.path())?;
    uploaded(&cluster)?;
    std::fs::remove_dir_all(folder.path().join("decode-0"))?;
    computed(&cluster, &want)?;
    // They are uploaded again.
    uploaded(&cluster)?;
    cluster.stop()?;
    objects(folder.path()).map(drop)
}
