//! Disks that fail, or are slow, under a worker that runs: the kernel's answers to its reads and writes are changed (`strace --inject`).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::cluster::fault::{self, Fault};
use baton_tests::cluster::{Cluster, models, wait};

use super::{PROMPTS, all, ask, files, metric, options};

/// Has some system calls of the decode worker on the files of its disk answered otherwise.
fn fails(cluster: &Cluster, folder: &Path, calls: &str, what: &str) -> anyhow::Result<Fault> {
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    Fault::begins(worker.pid, &files(folder)?, calls, what)
}

fn on_disk(cluster: &Cluster) -> anyhow::Result<f64> {
    metric(cluster, "baton_kv_tier_blocks", "tier=\"disk\"")
}

/// A worker that is started while its disk is not there serves without it.
#[test]
fn a_disk_that_cannot_be_opened_costs_that_tier_only() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    // The worker's folder cannot be made, by root neither.
    std::fs::write(folder.path().join("decode-0"), "a file")?;
    let cluster = Cluster::start(options(model.path(), 200, Some(folder.path()))?)?;
    let (want, _) = all(&cluster)?;
    let (got, cached) = all(&cluster)?;
    ensure!(
        got == want && cached.iter().all(|tokens| *tokens >= 320),
        "{got:?} instead of {want:?}, cached {cached:?}"
    );
    ensure!(cluster.log().contains("the KV store cannot use its disk"), "{}", cluster.log());
    cluster.stop()
}

/// A disk without room, one that was made read-only, and one that may not be written to any more cost no request; what follows is written again.
#[test]
fn a_disk_that_takes_no_writes_costs_no_request() -> anyhow::Result<()> {
    if !fault::there() {
        return Ok(());
    }
    let model = models::slow()?;
    let mut want = Vec::new();
    for error in ["ENOSPC", "EROFS", "EACCES"] {
        let folder = tempfile::tempdir()?;
        let cluster = Cluster::start(options(model.path(), 200, Some(folder.path()))?)?;
        let fault = fails(&cluster, folder.path(), "pwrite64,fallocate", &format!("error={error}"))?;
        let (first, _) = all(&cluster)?;
        let (again, cached) = all(&cluster)?;
        ensure!(again == first, "I1, {error}");
        ensure!(cached.iter().all(|cached| *cached >= 320), "{error}: host memory goes on: {cached:?}");
        let errors = || metric(&cluster, "baton_kv_tier_disk_errors_total", "").ok();
        wait(|| (errors()? >= 1.0).then_some(()))?;
        ensure!(on_disk(&cluster)? == 0.0, "{error}");
        drop(fault);
        wait(|| (on_disk(&cluster).ok()? >= 20.0 * PROMPTS as f64).then_some(())).context(error)?;
        cluster.stop()?;
        want.push(first);
    }
    ensure!(want.windows(2).all(|two| two[0] == two[1]), "I1");
    Ok(())
}

/// What a disk that does not answer may add to the time that computing a prompt takes.
const BOUND: Duration = Duration::from_secs(2);

/// As [`all`], and how long the slowest answer took.
fn all_timed(cluster: &Cluster) -> anyhow::Result<(Vec<Vec<u32>>, Vec<u32>, Duration)> {
    let (mut answers, mut slowest) = (Vec::new(), Duration::ZERO);
    for which in 0..PROMPTS {
        let begun = Instant::now();
        answers.push(ask(cluster, which)?);
        slowest = slowest.max(begun.elapsed());
        cluster.wait_idle()?;
    }
    let (answers, cached) = answers.into_iter().unzip();
    Ok((answers, cached, slowest))
}

/// What cannot be read, and what comes too late, is computed, and costs no more than that and the time that a load may take.
#[test]
fn a_disk_that_fails_or_is_slow_costs_a_bounded_time() -> anyhow::Result<()> {
    if !fault::there() {
        return Ok(());
    }
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let start = || Cluster::start(options(model.path(), 200, Some(folder.path()))?);
    let cluster = start()?;
    let (want, cached, alone) = all_timed(&cluster)?;
    ensure!(cached.iter().all(|cached| *cached == 0), "{cached:?}");
    wait(|| (on_disk(&cluster).ok()? >= 20.0 * PROMPTS as f64).then_some(()))?;
    cluster.stop()?;
    // A read takes a tenth of a second, or for ever.
    for what in ["error=EIO", "error=EACCES", "delay_enter=100000", "delay_enter=5000000"] {
        let cluster = start()?;
        wait(|| (on_disk(&cluster).ok()? >= 20.0 * PROMPTS as f64).then_some(()))?;
        let fault = fails(&cluster, folder.path(), "pread64", what)?;
        let (got, cached, slowest) = all_timed(&cluster)?;
        println!("{what}: at most {slowest:?}, where computing takes at most {alone:?}; cached {cached:?}");
        ensure!(got == want, "I1, {what}: {got:?} instead of {want:?}");
        // Eight reads at a time are soon enough, if each takes a tenth of a second.
        let harmless = what == "delay_enter=100000";
        ensure!(harmless || cached.iter().any(|cached| *cached < 320), "{what}: nothing went wrong: {cached:?}");
        if what.starts_with("error") {
            let errors = || metric(&cluster, "baton_kv_tier_disk_errors_total", "").ok();
            wait(|| (errors()? >= 1.0).then_some(()))?;
        }
        ensure!(slowest < 2 * alone + BOUND, "{what}: {slowest:?} for an answer that takes {alone:?} to compute");
        drop(fault);
        let (got, cached) = all(&cluster)?;
        ensure!(got == want, "I1, after {what}");
        // A disk that was slow is tried again after minutes.
        let comes = cached.iter().all(|cached| *cached >= 320);
        ensure!(comes || what.starts_with("delay"), "after {what}: {cached:?}");
        cluster.stop()?;
    }
    Ok(())
}
