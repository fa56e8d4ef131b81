//! Disks that fail, or are slow, under a worker that runs: the kernel's answers to its reads and writes are changed (`strace --inject`).

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::cluster::{Cluster, models, wait};
use baton_tests::needs;

use super::{PROMPTS, all, all_on_disk, files, metric, options};

/// Some system calls of a worker on its disk are answered otherwise, until this is dropped.
struct Fault(Child);

/// Whether this host has what faults need; says so if not.
fn there() -> bool {
    let there = Command::new("strace").arg("--version").output().is_ok_and(|said| said.status.success());
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let may = rustix::process::geteuid().is_root() || matches!(scope.trim(), "" | "0");
    if !(there && may) {
        needs::left_out("needs strace, and to be allowed to attach it to a process, to change what the kernel answers");
    }
    there && may
}

impl Fault {
    /// `calls`, and what becomes of them, as `strace --inject` takes it.
    fn begins(cluster: &Cluster, folder: &std::path::Path, calls: &str, what: &str) -> anyhow::Result<Fault> {
        let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
        let mut command = Command::new("strace");
        command.args(["-f", "-p", &worker.pid.to_string(), "-o", "/dev/null", "-e", &format!("inject={calls}:{what}")]);
        for file in files(folder)? {
            command.arg("-P").arg(file);
        }
        let mut child = command.stderr(Stdio::piped()).spawn().context("strace")?;
        let mut said = BufReader::new(child.stderr.take().context("stderr")?);
        let (fault, mut line) = (Fault(child), String::new());
        // It may first say to which files the paths lead.
        while !line.contains(" attached") {
            ensure!(said.read_line(&mut line)? > 0, "{line}");
        }
        // What it says further must not fill the pipe.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Ok(fault)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // It leaves the worker as it was.
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
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
    if !there() {
        return Ok(());
    }
    let model = models::slow()?;
    let mut want = Vec::new();
    for error in ["ENOSPC", "EROFS", "EACCES"] {
        let folder = tempfile::tempdir()?;
        let cluster = Cluster::start(options(model.path(), 200, Some(folder.path()))?)?;
        let fault = Fault::begins(&cluster, folder.path(), "pwrite64,fallocate", &format!("error={error}"))?;
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

/// What cannot be read, and what comes too late, is computed, and costs no more than that and the time that a load may take.
#[test]
fn a_disk_that_fails_or_is_slow_costs_a_bounded_time() -> anyhow::Result<()> {
    if !there() {
        return Ok(());
    }
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let start = || Cluster::start(options(model.path(), 200, Some(folder.path()))?);
    let cluster = start()?;
    let begun = Instant::now();
    let want = all_on_disk(&cluster)?;
    let alone = begun.elapsed();
    cluster.stop()?;
    // A read takes a tenth of a second, or for ever.
    for what in ["error=EIO", "error=EACCES", "delay_enter=100000", "delay_enter=5000000"] {
        let cluster = start()?;
        wait(|| (on_disk(&cluster).ok()? >= 20.0 * PROMPTS as f64).then_some(()))?;
        let fault = Fault::begins(&cluster, folder.path(), "pread64", what)?;
        let begun = Instant::now();
        let (got, cached) = all(&cluster)?;
        ensure!(got == want, "I1, {what}: {got:?} instead of {want:?}");
        // Eight reads at a time are soon enough, if each takes a tenth of a second.
        let harmless = what == "delay_enter=100000";
        ensure!(harmless || cached.iter().any(|cached| *cached < 320), "{what}: nothing went wrong: {cached:?}");
        if what.starts_with("error") {
            let errors = || metric(&cluster, "baton_kv_tier_disk_errors_total", "").ok();
            wait(|| (errors()? >= 1.0).then_some(()))?;
        }
        let most = 2 * alone + Duration::from_secs(2 * PROMPTS);
        ensure!(begun.elapsed() < most, "{what}: {:?} for {PROMPTS} prompts; {alone:?} without", begun.elapsed());
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
