//! What every transport must do, between pools in a device's memory: all of the suite that goes from device to device, or out of one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use baton_kernels::cuda::{Driver, HostDevice, Recorder, SharedPool, SharingDevice};
use baton_transfer::DeviceMemory;
use baton_transfer::conformance::{Setup, cases, child, set_up};

/// How the suite is run over a device.
struct How {
    /// What of UCX reaches its memory.
    ucx: &'static str,
    /// The test of this program that its other processes are.
    child: &'static str,
}

const HOST: How = How { ucx: "tcp", child: "transports::started_on_the_host" };
const DRIVER: How = How { ucx: "tcp,cuda_copy", child: "transports::started_with_a_driver" };

/// Pools on this device.
fn setup<D: SharingDevice>(device: &Arc<D>, how: &How) -> Setup {
    let device = Arc::clone(device);
    let memory = move |bytes| Arc::new(SharedPool::new(&device, bytes).expect("a pool")) as Arc<dyn DeviceMemory>;
    let child = ["--exact", how.child, "--nocapture", "--test-threads=1"].map(str::to_owned).to_vec();
    Setup { memory: Box::new(memory), ucx: how.ucx.to_owned(), child }
}

/// Every case; those that fail are named together.
fn run<D: SharingDevice>(device: D, how: &How) -> anyhow::Result<()> {
    let device = Arc::new(Recorder::new(device));
    set_up(setup(&device, how));
    let (cases, mut failed, mut known) = (cases(), Vec::new(), 0);
    ensure!(!cases.is_empty(), "there is nothing to hold it to");
    for case in &cases {
        let began = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(|| case.run())).is_ok();
        let problems = device.problems().split_off(known);
        known += problems.len();
        let said = if passed && problems.is_empty() { "ok" } else { "FAILED" };
        println!("{} ... {said} ({:.1} s) {}", case.name(), began.elapsed().as_secs_f64(), problems.join("; "));
        failed.extend((said != "ok").then(|| case.name()));
    }
    println!("{} cases, {} failed", cases.len(), failed.len());
    ensure!(failed.is_empty(), "failed: {failed:?}");
    ensure!(device.open_imports() == 0 && device.live_bytes() == 0, "memory or a peer's pool is left");
    Ok(())
}

#[test]
fn transports_keep_their_word_between_pools_of_kernels_on_the_host() -> anyhow::Result<()> {
    let Some(device) = HostDevice::for_tests() else { return Ok(()) };
    run(device, &HOST)
}

/// The same on a GPU, where there is one: its kernels, its copies, its memory opened by other processes.
#[test]
fn transports_keep_their_word_between_pools_of_a_driver() -> anyhow::Result<()> {
    match Driver::open(0) {
        Ok(device) => run(device, &DRIVER),
        Err(error) => {
            eprintln!("skipped: {error}");
            Ok(())
        }
    }
}

/// Not a test: processes that cases stop and kill.
#[test]
fn started_on_the_host() {
    child(|| HostDevice::for_tests().map(|device| setup(&Arc::new(device), &HOST)));
}

/// Not a test: processes that cases stop and kill.
#[test]
fn started_with_a_driver() {
    child(|| Driver::open(0).ok().map(|device| setup(&Arc::new(device), &DRIVER)));
}
